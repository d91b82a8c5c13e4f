"""Data parallelism with `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_ckpt.modules.named_model import NamedModel
from accel_state.messages import warn
from accel_state.operations.collectives import broadcast, reduce
from accel_state.world.process import PartialState
from accel_train.errors import AccumulationError, IncompatibleOptionsError, PrepareError
from accel_train.offload.tensors import Kinded, of_kind
from accel_train.optimizer_parameters import parameter_ids, parameters_of
from accel_train.ranks import Ranks
from accel_train.state_part import StatePart
from accel_train.strategies.base import Capabilities, ModelSteps, Parts, Strategy, StrategyOptions
from accel_train.strategies.equal_states import take_states
from accel_train.strategies.local_training import LocalCopies, LocalOptimizerStates
from accel_train.strategies.power_sgd import PowerSGD
from accel_train.strategies.replicas import Replicas, differing_rates
from accel_train.strategies.shared_buffers import running_averages, saved_buffers, share_in_evaluation
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.transparent_ddp import TransparentDDP, set_takes_buffers
from accel_train.strategies.wrappers import inside_compiled, is_sharded_by_script, reduced_by_fsdp

__all__ = ["DDPStates", "DDPStrategy", "inside_parallel"]

_WHO_EVALUATES = "Evaluate on all processes, or on the main process alone."


class DDPStates(StateAdapter):
    """Saves and loads the states of replicas, with the state of PowerSGD and LocalSGD on each rank."""

    strategy: DDPStrategy
    window_tensors: ClassVar[str] = "errors of compressed gradients (comm_hook)"

    def keeps_replicas(self, model: nn.Module) -> bool:
        """True for a model whose gradients are averaged."""
        return _ddp(model) is not None

    def replicated_optimizers(
        self, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]
    ) -> list[int]:
        """No optimizers after LocalSGD, until all of them have stepped with the gradients of all ranks."""
        differ = self.strategy.local.optimizers_differ(optimizers)
        return [] if differ else super().replicated_optimizers(optimizers, models)

    def parts(self, optimizers: Sequence[Any], named: Sequence[NamedModel]) -> list[StatePart]:
        """The part for optimizer states that LocalSGD leaves different on each rank."""
        return [LocalOptimizerStates(self, self.strategy.local, optimizers, named)]

    def needs_all_ranks(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> str | None:
        """Extends the base class: LocalSGD has left optimizer states that differ between ranks."""
        if self.strategy.local.optimizers_differ(optimizers):
            return (
                "and ranks have optimizer states of their own since they trained inside LocalSGD. Call save_state() on "
                "all processes."
            )
        return super().needs_all_ranks(models, optimizers)

    def window_state(self, model: nn.Module) -> dict[str, Any]:
        """Whether the next forward takes over rank 0's buffers, which it does not inside an accumulation window.

        With PowerSGD also the state of its communication hook.
        """
        inner = _ddp(model)
        if inner is None:
            return {}
        state: dict[str, Any] = {"takes_buffers": inner.require_forward_param_sync}
        hook = self.strategy.power_sgd.get(inner)
        return state if hook is None else state | {"power_sgd": hook.state_dict()}

    def window_state_misfit(self, model: nn.Module, state: Mapping[str, Any]) -> str | None:
        """PowerSGD needs the same options; a run may begin or stop using it."""
        inner = _ddp(model)
        hook = None if inner is None else self.strategy.power_sgd.get(inner)
        return hook.misfit(state["power_sgd"]) if hook is not None and "power_sgd" in state else None

    def load_window_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Go back to what `window_state` returned."""
        inner = _ddp(model)
        if inner is not None and not self.strategy.local.holds(inner):
            set_takes_buffers(inner, state.get("takes_buffers", True))
        hook = None if inner is None else self.strategy.power_sgd.get(inner)
        if inner is None or "power_sgd" not in state:
            return
        if hook is None:
            warn(
                "The state was saved with PowerSGD, which this run does not use: the errors that its next steps would "
                "have corrected are dropped.",
            )
        else:
            hook.load_state_dict(state["power_sgd"], inner)


class DDPStrategy(Strategy):
    """Every rank holds the whole model; gradients are averaged over ranks during backward."""

    name: ClassVar[str] = "ddp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_stages=True,
        needs_process_group=True,
        communication_hooks=True,
        dimensions=frozenset({"dp_replicate", "cp", "sp"}),
    )
    adapter: ClassVar[type[StateAdapter]] = DDPStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self._handler = options.ddp or options.config
        self.local = LocalCopies()  # what LocalSGD trains
        self.power_sgd: WeakKeyDictionary[DistributedDataParallel, PowerSGD] = WeakKeyDictionary()
        self._unchecked: list[DistributedDataParallel] = []  # no complete backward was seen yet
        self._replicas = Replicas(self.loss)
        self._shared: set[int] = set()  # parameters of several models of one prepare() call
        self._joins = 0  # depth of join() contexts
        self._joined = 0  # backward passes in them

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
        wrapped = _ddp(model) is not None or is_sharded_by_script(model, self.batch)
        return not wrapped and any(parameter.requires_grad for parameter in model.parameters())

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Wrap a model with trainable parameters; a frozen model needs no reduction and is not wrapped."""
        return steps.compile(self._wrap(steps.place(steps.convert(model))))

    def _wrap(self, model: nn.Module) -> nn.Module:
        if _ddp(model) is not None:
            return model  # compiled around it
        if is_sharded_by_script(model, self.batch):
            if self._handler.communication_hook() is not None:
                raise PrepareError(
                    f"comm_hook={str(self._handler.comm_hook)!r} compresses what ddp sends, and "
                    f"{type(model).__name__} is divided by fully_shard, which reduces its gradients itself. Leave "
                    "comm_hook out."
                )
            managed = reduced_by_fsdp(model)
            whole = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in managed]
            if whole:
                raise PrepareError(
                    f"{type(model).__name__} is divided by fully_shard, except {whole[0]!r} (the first of "
                    f"{len(whole)} trained parameters), whose gradients nobody would average under ddp. Divide what "
                    "is around the parts too, by fully_shard(model), or choose fsdp2, which averages it."
                )
            share_in_evaluation(model, model, saved_buffers)
            return model
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
        handler = self._handler
        # Only what differs from torch's defaults: naming a default may already be deprecated there.
        views = handler.gradient_as_bucket_view and not any(id(p) in self._shared for p in trainable)
        kwargs = {**handler.to_kwargs(), "gradient_as_bucket_view": views}
        with _bytes_to_send(frozen.values()):
            wrapped = TransparentDDP(model, device_ids=device_ids, **kwargs)
        self._register_hook(wrapped)
        wrapped.averages = True  # with every hook of the plugin
        if frozen:
            wrapped.register_forward_pre_hook(_FrozenGuard(frozen))
        self._replicas.add(wrapped)
        if not handler.broadcast_buffers:
            share_in_evaluation(model, wrapped, running_averages, self._evaluates_apart)
        if not wrapped.find_unused_parameters and not wrapped.static_graph:
            self._unchecked.append(wrapped)
        return wrapped

    def _evaluates_apart(self) -> bool:
        """Whether this rank alone evaluates: its model inside LocalSGD or `join`, or that of the main process."""
        apart = self._joins or self.local.trained_alone
        return bool(apart) or PartialState().main_process_alone("an evaluation", _WHO_EVALUATES)

    def _register_hook(self, wrapped: DistributedDataParallel) -> None:
        handler = self._handler
        found = handler.communication_hook()
        if found is None or not hasattr(found[0], "error_dict"):
            handler.register_comm_hook(wrapped)
            return
        options = {
            "comm_hook": str(handler.comm_hook),
            "comm_wrapper": str(handler.comm_wrapper),
            "bucket_cap_mb": handler.bucket_cap_mb,
            **handler.comm_state_option,
        }
        state, hook = found
        self.power_sgd[wrapped] = PowerSGD(wrapped, state, hook, options)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside `DistributedDataParallel`."""
        return inside_parallel(model)

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether the set of trained parameters has changed since the model was wrapped."""
        if any(guard.first_unfrozen() is not None for guard in _guards_of(inside_compiled(model))):
            return True
        inner = _ddp(model)
        return inner is not None and self._replicas.is_outdated(inner)

    def release(self) -> None:
        """Forget wrappers that were not used yet, and copies that ranks train for themselves."""
        super().release()
        self._unchecked.clear()
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
            inner = _ddp(model)
            if inner is not None and _can_hold_back(inner) and not self.local.holds(inner):
                inner.require_backward_grad_sync = enabled

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Run backward, in which DDP reduces; first passes find gradients that it misses, which are averaged later."""
        if self._joins:
            self._joined += 1
            super().backward(models, loss, pending=pending, kwargs=kwargs)
            return
        self._replicas.before_backward()
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        self._replicas.after_backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter DDP's `no_sync`."""
        inner = _ddp(model)
        if inner is not None and _can_hold_back(inner):
            return cast("AbstractContextManager[None]", inner.no_sync())
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward even though its forwards ran under `no_sync`.

        DDP decides in forward whether to reduce; this prepares its reducer after the fact.
        """
        inner = _ddp(model)
        if inner is None or self.local.holds(inner):
            yield
            return
        previous = inner.require_backward_grad_sync, inner.require_forward_param_sync
        inner.require_backward_grad_sync = inner.require_forward_param_sync = True
        # Unused parameters cannot be found without the forward's outputs: every one is awaited.
        inner.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            inner.require_backward_grad_sync, takes_buffers = previous
            set_takes_buffers(inner, takes_buffers)

    def join(self, joinables: Sequence[object]) -> AbstractContextManager[object]:
        """Torch's `Join` over the given models and optimizers."""
        inner = [inside_compiled(item) if isinstance(item, nn.Module) else item for item in joinables]
        wrong = [type(item).__name__ for item in inner if not isinstance(item, Joinable)]
        if wrong:
            raise PrepareError(
                f"join_uneven_inputs() takes models and optimizers that support torch's Join; got {wrong[0]}. "
                "Pass the objects that prepare() returned."
            )
        if any(isinstance(item, DistributedDataParallel) and self.local.holds(item) for item in inner):
            raise _not_joined()
        return self._inside(Join(cast("list[Joinable]", inner), enable=True))

    @contextlib.contextmanager
    def _inside(self, join: Join) -> Iterator[Join]:
        self._joins += 1
        self._joined = 0
        try:
            with join:
                yield join
        finally:
            self._joins -= 1

    def end_join(self, owners: Sequence[Any]) -> None:
        """Give ranks that ran out of data what the last one with data has, as torch's `Join` does with parameters."""
        ranks = self.loss
        longest, shortest = reduce(
            torch.tensor([self._joined * ranks.size + ranks.index, -self._joined]), "max", group=ranks.group
        ).tolist()
        most, source = divmod(longest, ranks.size)
        if most == -shortest:
            return
        take_states(owners, source, ranks, self.options.device)
        for average in self.weight_averages:
            with average.shared() as tensors:
                broadcast(tensors, source, group=ranks.group)
        self.precision.share_scale(lambda values: broadcast(values, source, group=ranks.group))

    # Copies of a model that ranks train for themselves

    @property
    def trained_alone(self) -> Sequence[nn.Module]:
        """The models of which this rank trains its own copy, inside LocalSGD; always the same list object."""
        return self.local.trained_alone

    def check_local(self, model: nn.Module) -> None:
        """Refuse a model whose gradients DDP does not average over all ranks, or not in backward."""
        inner = _ddp(model)
        if inner is None:
            raise PrepareError(
                f"LocalSGD averages the copies of a model that ranks train, but {type(model).__name__} is not a model "
                "that ddp trains. Pass the model that prepare() returned, with parameters that are not frozen."
            )
        if inner.static_graph:
            raise IncompatibleOptionsError(
                "LocalSGD trains without reducing gradients, and DistributedDataParallelKwargs(static_graph=True) "
                "needs a reduction in the first backward. Leave static_graph out."
            )
        if self.loss.size != self.batch.size:
            raise IncompatibleOptionsError(
                f"LocalSGD trains a copy of the model on each of {self.loss.size} ranks, and these share sequences "
                f"(cp_size or sp_size): only {self.batch.size} have samples of their own. Leave one of both out."
            )
        if self._joins:
            raise _not_joined()

    def begin_local(self, model: nn.Module) -> None:
        """Hold back all reductions of a model, until `end_local`."""
        self.check_local(model)
        inner = _ddp(model)
        assert inner is not None, "checked"
        copy = self.local.of(inner)
        if copy.is_held:
            raise AccumulationError(
                "LocalSGD was entered for a model inside another LocalSGD of the same model. Use one of them."
            )
        self.local.hold(inner)

    def average_local(self, model: nn.Module, *, finished: bool) -> bool:
        """Average the copies, and under fp16 use the lowest loss scale."""
        inner = _ddp(model)
        assert inner is not None, "checked when it began"
        if self._joins:
            raise _not_joined()
        with contextlib.ExitStack() as stack:
            of_model = [average for average in self.weight_averages if average.plain is inner.module]
            along = [tensor for average in of_model for tensor in stack.enter_context(average.shared())]
            done = self.local.of(inner).average(self.loss, finished=finished, along=along)
        self.precision.share_scale(lambda values: reduce(values, "min", group=self.loss.group))
        return done

    def end_local(self, model: nn.Module) -> None:
        """Reduce again; a model whose copies differ is not trained until they are averaged."""
        inner = _ddp(model)
        assert inner is not None, "checked when it began"
        self.local.release(inner)

    # Complete gradients

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """All ranks that average, unless some may take steps alone, or step what is in no prepared model."""
        alone = self._joins or self.local.in_use or not self._replicas.have_all(parameters_of(optimizer))
        return None if alone else self.loss

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> tuple[bool, Any]:
        """Step an optimizer; before the first step of its model, check that all parameters took part."""
        if self._unchecked:
            self._check_used(optimizer)
        if not self._joins:
            self._replicas.before_step(optimizer)
        if self.local.in_use:
            self.local.before_step(optimizer, self.loss, self.options.device)
        return super().step(optimizer, closure)

    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Check that ranks have the same learning rates and gradients."""
        if self._unchecked:
            self._check_used(optimizer)
        self._replicas.check_finished()
        trained = {id(p) for model in models for p in self.plain(model).parameters()}
        parameters = [p for p in parameters_of(optimizer) if id(p) in trained]
        if not parameters:
            return  # of a module that is not prepared, perhaps on one rank alone
        self._check_rates(optimizer)
        self._replicas.check_equal(parameters, [self.plain(model) for model in models])

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop an optimizer's gradients, and forget how they were computed."""
        self._replicas.forget_gradients(optimizer)
        super().zero_grad(optimizer, set_to_none)

    # Between phases of training

    def state_tensors(self, owner: nn.Module | torch.optim.Optimizer) -> Iterator[Kinded]:
        """Extends the base class: buckets of gradients, and what a communication hook keeps of them."""
        yield from super().state_tensors(owner)
        inner = _ddp(owner) if isinstance(owner, nn.Module) else None
        if isinstance(inner, TransparentDDP):
            yield from of_kind("gradients", inner.buckets.tensors())
            hook = self.power_sgd.get(inner)
            yield from of_kind("gradients", () if hook is None else hook.tensors())

    def _check_rates(self, optimizer: torch.optim.Optimizer) -> None:
        for found in differing_rates(optimizer, self.loss):
            raise AccumulationError(
                f"The learning rate of group {found.place} of {type(optimizer).__name__} is {found.lowest:g} on one "
                f"rank and {found.highest:g} on another, so their copies of the model would drift apart. Give every "
                "rank the same: a prepared scheduler does, if it is stepped on all of them."
            )

    def _check_used(self, optimizer: torch.optim.Optimizer) -> None:
        """Name parameters without a gradient, which DDP waits for: its next forward would fail without names."""
        owned = parameter_ids(optimizer)
        for wrapped in list(self._unchecked):
            named = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
            if not any(id(parameter) in owned for _, parameter in named):
                continue
            unused = [name for name, parameter in named if parameter.grad is None]
            if len(unused) == len(named):
                continue  # it had no backward yet
            self._unchecked.remove(wrapped)
            if unused:
                raise PrepareError(
                    f"{len(unused)} of {len(named)} parameters of {type(wrapped.module).__name__} took no part in the "
                    f"loss, and ddp waits for the gradient of every parameter: {', '.join(unused[:5])}"
                    f"{', …' if len(unused) > 5 else ''}. If that is intended, pass "
                    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or "
                    "freeze them with requires_grad_(False) before prepare()."
                )


def inside_parallel(model: nn.Module) -> nn.Module:
    """The module inside a wrapper of `torch.nn.parallel`; `model` itself if it is not wrapped."""
    return (
        cast(nn.Module, model.module) if isinstance(model, (DistributedDataParallel, DataParallel)) else model
    )


def _ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, compiled or not; None if the model has none."""
    inner = inside_compiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextlib.contextmanager
def _bytes_to_send(frozen: Iterable[nn.Parameter]) -> Iterator[None]:
    """DDP sends rank 0's parameters; gloo sends none of 8-bit floating point, as layerwise casting stores them."""
    small = [(p, p.dtype) for p in frozen if p.is_floating_point() and p.element_size() == 1]
    for parameter, _ in small:
        parameter.data = parameter.data.view(torch.uint8)
    try:
        yield
    finally:
        for parameter, dtype in small:
            parameter.data = parameter.data.view(dtype)


def _not_joined() -> IncompatibleOptionsError:
    return IncompatibleOptionsError(
        "LocalSGD and join_uneven_inputs() exclude each other: ranks that ran out of batches would shadow reductions "
        "that do not happen. Leave join_uneven_inputs() out; ranks with fewer batches wait at the end of LocalSGD."
    )


def _can_hold_back(model: DistributedDataParallel) -> bool:
    # With a static graph torch learns the graph from a first backward that reduces, and fails without it. Reducing
    # every micro-batch gives the same gradients.
    return not model.static_graph


class _FrozenGuard:
    """Forward pre-hook that refuses to train parameters whose gradients would not be reduced.

    DDP reduces the parameters that require gradients when it is built. One that is unfrozen later would get each
    rank's own gradient, and ranks would silently drift apart.

    Args:
        frozen: the parameters that required none, by name.
    """

    def __init__(self, frozen: dict[str, nn.Parameter]) -> None:
        self.frozen = frozen

    def first_unfrozen(self) -> str | None:
        """Name of a parameter that requires a gradient now."""
        return next((name for name, parameter in self.frozen.items() if parameter.requires_grad), None)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and (name := self.first_unfrozen()) is not None:
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
