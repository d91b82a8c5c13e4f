"""Undo what a precision did to a model, whichever accelerator did it."""

from __future__ import annotations

import sys

from torch import nn

from accel_train.precision.autocast import restore_forward

__all__ = ["restore_model"]


def restore_model(model: nn.Module) -> None:
    """Restore a model's own forward and layers, except layers that are divided among ranks."""
    restore_forward(model)
    # Nothing was converted by a library that is not imported.
    if "torchao.float8" in sys.modules:
        from accel_train.precision.fp8.ao import restore_linear_layers

        restore_linear_layers(model)
    if "transformer_engine.pytorch" in sys.modules:
        from accel_train.precision.fp8.te import restore_layers

        restore_layers(model)
