"""Data parallelism with `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

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
        if isinstance(model, DistributedDataParallel):
            return model
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
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
        return wrapped

    def is_wrapped(self, model: nn.Module) -> bool:
        """Whether `model` is a DDP wrapper."""
        return isinstance(model, DistributedDataParallel)

    def keeps_replicas(self, model: nn.Module) -> bool:
        """True of a model whose gradients it averages."""
        return isinstance(_ddp_of(model), DistributedDataParallel)

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Switch the reduction of the next backward passes, as DDP's own `no_sync` does."""
        if isinstance(inner := _ddp_of(model), DistributedDataParallel):
            inner.require_backward_grad_sync = enabled

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP's `no_sync`."""
        inner = _ddp_of(model)
        if isinstance(inner, DistributedDataParallel):
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


def _ddp_of(model: object) -> object:
    """The DDP module inside a compiled wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)
