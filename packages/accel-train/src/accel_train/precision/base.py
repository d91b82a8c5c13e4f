"""The precision axis: which numbers are computed with.

`Precision` is the null object of the axis: everything in the dtype that the user chose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accel_train.errors import ArgumentTypeError, OptionError

__all__ = ["DTypePolicy", "Precision", "PrecisionOptions"]


@dataclass(frozen=True)
class DTypePolicy:
    """The dtypes of a precision, for strategies that cast by themselves; None: as they are.

    Attributes:
        param: what parameters are stored in.
        compute: what forward and backward compute in.
        reduce: what gradients are reduced in.
        output: what floating outputs of a model are cast to.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None


@dataclass(frozen=True)
class PrecisionOptions:
    """What the resolver hands to a precision.

    Attributes:
        device_type: type of the device that computes, as in `torch.device.type`.
        autocast_enabled: whether the automatic cast of prepared models is on (`AutocastKwargs.enabled`).
        cache_enabled: autocast's weight cache; None is torch's default.
        scaler_kwargs: keyword arguments of `torch.amp.GradScaler`.
        recipe: how fp8 is computed: `AORecipeKwargs` or `TERecipeKwargs`.
    """

    device_type: str = "cpu"
    autocast_enabled: bool = True
    cache_enabled: bool | None = None
    scaler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    recipe: Any = None


class Precision:
    """Nothing is cast and nothing is scaled."""

    name: ClassVar[str] = "no"
    #: The dtype that autocast computes in, None without autocast.
    dtype: ClassVar[torch.dtype | None] = None
    #: How far losses and weights of a small model may be from exact ones, relative: the bound of the conformance suite.
    tolerance: ClassVar[float] = 0.0

    #: The gradient scaler, None when gradients are not scaled.
    scaler: torch.amp.GradScaler | None = None

    def replace_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Use another scaler, of a precision that has one; None where there is none changes nothing.

        Raises:
            OptionError: this precision scales no losses, or cannot go without.
        """
        if scaler is self.scaler:
            return
        if self.scaler is None:
            raise OptionError(
                f"mixed_precision={self.name!r} scales no losses, so a {type(scaler).__name__} would never be used. "
                "Create Accelerator(mixed_precision='fp16')."
            )
        if scaler is None:
            raise OptionError(
                f"mixed_precision={self.name!r} scales its losses and cannot go without a scaler. Create "
                "Accelerator(mixed_precision='no'), or a scaler with enabled=False."
            )
        self.scaler = scaler

    def __init__(self, options: PrecisionOptions) -> None:
        self.options = options
        self._uses_autocast = self.dtype is not None

    @property
    def dtypes(self) -> DTypePolicy:
        """The dtypes, for strategies that cast by themselves."""
        return DTypePolicy()

    def on_scale_change(self, rescale: Callable[[float], None]) -> None:
        """Register what multiplies the gradients of all open windows when the loss scale changes under them."""

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[object]:
        """Context for code outside a prepared model, such as a loss function."""
        return contextlib.nullcontext()

    @property
    def uses_autocast(self) -> bool:
        """Whether `autocast()`, and models prepared from now on, compute in `dtype`."""
        return self._uses_autocast

    def use_autocast(self, enabled: bool) -> None:
        """Switch autocast on or off, for `autocast()` and for models that are prepared from now on.

        Models that are prepared already, and the gradient scaler, do not change.

        Raises:
            ArgumentTypeError: `enabled` is neither True nor False.
            OptionError: it is to be switched on, and this precision has none.
        """
        if not isinstance(cast(object, enabled), bool):
            raise ArgumentTypeError(
                f"native_amp takes True or False, got {type(enabled).__name__}: {enabled!r:.80}."
            )
        if enabled and self.dtype is None:
            raise OptionError(
                f"native_amp=True needs autocast, which mixed_precision={self.name!r} does not have. Create "
                "Accelerator(mixed_precision='bf16') or 'fp16'."
            )
        self._uses_autocast = enabled

    def convert(self, model: nn.Module) -> nn.Module:
        """Make a model compute in this precision; `restore` undoes it.

        Returns:
            `model` itself, or a module that takes its place.
        """
        return model

    def restore(self, model: nn.Module) -> None:
        """Give `model` its own forward back, if this precision had replaced it."""

    def before_sharding(self, module: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """Parameters are about to be divided among ranks, and gathered whenever they are used.

        Args:
            module: a model or a part of it, converted.
            whole: those of its parameters that are not divided.
        """

    def after_sharding(self, model: nn.Module, prepared: nn.Module) -> None:
        """The parameters of a model are divided.

        Args:
            model: the model.
            prepared: what the script calls for it.
        """

    def values_changed(self, model: nn.Module) -> None:
        """A divided model was given other values than an optimizer's step gives it. On all ranks."""

    def backward(self, loss: Tensor, has_pending_grads: bool, kwargs: dict[str, Any]) -> None:
        """Run backward.

        Args:
            loss: what to differentiate.
            has_pending_grads: gradients of an open window, computed before this call, wait for a step.
            kwargs: arguments of `Tensor.backward`.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of an optimizer to their true size, once per step however often it is asked."""

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer.

        Returns:
            Whether it really stepped (False: gradients were not finite), and what its `step` returned.
        """
        return True, optimizer.step(closure) if closure is not None else optimizer.step()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with, and so the gradients before `unscale_`."""
        return 1.0

    def forget_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's gradients are dropped, unscaled or not."""

    def update_scale(self) -> None:
        """Apply an update of the loss scale that was put off until no scaled gradient waits."""

    def share_scale(self, lowest: Callable[[Tensor], Tensor]) -> None:
        """Use the lowest loss scale of any rank, after ranks stepped with gradients of their own.

        Args:
            lowest: the collective that gives the lowest values of any rank.
        """

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint keeps anything of this precision: where it has its own `state_dict`."""
        return type(self).state_dict is not Precision.state_dict

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any] | None:
        """What a checkpoint keeps, with what waits between steps, which stays as it is; None: nothing.

        Args:
            optimizers: all that are trained, in an order that `load_state_dict` is given again.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Go back to what `state_dict` returned."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        return self  # a copied optimizer still uses its accelerator's scaler
