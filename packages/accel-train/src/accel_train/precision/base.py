"""Precisions: the dtypes that models compute in.

`Precision` is the null object: everything stays in the dtype that the user chose.
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
    """The dtypes of a precision, for strategies that cast by themselves; None: unchanged.

    Attributes:
        param: dtype that parameters are stored in.
        compute: dtype that forward and backward compute in.
        reduce: dtype that gradients are reduced in.
        output: dtype that floating-point outputs of a model are cast to.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None


@dataclass(frozen=True)
class PrecisionOptions:
    """The options that a precision is created with.

    Attributes:
        device_type: type of the device that computes, as in `torch.device.type`.
        autocast_enabled: whether prepared models run under autocast (`AutocastKwargs.enabled`).
        cache_enabled: autocast's weight cache; None is torch's default.
        scaler_kwargs: keyword arguments of `torch.amp.GradScaler`.
        recipe: the fp8 recipe: `AORecipeKwargs` or `TERecipeKwargs`.
    """

    device_type: str = "cpu"
    autocast_enabled: bool = True
    cache_enabled: bool | None = None
    scaler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    recipe: Any = None


class Precision:
    """Base class of all precisions, and itself the precision "no": nothing is cast or scaled."""

    name: ClassVar[str] = "no"
    #: The dtype that autocast computes in, None without autocast.
    dtype: ClassVar[torch.dtype | None] = None
    #: How far losses and weights of a small model may be from exact ones, relative: the bound of the conformance suite.
    tolerance: ClassVar[float] = 0.0

    #: The gradient scaler, None when gradients are not scaled.
    scaler: torch.amp.GradScaler | None = None

    def replace_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Use another gradient scaler, if the precision has one; None changes nothing if it has none.

        Raises:
            OptionError: this precision does not scale losses, or needs a scaler.
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
                f"mixed_precision={self.name!r} scales losses, so it needs a scaler. Create "
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
        """Register the function that rescales the gradients of all open windows when the loss scale changes."""

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
            OptionError: `enabled` is True, and this precision has no autocast.
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
        """Restore the own forward of `model`, if this precision has replaced it."""

    def before_sharding(self, module: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """Called before parameters are divided among ranks, and gathered whenever they are used.

        Args:
            module: a model or a part of it, converted.
            whole: its parameters that are not divided.
        """

    def after_sharding(self, model: nn.Module, prepared: nn.Module) -> None:
        """Called after the parameters of a model are divided.

        Args:
            model: the model.
            prepared: the module that the script calls for it.
        """

    def values_changed(self, model: nn.Module) -> None:
        """Called on all ranks after the values of a divided model changed by other means than an optimizer's step."""

    def backward(self, loss: Tensor, has_pending_grads: bool, kwargs: dict[str, Any]) -> None:
        """Run backward.

        Args:
            loss: the loss.
            has_pending_grads: gradients of an open window, computed before this call, wait for a step.
            kwargs: arguments of `Tensor.backward`.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def settle_scale(self, has_pending_grads: bool) -> None:
        """Apply a postponed update of the loss scale, before gradients of scaled losses are computed.

        `backward` does so itself; an engine that computes gradients in other ways calls this.

        Args:
            has_pending_grads: as of `backward`.
        """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale; further calls in the same step change nothing."""

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step an optimizer.

        Returns:
            Whether it stepped (False: gradients were not finite), and the return value of its `step`.
        """
        return True, optimizer.step(closure) if closure is not None else optimizer.step()

    def share_found(self, optimizer: torch.optim.Optimizer, highest: Callable[[Tensor], Tensor]) -> None:
        """Skip the coming step of an optimizer on all ranks if any of them has gradients that are not finite.

        Ranks that hold different parameters call this before `step`.

        Args:
            optimizer: the optimizer.
            highest: a collective that returns the highest value of any rank.
        """

    @property
    def loss_scale(self) -> float:
        """The factor of losses, and so of gradients before `unscale_`."""
        return 1.0

    def forget_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's gradients are dropped, unscaled or not."""

    def update_scale(self) -> None:
        """Apply an update of the loss scale that was postponed until no scaled gradient waits."""

    def share_scale(self, lowest: Callable[[Tensor], Tensor]) -> None:
        """Use the lowest loss scale of any rank, after ranks stepped with their own gradients.

        Args:
            lowest: a collective that returns the lowest values of any rank.
        """

    @property
    def has_state(self) -> bool:
        """Whether checkpoints include a state of this precision, because it overrides `state_dict`."""
        return type(self).state_dict is not Precision.state_dict

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any] | None:
        """The state for a checkpoint, including values that wait between steps; None: there is none.

        Args:
            optimizers: all optimizers, in the order in which `load_state_dict` will get them.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Load what `state_dict` returned."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        return self  # a copied optimizer still uses its accelerator's scaler
