"""Data parallelism with `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel_train.errors import PrepareError
from accel_train.strategies.base import Capabilities, Strategy, StrategyOptions

__all__ = ["DDPStrategy"]


class DDPStrategy(Strategy):
    """Every rank holds the whole model; gradients are averaged over ranks during backward."""

    name: ClassVar[str] = "ddp"
    capabilities: ClassVar[Capabilities] = Capabilities(needs_process_group=True)

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.gradient_averaging_ranks = options.world_size

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Wrap a model that has something to train; a frozen one needs no reduction and stays itself."""
        if self.is_wrapped(model):
            return model  # compiled around it
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _remove_guards(model)
        if not trainable:
            if frozen:
                model.register_forward_pre_hook(_FrozenGuard(frozen))
            return model
        meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if meta:
            raise PrepareError(
                f"Parameter {meta[0]!r} (of {len(meta)}) has no storage (it is on the meta device), so ddp cannot "
                "broadcast it. Load the weights before prepare()."
            )
        device = self.options.device
        # DDP takes device_ids only for single-device modules on an accelerator with an index.
        device_ids = [device.index] if device.type != "cpu" and device.index is not None else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **cast(Any, self.options.ddp_kwargs))
        if self.options.comm_hook is not None:
            cast(Any, self.options.comm_hook)(wrapped)
        if frozen:
            wrapped.register_forward_pre_hook(_FrozenGuard(frozen))
        return wrapped

    def is_wrapped(self, model: nn.Module) -> bool:
        """Whether `model` is a DDP wrapper, compiled or not."""
        return isinstance(_ddp_of(model), DistributedDataParallel)

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether a parameter that was frozen when the model was wrapped is trained now."""
        return any(guard.thawed() is not None for guard in _guards_of(_ddp_of(model)))

    def keeps_replicas(self, model: nn.Module) -> bool:
        """True of a model whose gradients it averages."""
        return isinstance(_ddp_of(model), DistributedDataParallel)

    def replica_state(self, model: nn.Module) -> dict[str, Any]:
        """Whether the next forward takes over rank 0's buffers, which it does not inside an accumulation window."""
        inner = _ddp_of(model)
        if not isinstance(inner, DistributedDataParallel):
            return {}
        return {"takes_buffers": inner.require_forward_param_sync}

    def restore_replica(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Go back to what `replica_state` returned."""
        inner = _ddp_of(model)
        if isinstance(inner, DistributedDataParallel):
            inner.require_forward_param_sync = state.get("takes_buffers", True)

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Switch the reduction of the next backward passes, as DDP's own `no_sync` does."""
        inner = _ddp_of(model)
        if isinstance(inner, DistributedDataParallel) and _can_hold_back(inner):
            inner.require_backward_grad_sync = enabled

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP's `no_sync`."""
        inner = _ddp_of(model)
        if isinstance(inner, DistributedDataParallel) and _can_hold_back(inner):
            return cast("AbstractContextManager[None]", inner.no_sync())
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward although its forwards ran under `no_sync`.

        DDP decides in forward whether to reduce; this prepares its reducer after the fact.
        """
        inner = _ddp_of(model)
        if not isinstance(inner, DistributedDataParallel):
            yield
            return
        previous = inner.require_backward_grad_sync, inner.require_forward_param_sync
        inner.require_backward_grad_sync = inner.require_forward_param_sync = True
        # Unused parameters cannot be found without the forward's outputs: every one is awaited.
        inner.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            inner.require_backward_grad_sync, inner.require_forward_param_sync = previous

    def join(
        self, joinables: Sequence[object], *, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[object]:
        """Torch's `Join` over the given models and optimizers."""
        inner = [_ddp_of(item) if isinstance(item, nn.Module) else item for item in joinables]
        wrong = [type(item).__name__ for item in inner if not isinstance(item, Joinable)]
        if wrong:
            raise PrepareError(
                f"join_uneven_inputs() takes models and optimizers that support torch's Join; got {wrong[0]}. "
                "Pass the objects that prepare() returned."
            )
        return Join(
            cast("list[Joinable]", inner),
            enable=True,
            throw_on_early_termination=throw_on_early_termination,
        )


def _ddp_of(model: nn.Module) -> nn.Module:
    """The DDP module inside a compiled wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def _can_hold_back(model: DistributedDataParallel) -> bool:
    # With a static graph torch learns the graph from a first backward that reduces, and fails without it. Reducing
    # every micro-batch gives the same gradients.
    return not model.static_graph


class _FrozenGuard:
    """Forward pre-hook that refuses to train parameters whose gradients would not be reduced.

    DDP reduces the parameters that require gradients when it is built. One that is unfrozen later would get each
    rank's own gradient, and ranks would drift apart without a word.

    Args:
        frozen: the parameters that required none, by name.
    """

    def __init__(self, frozen: dict[str, nn.Parameter]) -> None:
        self.frozen = frozen

    def thawed(self) -> str | None:
        """Name of a parameter that requires a gradient now."""
        return next((name for name, parameter in self.frozen.items() if parameter.requires_grad), None)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and (name := self.thawed()) is not None:
            raise PrepareError(
                f"Parameter {name!r} was frozen when the model was prepared and requires a gradient now, which ddp "
                "would not average over ranks. Prepare the model again after unfreezing: "
                "`model = accelerator.prepare(model)`."
            )


def _guards_of(model: nn.Module) -> list[_FrozenGuard]:
    return [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _FrozenGuard)]


def _remove_guards(model: nn.Module) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _FrozenGuard):
            del model._forward_pre_hooks[key]
