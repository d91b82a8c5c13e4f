"""Data parallelism with `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import accel_ckpt
from accel_ckpt.parts import has_divided_parameters
from accel_state.world.process import PartialState
from accel_train.errors import PrepareError
from accel_train.offload.tensors import Kinded, of_kind
from accel_train.optimizer_parameters import parameters_of
from accel_train.ranks import Ranks
from accel_train.strategies import frozen_parameters
from accel_train.strategies.base import ModelSteps, Parts, Strategy, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.local_training import LocalTraining, why_not_saved
from accel_train.strategies.power_sgd import PowerSGDHooks
from accel_train.strategies.replicas import Replicas
from accel_train.strategies.shared_buffers import running_averages, saved_buffers, share_in_evaluation
from accel_train.strategies.state_adapter import SavedModel, StateAdapter
from accel_train.strategies.transparent_ddp import TransparentDDP, ddp_of, set_takes_buffers
from accel_train.strategies.uneven_inputs import UnevenInputs
from accel_train.strategies.wrappers import check_division, inside_compiled, reduced_by_fsdp

__all__ = ["DDPStates", "DDPStrategy", "inside_parallel"]

_WHO_EVALUATES = "Evaluate on all processes, or on the main process alone."


class DDPStates(StateAdapter):
    """Saves and loads the states of replicas, with the state of PowerSGD on each rank."""

    strategy: DDPStrategy
    rank_tensors: ClassVar[str] = "errors of compressed gradients (comm_hook)"

    def keeps_replicas(self, model: nn.Module) -> bool:
        """True for a model whose gradients are averaged."""
        return ddp_of(model) is not None

    def is_divided(self, model: nn.Module) -> bool:
        """True where the script has divided a parameter itself."""
        return has_divided_parameters(model)

    def load_model_state(self, model: nn.Module, weights: SavedModel, strict: bool) -> None:
        """Extends the base class: copies that an exception in LocalSGD left different are equal again."""
        super().load_model_state(model, weights, strict)
        self.strategy.local.are_equal(self.strategy.plain(model))

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """Whether the next forward takes over rank 0's buffers, which it does not inside an accumulation window.

        With PowerSGD also the state of its communication hook.

        Raises:
            CheckpointSaveError: ranks train copies of the model.
        """
        wrapped = ddp_of(model)
        if wrapped is None:
            return {}
        differing = self.strategy.local.differing
        if differing is not None and differing is wrapped.module:
            raise accel_ckpt.CheckpointSaveError(why_not_saved(differing))
        takes_buffers = {"takes_buffers": wrapped.require_forward_param_sync}
        return takes_buffers | self.strategy.power_sgd.state_dict(wrapped)

    def rank_state_misfit(self, model: nn.Module, state: Mapping[str, Any]) -> str | None:
        """PowerSGD needs the same options; a run may begin or stop using it."""
        wrapped = ddp_of(model)
        return None if wrapped is None else self.strategy.power_sgd.misfit(wrapped, state)

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Go back to what `rank_state` returned."""
        wrapped = ddp_of(model)
        if wrapped is not None:
            if not self.strategy.local.holds(wrapped):
                set_takes_buffers(wrapped, state.get("takes_buffers", True))
            self.strategy.power_sgd.load_state_dict(wrapped, state)


class DDPStrategy(Strategy):
    """Every rank holds the whole model; gradients are averaged over ranks during backward."""

    name: ClassVar[str] = "ddp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_stages=True,
        needs_process_group=True,
        communication_hooks=True,
        dimensions=frozenset({"dp_replicate", "cp", "sp"}),
        separate_steps=True,
    )
    adapter: ClassVar[type[StateAdapter]] = DDPStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self._handler = options.ddp or options.config
        self.power_sgd = PowerSGDHooks()
        share_scale = options.precision.share_scale
        self.local = LocalTraining(self.loss, self.batch.size, self.weight_averages, share_scale)
        self.uneven = UnevenInputs(self.loss, options.device, self.weight_averages, share_scale, self.local)
        self._replicas = Replicas(self.loss)
        self._shared: set[int] = set()  # parameters of several models of one prepare() call

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Wrap each model; gradients that several wrappers reduce are not views of one wrapper's buckets."""
        self._shared = set()
        if len(parts.models) > 1:
            times = Counter(id(p) for model in parts.models for p in self.plain(model).parameters())
            self._shared = {number for number, count in times.items() if count > 1}
        return super().prepare(parts, steps)

    def needs_all_ranks(self, model: nn.Module) -> bool:
        """True if the model is wrapped: a frozen model is not."""
        wrapped = ddp_of(model) is not None or check_division(model, self.batch)
        return not wrapped and any(parameter.requires_grad for parameter in model.parameters())

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Wrap a model with trainable parameters; a frozen model needs no reduction and is not wrapped."""
        return steps.compile(self._wrap(steps.place(steps.convert(model))))

    def _wrap(self, model: nn.Module) -> nn.Module:
        if ddp_of(model) is not None:
            return model  # compiled around it
        if check_division(model, self.batch):
            self._check_divided_by_script(model)
            share_in_evaluation(model, model, saved_buffers)
            return model
        parameters = dict(model.named_parameters())
        frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        frozen_parameters.remove_guards(model)
        if len(frozen) == len(parameters):
            if frozen:
                frozen_parameters.guard(model, frozen)
            return model
        meta = [name for name, parameter in parameters.items() if parameter.is_meta]
        if meta:
            raise PrepareError(
                f"Parameter {meta[0]!r} (of {len(meta)}) has no storage (it is on the meta device), so ddp cannot "
                "broadcast it. Load the weights before prepare()."
            )
        device, handler = self.options.device, self._handler
        # DDP takes device_ids only for single-device modules on an accelerator with an index.
        device_ids = [device.index] if device.type != "cpu" and device.index is not None else None
        # Only what differs from torch's defaults: naming a default may already be deprecated there.
        shared = not self._shared.isdisjoint(map(id, parameters.values()))
        kwargs = {
            **handler.to_kwargs(), "gradient_as_bucket_view": handler.gradient_as_bucket_view and not shared
        }  # fmt: skip
        with frozen_parameters.as_bytes(frozen.values()):
            wrapped = TransparentDDP(model, device_ids=device_ids, **kwargs)
        self.power_sgd.register(wrapped, handler)
        wrapped.averages = True  # with every hook of the plugin
        if frozen:
            frozen_parameters.guard(wrapped, frozen)
        self._replicas.add(wrapped)
        if not handler.broadcast_buffers:
            share_in_evaluation(model, wrapped, running_averages, self._evaluates_apart)
        return wrapped

    def _check_divided_by_script(self, model: nn.Module) -> None:
        if self._handler.communication_hook() is not None:
            raise PrepareError(
                f"comm_hook={str(self._handler.comm_hook)!r} compresses what ddp sends, and {type(model).__name__} is "
                "divided by fully_shard, which reduces its gradients itself. Leave comm_hook out."
            )
        managed = reduced_by_fsdp(model)
        whole = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in managed]
        if whole:
            raise PrepareError(
                f"{type(model).__name__} is divided by fully_shard, except {whole[0]!r} (the first of "
                f"{len(whole)} trained parameters), whose gradients nobody would average under ddp. Divide what is "
                "around the parts too, by fully_shard(model), or choose fsdp2, which averages it."
            )

    def _evaluates_apart(self) -> bool:
        """Whether this rank alone evaluates: its model inside LocalSGD or `join`, or that of the main process."""
        apart = self.uneven.depth or self.local.trained_alone
        return bool(apart) or PartialState().main_process_alone("an evaluation", _WHO_EVALUATES)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside `DistributedDataParallel`."""
        return inside_parallel(model)

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether the set of trained parameters has changed since the model was wrapped."""
        if frozen_parameters.first_unfrozen(inside_compiled(model)) is not None:
            return True
        wrapped = ddp_of(model)
        return wrapped is not None and self._replicas.is_outdated(wrapped)

    def release(self) -> None:
        """Forget wrappers, and copies that ranks train for themselves."""
        super().release()
        self.local.clear()
        self._replicas.clear()

    # One micro-batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Hold back the reduction of all but the last micro-batch, as DDP's own `no_sync` does."""
        if not last and not self.options.sync_each_batch:
            self._set_sync(models, False)

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Reduce again."""
        if not last and not self.options.sync_each_batch:
            self._set_sync(models, True)

    def _set_sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        for model in models:
            wrapped = ddp_of(model)
            if wrapped is not None and _can_hold_back(wrapped) and not self.local.holds(wrapped):
                wrapped.require_backward_grad_sync = enabled

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Run backward, in which DDP reduces; first passes find gradients that it misses, which are averaged later."""
        if self.uneven.depth:
            self.uneven.saw_backward()
            super().backward(models, loss, pending=pending, kwargs=kwargs)
            return
        self._replicas.before_backward()
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        self._replicas.after_backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter DDP's `no_sync`."""
        wrapped = ddp_of(model)
        if wrapped is not None and _can_hold_back(wrapped):
            return cast("AbstractContextManager[None]", wrapped.no_sync())
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward even though its forwards ran under `no_sync`.

        DDP decides in forward whether to reduce; this prepares its reducer after the fact.
        """
        wrapped = ddp_of(model)
        if wrapped is None or self.local.holds(wrapped):
            yield
            return
        previous = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
        wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
        # Unused parameters cannot be found without the forward's outputs: every one is awaited.
        wrapped.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            wrapped.require_backward_grad_sync, takes_buffers = previous
            set_takes_buffers(wrapped, takes_buffers)

    # Complete gradients

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """All ranks that average, unless some may take steps alone, or step what is in no prepared model."""
        alone = self.uneven.depth or self.local.trained_alone
        return None if alone or not self._replicas.have_all(parameters_of(optimizer)) else self.loss

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> tuple[bool, Any]:
        """Step an optimizer; before the first step of its model, check that all parameters took part."""
        self._replicas.check_used(optimizer)
        if not self.uneven.depth:
            self._replicas.before_step(optimizer)
        return super().step(optimizer, closure)

    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Check that ranks have the same learning rates and gradients."""
        self._replicas.check_step(optimizer, [self.plain(model) for model in models])

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop an optimizer's gradients, and forget how they were computed."""
        self._replicas.forget_gradients(optimizer)
        super().zero_grad(optimizer, set_to_none)

    # Between phases of training

    def state_tensors(self, owner: nn.Module | torch.optim.Optimizer) -> Iterator[Kinded]:
        """Extends the base class: buckets of gradients, and what a communication hook keeps of them."""
        yield from super().state_tensors(owner)
        wrapped = ddp_of(owner) if isinstance(owner, nn.Module) else None
        if isinstance(wrapped, TransparentDDP):
            yield from of_kind("gradients", wrapped.buckets.tensors())
            yield from of_kind("gradients", self.power_sgd.tensors(wrapped))


def inside_parallel(model: nn.Module) -> nn.Module:
    """The module inside a wrapper of `torch.nn.parallel`; `model` itself if it is not wrapped."""
    return (
        cast(nn.Module, model._modules["module"])
        if isinstance(model, (DistributedDataParallel, DataParallel))
        else model
    )


def _can_hold_back(model: DistributedDataParallel) -> bool:
    # With a static graph torch learns the graph from a first backward that reduces, and fails without it. Reducing
    # every micro-batch gives the same gradients.
    return not model.static_graph
