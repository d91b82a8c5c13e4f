"""The precision fp8: linear layers in 8-bit floating point, everything else in bfloat16 under autocast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accel_train.plugins import AORecipeKwargs, TERecipeKwargs
from accel_train.precision.autocast import AutocastPrecision
from accel_train.precision.base import PrecisionOptions
from accel_train.precision.fp8.layers import Fp8Layers

__all__ = ["FP8Precision"]


class FP8Precision(AutocastPrecision):
    """Parameters stay as they are; what is not computed in fp8 is computed in bfloat16.

    Args:
        options: `options.recipe` selects the library; None: torchao.

    Raises:
        IncompatibleOptionsError: the library cannot compute in fp8 on the device.
    """

    name: ClassVar[str] = "fp8"
    dtype: ClassVar[torch.dtype | None] = torch.bfloat16
    tolerance: ClassVar[float] = 0.1  # numbers in fp8 have 3 bits after the first

    def __init__(self, options: PrecisionOptions) -> None:
        super().__init__(options)
        self.layers = _layers_of(options)

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers, and put autocast and the library's own context around `model.forward`."""
        return super().convert(self.layers.convert(model))

    def wrap(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward under autocast, inside the library's own context."""
        return self.layers.wrap(model, super().wrap(model, forward))

    def before_sharding(self, module: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """Weights that may be gathered in fp8 are marked for it."""
        self.layers.before_sharding(module, whole)

    def after_sharding(self, model: nn.Module, prepared: nn.Module) -> None:
        """The library finds the parts of weights that are gathered in fp8."""
        self.layers.after_sharding(model, prepared)

    def values_changed(self, model: nn.Module) -> None:
        """Discard values that the library derived from the parameters, such as scales."""
        self.layers.values_changed(model)

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer, then let the library follow."""
        stepped, result = super().step(optimizer, closure)
        self.layers.after_step(optimizer)
        return stepped, result

    @property
    def has_state(self) -> bool:
        """Whether the library's layers learn anything beside the parameters."""
        return self.layers.has_state

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any] | None:
        """The state that the library's layers have besides parameters."""
        return self.layers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Go back to what `state_dict` returned."""
        self.layers.load_state_dict(state)


def _layers_of(options: PrecisionOptions) -> Fp8Layers:
    # Imported here because each imports its library, which takes a second.
    if isinstance(options.recipe, TERecipeKwargs):
        from accel_train.precision.fp8.te import TELayers

        return TELayers(options.recipe, options.device_type)
    from accel_train.precision.fp8.ao import AOLayers

    return AOLayers(options.recipe or AORecipeKwargs(), options.device_type)
