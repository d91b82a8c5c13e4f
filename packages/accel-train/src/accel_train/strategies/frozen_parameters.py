"""Parameters that are frozen when ddp wraps a model: it neither averages their gradients nor sends some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_train.errors import PrepareError

__all__ = ["as_bytes", "first_unfrozen", "guard", "remove_guards"]


class _Guard:
    """Forward pre-hook that refuses to train parameters whose gradients would not be averaged.

    DDP averages those of parameters that require gradients when it is built. One that is unfrozen later would get each
    rank's own gradient, and ranks would silently drift apart.

    Args:
        frozen: the parameters that required none, by name.
    """

    def __init__(self, frozen: Mapping[str, nn.Parameter]) -> None:
        self.frozen = frozen

    def first_unfrozen(self) -> str | None:
        return next((name for name, parameter in self.frozen.items() if parameter.requires_grad), None)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and (name := self.first_unfrozen()) is not None:
            raise PrepareError(
                f"Parameter {name!r} was frozen when the model was prepared and requires a gradient now, which ddp "
                "would not average over ranks. Prepare the model again after unfreezing: "
                "`model = accelerator.prepare(model)`."
            )


def guard(model: nn.Module, frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse to train these parameters of a model from now on."""
    model.register_forward_pre_hook(_Guard(frozen))


def first_unfrozen(model: nn.Module) -> str | None:
    """Name of a parameter that is guarded and requires a gradient now; None: there is none."""
    guards = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Guard))
    return next(filter(None, (hook.first_unfrozen() for hook in guards)), None)


def remove_guards(model: nn.Module) -> None:
    """Allow all parameters again: the model is about to be wrapped."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _Guard):
            del model._forward_pre_hooks[key]


@contextmanager
def as_bytes(frozen: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which 8-bit floating point, as layerwise casting stores it, is bytes: gloo sends only those."""
    small = [(p, p.dtype) for p in frozen if p.is_floating_point() and p.element_size() == 1]
    for parameter, _ in small:
        parameter.data = parameter.data.view(torch.uint8)
    try:
        yield
    finally:
        for parameter, dtype in small:
            parameter.data = parameter.data.view(dtype)
