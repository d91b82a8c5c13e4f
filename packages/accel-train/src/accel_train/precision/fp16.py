"""float16 under autocast, with a gradient scaler; on the CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from accel_ckpt.parts import is_sharded
from accel_train.errors import AccumulationError, OptionError, PrepareError
from accel_train.optimizer_parameters import parameters_of
from accel_train.precision.autocast import AutocastPrecision
from accel_train.precision.base import PrecisionOptions

__all__ = ["FP16Precision", "Scaler"]


class Scaler(torch.amp.GradScaler):
    """torch's gradient scaler, which also unscales gradients in host memory, and those of which ranks hold parts.

    Torch (2.13) copies the factor and the flag to the host without waiting for them, and reads them there at once. It
    takes no whole and divided tensors together, and asks only the ranks that the first tensor is divided among whether
    they found inf.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = list(parameters_of(optimizer))
        if inv_scale.device.type != "cpu" and any(
            p.grad is not None and p.grad.device.type == "cpu" for p in parameters
        ):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        groups = _divided_among(parameters)
        if not groups:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        own = super()._unscale_grads_(_own_parts(parameters), inv_scale, found_inf, allow_fp16)
        return _found_by_any(own, groups)


def _divided_among(parameters: Iterable[Any]) -> list[tuple[Any, torch.device]]:
    """The groups of ranks that tensors are divided among, each once, and the device on which they communicate."""
    found: dict[str, tuple[Any, torch.device]] = {}
    for parameter in filter(is_sharded, parameters):
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                group = mesh.get_group(dimension)
                found.setdefault(group.group_name, (group, torch.device(mesh.device_type)))
    return list(found.values())


def _own_parts(parameters: Iterable[Any]) -> Any:
    """What the scaler reads of an optimizer, with this rank's parts of gradients."""
    held = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if is_sharded(parameter.grad) else parameter.grad
            holder = gradient.detach()
            holder.grad = gradient
            held.append(holder)
    return SimpleNamespace(param_groups=[{"params": held}])


def _found_by_any(
    own: dict[torch.device, Tensor], groups: list[tuple[Any, torch.device]]
) -> dict[torch.device, Tensor]:
    """What `_unscale_grads_` returns, where ranks found inf in parts of the same gradients. Collective.

    Args:
        own: whether this rank found inf, by device; empty: it holds no gradients.
        groups: as of `_divided_among`.
    """
    device = groups[0][1]
    flags = [flag.to(device).reshape(()) for flag in own.values()]
    nothing = torch.zeros((), device=device)
    found = torch.stack([*flags, nothing]).max()
    state = torch.stack([found, nothing + bool(own)])
    for group, _ in groups:
        dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
    if own:
        return {where: state[0].to(where) for where in own}
    return {device: state[0]} if state[1] else {}


class FP16Precision(AutocastPrecision):
    """Autocast in float16; losses are scaled so that small gradients survive, steps with inf or NaN are skipped.

    One scaler serves every optimizer. Its scale may only change when no scaled gradient is waiting, so `update()` is
    postponed from the step to the next backward that opens a window; with several optimizers, torch's rule "update
    once, after all of them" holds whatever their order. An optimizer that steps again while gradients of another wait
    forces the update; the waiting gradients are then rescaled.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype | None] = torch.float16
    tolerance: ClassVar[float] = 5e-3

    scaler: torch.amp.GradScaler

    def __init__(self, options: PrecisionOptions) -> None:
        super().__init__(options)
        self.scaler = Scaler(options.device_type, **dict(options.scaler_kwargs))
        self._unscaled: dict[
            int, torch.optim.Optimizer
        ] = {}  # unscaled since the last update, not yet stepped
        self._update_due = False
        self._stepped: set[int] = set()  # optimizers, since the last update
        self._spent: set[int] = set()  # optimizers, since the last backward
        self._rescale: Callable[[float], None] | None = None

    def on_scale_change(self, rescale: Callable[[float], None]) -> None:
        """Register the function that rescales the gradients of all open windows when the loss scale changes."""
        self._rescale = rescale

    def backward(self, loss: Tensor, has_pending_grads: bool, kwargs: dict[str, Any]) -> None:
        """Scale the loss and run backward.

        Raises:
            AccumulationError: gradients that were already unscaled (for clipping) would be mixed with scaled ones.
        """
        self.settle_scale(has_pending_grads)
        self.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def settle_scale(self, has_pending_grads: bool) -> None:
        """Apply a postponed update, unless scaled gradients wait.

        Raises:
            AccumulationError: gradients that were already unscaled would be mixed with scaled ones.
        """
        if self._unscaled:
            self._forget_empty()
        if self._update_due and not has_pending_grads:
            self.update_scale()
        self._spent.clear()

    def _forget_empty(self) -> None:
        for key, optimizer in list(self._unscaled.items()):
            if any(p.grad is not None for p in parameters_of(optimizer)):
                raise AccumulationError(
                    "backward() was called after the gradients of an optimizer were unscaled (by clipping or "
                    "unscale_gradients()) and before it stepped: scaled and unscaled gradients would be added up. "
                    "Clip once, after the last backward (inside `if accelerator.sync_gradients:`), then step or "
                    "zero_grad."
                )
            del self._unscaled[key]
            self._update_due = True

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `GradScaler.unscale_`, once until the optimizer steps."""
        key = id(optimizer)
        if key in self._unscaled or key in self._spent:
            return
        if not self._check_scaled(optimizer):
            return
        if key in self._stepped:
            self._update_while_others_wait()
        try:
            self.scaler.unscale_(optimizer)
        except ValueError as error:
            raise PrepareError(
                f"{error} Under mixed_precision='fp16' parameters must be float32, because gradients in float16 lose "
                "small values: leave out model.half(), or load the model with dtype=torch.float32. Autocast computes "
                "in float16."
            ) from error
        self._unscaled[key] = optimizer

    def _check_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loss was ever scaled; without one there must be no gradients."""
        if self.scaler._scale is not None or not self.scaler.is_enabled():
            return True
        if any(p.grad is not None for p in parameters_of(optimizer)):
            raise AccumulationError(
                "The optimizer holds gradients that were not scaled: the loss went to loss.backward(). Under "
                "mixed_precision='fp16' call accelerator.backward(loss) instead, which scales it."
            )
        return False

    def share_found(self, optimizer: torch.optim.Optimizer, highest: Callable[[Tensor], Tensor]) -> None:
        """Unscale, and let the scaler know what any rank has found; also on ranks whose optimizer has no gradients."""
        self.unscale_(optimizer)
        if self.scaler._scale is None:
            return  # no rank has scaled a loss
        device = self.scaler._scale.device
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        flags = [torch.zeros(1, device=device), *(flag.to(device).reshape(1) for flag in found.values())]
        worst = highest(torch.cat(flags).amax())
        for flag in found.values():
            flag.fill_(worst)
        if not found:
            found[device] = worst

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step unless a gradient is inf or NaN.

        Raises:
            OptionError: a closure was given; it would have to be re-run under the scaler.
        """
        if closure is not None:
            raise OptionError(
                "optimizer.step(closure) cannot be combined with mixed_precision='fp16': the gradient scaler must see "
                "the gradients before the optimizer does. Use 'bf16', or an optimizer without a closure."
            )
        self.unscale_(optimizer)
        self._unscaled.pop(id(optimizer), None)
        found = [bool(flag.item()) for flag in self.scaler._found_inf_per_device(optimizer).values()]
        if (
            not found
        ):  # the optimizer holds no gradients, and the scaler refuses to step what it never checked
            return True, optimizer.step()
        self._stepped.add(id(optimizer))
        self._spent.add(id(optimizer))
        self._update_due = True
        return not any(found), self.scaler.step(optimizer)

    @property
    def loss_scale(self) -> float:
        """The scaler's scale."""
        return self.scaler.get_scale()

    def forget_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget that the gradients, which are dropped now, were unscaled."""
        if self._unscaled.pop(id(optimizer), None) is not None:
            self._update_due = True

    def update_scale(self) -> None:
        """Let the scale grow or shrink after the last steps."""
        # An update would forget which optimizers were unscaled, and their step would unscale them again.
        if self._update_due and not self._unscaled:
            self.scaler.update()
            self._update_due = False
            self._stepped.clear()

    def share_scale(self, lowest: Callable[[Tensor], Tensor]) -> None:
        """Take over the lowest scale of any rank, and the lowest number of steps since it grew."""
        before = self.scaler.get_scale()
        self.update_scale()
        state = self.scaler.state_dict()
        own = torch.tensor([state["scale"], state["_growth_tracker"]], device=self.options.device_type)
        scale, tracker = lowest(own.double()).tolist()
        self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})
        if scale != before and self._rescale is not None:
            self._rescale(scale / before)

    def _update_while_others_wait(self) -> None:
        before = self.scaler.get_scale()
        self.update_scale()
        factor = self.scaler.get_scale() / before
        if factor != 1.0 and self._rescale is not None:
            self._rescale(factor)

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """The scaler's own state, and under ``pending`` the values for its next update."""
        waiting = self.scaler._per_optimizer_states
        pending = {}
        for number, optimizer in enumerate(optimizers):
            if id(optimizer) in waiting:
                state = waiting[id(optimizer)]
                pending[number] = {
                    "stage": state["stage"].name,
                    "found_inf": max(
                        (flag.item() for flag in state["found_inf_per_device"].values()), default=None
                    ),
                    "unscaled": id(optimizer) in self._unscaled,
                    "stepped": id(optimizer) in self._stepped,
                    "spent": id(optimizer) in self._spent,
                }
        return {**self.scaler.state_dict(), "pending": pending, "update_due": self._update_due}

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Load what `state_dict` returned."""
        own = {key: value for key, value in state.items() if key not in ("pending", "update_due")}
        self.scaler.load_state_dict(own)
        device = torch.device(self.options.device_type)
        self.scaler.scale(
            torch.zeros((), device=device)
        )  # the scaler makes its tensors when it is first used
        self._unscaled.clear()
        self._stepped.clear()
        self._spent.clear()
        waiting = self.scaler._per_optimizer_states
        waiting.clear()
        for number, saved in state.get("pending", {}).items():
            optimizer = optimizers[number]
            found = saved["found_inf"]
            waiting[id(optimizer)]["stage"] = OptState[saved["stage"]]
            if found is not None:
                waiting[id(optimizer)]["found_inf_per_device"] = {device: torch.tensor(found, device=device)}
            if saved["unscaled"]:
                self._unscaled[id(optimizer)] = optimizer
            if saved["stepped"]:
                self._stepped.add(id(optimizer))
            if saved["spent"]:
                self._spent.add(id(optimizer))
        self._update_due = bool(state.get("update_due", False))

    def __getstate__(self) -> dict[str, Any]:
        self.update_scale()  # the scaler pickles only between steps
        return dict(self.__dict__)
