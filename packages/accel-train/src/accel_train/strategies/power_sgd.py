"""PowerSGD gradient compression for DDP, whose error feedback is part of the training state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accel_state.messages import warn
from accel_train.plugins.ddp import DistributedDataParallelKwargs

__all__ = ["PowerSGDHooks"]

_COUNTS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")
_SAME_OPTIONS = "Use the same DistributedDataParallelKwargs as the script that saved it"


class _PowerSGD:
    """The communication hook of one model.

    The hook's state belongs to buckets, by number. DDP forms other buckets after its first backward, in the order in
    which gradients were ready. So a resumed run needs the buckets of the saved run before its first backward;
    `load_state` restores them.

    Args:
        wrapped: the model; the hook is registered on it.
        state: state of the hook.
        hook: compresses and reduces a bucket.
        options: options that the state depends on, as plain data.
    """

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        state: PowerSGDState,
        hook: Callable[..., Any],
        options: Mapping[str, Any],
    ) -> None:
        self._state = state
        self._hook = hook
        self._options = dict(options)
        self._names = {id(p): name for name, p in wrapped.module.named_parameters()}
        self._layout: dict[int, list[str]] = {}  # bucket -> names of its parameters
        self._backwards = 0
        self._settling = False
        self._settled = False  # the buckets do not change any more
        self._expected: dict[int, list[str]] | None = None
        if next(wrapped.module.parameters()).device.type == "cpu":
            state.process_group = _InOrder(state.process_group)
        wrapped.register_comm_hook(self, _communicate)

    def communicate(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket; called by DDP during backward."""
        if self._settling:
            return default_hooks.allreduce_hook(self._state.process_group, bucket)
        if self._backwards < 2:  # buckets change once, after the first backward
            self._layout[bucket.index()] = [self._names[id(p)] for p in bucket.parameters()]
            if bucket.is_last():
                self._backwards += 1
                self._settled = self._settled or self._backwards == 2
            self._check_layout(bucket.index())
        reduced: torch.futures.Future[Tensor] = self._hook(self._state, bucket)
        return reduced

    def _check_layout(self, index: int) -> None:
        if self._expected is None or self._expected.get(index) == self._layout[index]:
            return
        warn(
            "The buckets of DDP hold other gradients than when the state was saved, so PowerSGD begins with new "
            "approximations and without the errors of before: the run does not continue exactly.",
        )
        self._expected = None
        for name in _TENSORS:
            getattr(self._state, name).clear()

    # State

    def tensors(self) -> list[Tensor]:
        """The errors of compression, and the approximations that the next one starts from."""
        return [tensor for name in _TENSORS for tensor in getattr(self._state, name).values()]

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors of this rank."""
        kind, keys, position, has_gauss, cached = cast("tuple[Any, ...]", self._state.rng.get_state())
        return {
            "options": self._options,
            # What is remembered before the second backward does not depend on buckets: PowerSGD begins later.
            "layout": {str(i): list(names) for i, names in self._layout.items()} if self._settled else {},
            "random": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
            **{name: getattr(self._state, name) for name in _COUNTS},
            **{name: {str(i): t for i, t in getattr(self._state, name).items()} for name in _TENSORS},
        }

    def misfit(self, saved: Mapping[str, Any]) -> str | None:
        """Why a run cannot continue from a state; None: it can."""
        options = saved["options"]
        if options != self._options:
            return (
                f"its comm_hook has the options {options}, and here they are {self._options}. {_SAME_OPTIONS}"
            )
        unknown = {name for names in saved["layout"].values() for name in names} - set(self._names.values())
        if not unknown:
            return None
        return f"its comm_hook compresses {', '.join(sorted(unknown)[:5])}, not here. {_SAME_OPTIONS}"

    def load_state_dict(self, saved: Mapping[str, Any], wrapped: DistributedDataParallel) -> None:
        """Continue from what `state_dict` returned; a collective before the first backward of a model."""
        layout = {int(index): list(names) for index, names in saved["layout"].items()}
        remembers = any(saved[name] for name in _TENSORS)
        if not self._backwards and not self._settle(layout, wrapped) and remembers:
            return
        state = self._state
        kind, keys, position, has_gauss, cached = saved["random"]
        state.rng.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
        for name in _COUNTS:
            setattr(state, name, saved[name])
        device = next(wrapped.module.parameters()).device
        for name in _TENSORS:
            values = {int(index): tensor.to(device).clone() for index, tensor in saved[name].items()}
            setattr(state, name, values)
        self._expected = layout if remembers else None

    def _settle(self, layout: Mapping[int, list[str]], wrapped: DistributedDataParallel) -> bool:
        """Make DDP form the buckets of a saved run, by a backward in which gradients are ready in their order."""
        if not layout or wrapped.find_unused_parameters:  # buckets do not change then
            return True
        if wrapped.static_graph:
            warn(
                "PowerSGD starts again: with static_graph=True DDP cannot form the buckets of the saved state. "
                "Leave static_graph out to continue exactly.",
            )
            return False
        parameters = dict(wrapped.module.named_parameters())
        self._settling = True
        try:
            wrapped.reducer.prepare_for_backward([])
            for index in sorted(layout):
                for name in layout[index]:
                    parameter = parameters[name]
                    torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
        finally:
            self._settling = False
        for parameter in parameters.values():
            parameter.grad = None
        self._layout, self._settled = dict(layout), True
        return True


class PowerSGDHooks:
    """The hooks of all models, and what a training state has of them."""

    def __init__(self) -> None:
        self._hooks: WeakKeyDictionary[DistributedDataParallel, _PowerSGD] = WeakKeyDictionary()

    def register(self, wrapped: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
        """Register the communication hook that the script has chosen, if any, and follow the state of PowerSGD's."""
        found = handler.communication_hook()
        if found is None or not hasattr(found[0], "error_dict"):
            handler.register_comm_hook(wrapped)
            return
        state, hook = found
        options = {
            "comm_hook": str(handler.comm_hook),
            "comm_wrapper": str(handler.comm_wrapper),
            "bucket_cap_mb": handler.bucket_cap_mb,
            **handler.comm_state_option,
        }
        self._hooks[wrapped] = _PowerSGD(wrapped, state, hook, options)

    def tensors(self, wrapped: DistributedDataParallel) -> list[Tensor]:
        """What the hook of a model keeps between steps."""
        hook = self._hooks.get(wrapped)
        return [] if hook is None else hook.tensors()

    def state_dict(self, wrapped: DistributedDataParallel) -> dict[str, Any]:
        """An entry for the state of a model; empty if it does not use PowerSGD."""
        hook = self._hooks.get(wrapped)
        return {} if hook is None else {"power_sgd": hook.state_dict()}

    def misfit(self, wrapped: DistributedDataParallel, saved: Mapping[str, Any]) -> str | None:
        """Why a run cannot continue from a state; None: it can, which may begin or stop using PowerSGD."""
        hook = self._hooks.get(wrapped)
        return hook.misfit(saved["power_sgd"]) if hook is not None and "power_sgd" in saved else None

    def load_state_dict(self, wrapped: DistributedDataParallel, saved: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        hook = self._hooks.get(wrapped)
        if "power_sgd" not in saved:
            return
        if hook is None:
            warn(
                "The state was saved with PowerSGD, which this run does not use: the errors that its next steps would "
                "have corrected are dropped.",
            )
        else:
            hook.load_state_dict(saved["power_sgd"], wrapped)


class _InOrder(dist.ProcessGroup):
    """A process group whose reductions are complete when they return.

    The hook reduces three times, each in a callback of the one before. On CPUs a callback runs in a thread of gloo,
    unless the reduction is complete already. In a thread of gloo, products of matrices round otherwise, and the
    reductions of two buckets would come in another order on each rank, which ends the process.

    Args:
        group: what reduces; None: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        found: Any = dist.group.WORLD if group is None else group
        super().__init__(found.rank(), found.size())  # type: ignore[call-arg]  # its stub lacks this form
        self._group = found

    def allreduce(self, *arguments: Any) -> dist.Work:
        """Reduce, and wait for it."""
        work: dist.Work = self._group.allreduce(*arguments)
        work.wait()
        return work


def _communicate(hook: _PowerSGD, bucket: Any) -> torch.futures.Future[Tensor]:
    return hook.communicate(bucket)


_communicate.__annotations__.clear()  # DDP compares them with types, and these are strings
