"""Preparing the objects of one `prepare()` call: loaders, models and optimizers together, then schedulers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_ckpt.parts import is_sharded
from accel_state.messages import warn
from accel_train.data import DataLoaderDispatcher, DataLoaderShard, PreparedLoader
from accel_train.data.combined import CombinedLoader, single_loaders
from accel_train.data.lengths import check_lengths
from accel_train.data.prepare import prepare_for_ranks
from accel_train.errors import IncompatibleOptionsError, PrepareError
from accel_train.loop.lomo import check_lomo, is_lomo
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.loop.scheduler import AcceleratedScheduler, follow
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import DataLoaderConfiguration
from accel_train.plugins.base import SectionPlugin
from accel_train.setup.packing_warning import warn_of_packing
from accel_train.setup.prepared import Prepared, mark_prepared
from accel_train.setup.shared_draws import share_draws
from accel_train.setup.steps import Steps
from accel_train.strategies.base import Parts, Strategy
from accel_train.strategies.pickling import refuse_pickles
from accel_train.strategies.relink import followed
from accel_train.strategies.wrappers import inside_compiled

__all__ = [
    "overridden_even_batches",
    "prepare",
    "prepare_for_evaluation",
    "prepare_loader",
    "prepare_one",
    "prepare_scheduler",
]


def prepare(prepared: Prepared, objects: Sequence[Any], device_placement: list[bool] | None) -> Any:
    """See `Accelerator.prepare`."""
    if device_placement is None:
        device_placement = [prepared.options.device_placement] * len(objects)
    elif len(device_placement) != len(objects):
        raise PrepareError(
            f"device_placement has {len(device_placement)} entries for {len(objects)} objects; pass one per object."
        )
    call = _Call(prepared, list(objects), device_placement)
    call.check()
    call.meet()
    call.prepare_loaders()
    call.prepare_models_and_optimizers()
    call.prepare_schedulers()
    return call.results[0] if len(objects) == 1 else tuple(call.results)


def prepare_one(prepared: Prepared, item: Any, placed: bool | None) -> Any:
    """Prepare one object; `placed` as in `device_placement`."""
    return prepare(prepared, (item,), None if placed is None else [placed])


class _Call:
    """The objects of one call, replaced one kind after the other by what is returned for them."""

    def __init__(self, prepared: Prepared, objects: list[Any], placed: list[bool]) -> None:
        self._prepared = prepared
        self._strategy: Strategy = prepared.plan.strategy
        self._placed = placed
        # Places among the objects, by kind.
        self._models: list[int] = []
        self._optimizers: list[int] = []
        self._loaders: list[int] = []
        self._schedulers: list[int] = []
        # What is prepared in this call, the places of its models, optimizers and schedulers, and of each model what is
        # inside its wrappers, and what an earlier call has returned for it.
        self._parts = Parts()
        self._new: list[int] = []
        self._fresh: list[int] = []
        self._planned: list[int] = []
        self._plain: list[nn.Module] = []
        self._before: list[nn.Module | None] = []
        self.results = objects
        for place, item in enumerate(objects):
            if isinstance(item, nn.Module):
                self._models.append(place)
            elif isinstance(item, torch.optim.Optimizer):
                self._optimizers.append(place)
            elif isinstance(item, DataLoader):
                self._loaders.append(place)
            elif isinstance(item, LRScheduler):
                self._schedulers.append(place)

    def check(self) -> None:
        """Find what is new, and refuse what the strategy cannot prepare; changes nothing."""
        prepared, strategy, parts = self._prepared, self._strategy, self._parts
        seen: set[int] = set()
        for place in self._models:
            model = self.results[place]
            plain = strategy.plain(model)
            before = _known_as(prepared, plain)
            if id(plain) in seen or (before is not None and not strategy.is_outdated(before)):
                continue
            seen.add(id(plain))
            given = model if before is None else plain
            _check_device_map(prepared, given)
            self._new.append(place)
            self._plain.append(plain)
            self._before.append(before)
            parts.models.append(given)
        if self._optimizers:
            seen = {id(own) for known in prepared.optimizers for own in (known.optimizer, known.given)}
            for place in self._optimizers:
                optimizer = _inner(self.results[place])
                if id(optimizer) not in seen:
                    seen.add(id(optimizer))
                    self._fresh.append(place)
                    parts.optimizers.append(optimizer)
        for place in self._schedulers:
            scheduler = self.results[place]
            if not any(scheduler is known for known in prepared.schedulers):
                self._planned.append(place)
                parts.schedulers.append(scheduler)
        if self._new or self._fresh:
            self._check_together()
            self._check_optimizers()
        # Attention that is divided among ranks keeps documents apart.
        if (
            (self._new or (self._loaders and prepared.models))
            and "transformers" in sys.modules
            and prepared.plan.sequence is None
            and strategy.loss.rank == 0
        ):
            found = [*prepared.loaders, *(self.results[place] for place in self._loaders)]
            loaders = [single for loader in found for single in single_loaders(loader)]
            warn_of_packing(loaders, [*prepared.models, *self._plain], self._plain)

    def meet(self) -> None:
        """Wait until all ranks prepare, where that is a collective; before the first message is sent."""
        models = list(filter(self._strategy.needs_all_ranks, self._parts.models))
        loaders = [item for place in self._loaders if _is_new(self._prepared, item := self.results[place])]
        if models or loaders:
            names = [type(item).__name__ for item in (*models, *loaders)]
            _meet(self._prepared, "prepare", names, shared=bool(models))

    def prepare_loaders(self) -> None:
        """Replace the loaders, and check that all ranks have the same data."""
        new: list[Any] = []
        for place in self._loaders:
            given = self.results[place]
            self.results[place] = _own_part(self._prepared, given, self._placed[place])
            self._parts.loaders.append(self.results[place])
            if self.results[place] is not given:
                new += single_loaders(self.results[place])
        if new:
            check_lengths(self._strategy.batch, new)

    def prepare_models_and_optimizers(self) -> None:
        """Replace models and optimizers, which belong together, and schedulers that an engine replaces."""
        prepared = self._prepared
        if self._new or self._fresh or self._planned:
            done = self._prepare_parts()
            for place, optimizer in zip(self._fresh, done.optimizers, strict=True):
                self.results[place] = self._wrap_optimizer(
                    self.results[place], optimizer, self._placed[place]
                )
            for place, scheduler in zip(self._planned, done.schedulers, strict=True):
                self.results[place] = scheduler
        # Objects that were prepared before, and those that are twice among the objects of this call.
        if len(self._optimizers) > len(self._fresh):
            wrapped = {
                id(own): known for known in prepared.optimizers for own in (known.given, known.optimizer)
            }
            for place in self._optimizers:
                self.results[place] = wrapped.get(id(_inner(self.results[place])), self.results[place])
        for place in self._models:
            if place not in self._new:
                known_as = _known_as(prepared, self._strategy.plain(self.results[place]))
                assert known_as is not None, "prepared before, or in this call"
                self.results[place] = known_as

    def _check_together(self) -> None:
        models, optimizers = self._parts.models, self._parts.optimizers
        capabilities, name = self._strategy.capabilities, self._strategy.name
        most = capabilities.max_models
        count = len(self._prepared.models) + self._before.count(None)
        if models and most is not None and count > most:
            raise PrepareError(
                f"The strategy {name!r} trains at most {most} model{'s' if most > 1 else ''} with one Accelerator, and "
                f"this would make {count}. Create another Accelerator for the others."
            )
        if capabilities.prepares_together and optimizers and not models:
            if self._models:
                raise PrepareError(
                    f"The strategy {name!r} prepares a model and its optimizer together, but the model of this call is "
                    "prepared already. Release everything, and prepare it again with this optimizer and the loaders: "
                    "`model = accelerator.unwrap_model(model)`, `accelerator.free_memory()`, "
                    "`accelerator.prepare(model, optimizer, …)`."
                )
            raise PrepareError(
                f"The strategy {name!r} prepares a model and its optimizer together, but this call has an optimizer "
                "without its model. Pass both to one call: `accelerator.prepare(model, optimizer)`."
            )

    def _check_optimizers(self) -> None:
        """Refuse optimizers that cannot train under this strategy, and those of models that an engine does not know."""
        strategy, capabilities = self._strategy, self._strategy.capabilities
        divides = capabilities.dimensions - {"dp_replicate", "cp", "sp"}
        for optimizer in self._parts.optimizers:
            for observer in self._prepared.accumulator.observers:
                observer.check_optimizer(optimizer)
            if is_lomo(optimizer):
                scaled = strategy.precision.scaler is not None
                check_lomo(optimizer, ranks=strategy.loss.size, strategy=strategy.name, scaled=scaled)
            if divides and isinstance(optimizer, torch.optim.LBFGS):
                raise IncompatibleOptionsError(
                    f"{type(optimizer).__name__} computes with all parameters as one vector, which no rank has under "
                    f"the strategy {strategy.name!r}. Train under 'ddp', or with one process, or use another optimizer."
                )
        if not self._new or not capabilities.hides_gradients or capabilities.prepares_together:
            return  # an engine that takes both together looks itself
        models = [*self._plain, *map(strategy.plain, self._prepared.prepared_models)]
        own = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in self._parts.optimizers:
            held = [*parameters_of(optimizer)]
            if held and not any(id(p) in own or is_sharded(p) or p in self._prepared.replaced for p in held):
                names = ", ".join(type(model).__name__ for model in self._parts.models)
                raise PrepareError(
                    f"{type(optimizer).__name__} holds {len(held)} parameters, the first of shape "
                    f"{tuple(held[0].shape)}, and none of them belongs to {names} or to a model that was prepared "
                    "before: its steps would train nothing. Build it from the parameters() of the model that is "
                    "prepared, not of a copy."
                )

    def _prepare_parts(self) -> Parts:
        """Let the strategy prepare the new objects; enters its models, and relinks optimizers to their parameters."""
        prepared, strategy, given = self._prepared, self._strategy, self._parts.models
        plan = prepared.plan
        self._parts.schedule_steps = _schedule_steps(prepared)
        as_is = {id(model) for place, model in zip(self._new, given, strict=True) if not self._placed[place]}
        steps = Steps(plan.precision, plan.device, prepared.options.dynamo, as_is)
        if plan.sequence is not None:
            for model in self._plain:
                plan.sequence.prepare(model)
        if given and isinstance(strategy.options.config, SectionPlugin):
            strategy.options.config.mark_used()
        replaced = prepared.replaced
        with followed(self._plain, replaced, lambda: plain):
            done = strategy.prepare(self._parts, steps)
            plain = [strategy.plain(model) for model in done.models]
        for optimizer in (*map(_inner, prepared.optimizers), *done.optimizers):
            replaced.relink(optimizer)
        if given:
            share_draws(strategy.batch)
        for place, model, result, inside, before in zip(
            self._new, given, done.models, plain, self._before, strict=True
        ):
            mark_prepared(result)
            refuse_pickles(inside)
            # A model that the script compiled stays in its wrapper; one that it wrapped for several ranks does not.
            own = model if inside_compiled(model) is inside else inside
            prepared.add_model(own, result, before=before)
            self.results[place] = result
        return done

    def _wrap_optimizer(
        self, given: torch.optim.Optimizer, inner: torch.optim.Optimizer, placed: bool
    ) -> AcceleratedOptimizer:
        prepared = self._prepared
        if isinstance(given, AcceleratedOptimizer):  # another accelerator's
            wrapped = given
            wrapped.follow(inner, prepared.accumulator, self._strategy)
        else:
            wrapped = AcceleratedOptimizer(
                inner,
                device_placement=placed,
                accumulator=prepared.accumulator,
                strategy=self._strategy,
                given=given,
            )
            mark_prepared(wrapped)
        if wrapped.given is not inner:
            for scheduler in prepared.schedulers:
                follow(scheduler.scheduler, wrapped.given, inner)
        prepared.optimizers.append(wrapped)
        return wrapped

    def prepare_schedulers(self) -> None:
        """Replace the schedulers."""
        for place in self._schedulers:
            if isinstance(self.results[place], LRScheduler):  # an engine may give something of its own
                self.results[place] = prepare_scheduler(self._prepared, self.results[place])


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _known_as(prepared: Prepared, plain: nn.Module) -> nn.Module | None:
    """The object that was returned for a model that was prepared before."""
    strategy = prepared.plan.strategy
    return next((item for item in prepared.prepared_models if strategy.plain(item) is plain), None)


def prepare_for_evaluation(prepared: Prepared, model: nn.Module, placed: bool) -> nn.Module:
    """Convert, place and compile a model without what its strategy adds for training."""
    strategy = prepared.plan.strategy
    plain = strategy.plain(model)
    known = _known_as(prepared, plain)
    if known is not None:
        if not strategy.is_outdated(known):
            return known
        model = plain
    _check_device_map(prepared, model)
    if prepared.plan.sequence is not None:
        prepared.plan.sequence.prepare(plain)
    steps = Steps(
        prepared.plan.precision, prepared.plan.device, prepared.options.dynamo, () if placed else {id(model)}
    )
    result = steps.compile(steps.place(steps.convert(model)))
    mark_prepared(result)
    prepared.add_model(model, result, before=known)
    return result


def _check_stages(model: nn.Module) -> None:
    """A stage of transformers' own pipeline is no whole model, and the ranks' stages differ."""
    given = getattr(getattr(model, "config", None), "distributed_config", None)
    stages = getattr(given, "pp_size", None) or 1
    if stages > 1:
        raise PrepareError(
            f"{type(model).__name__} was loaded with DistributedConfig(pp_size={stages}): this rank has one stage of "
            "it. Load it without pp_size, and pass "
            f"Accelerator(parallelism_config=ParallelismConfig(pp_size={stages}))."
        )


def _check_device_map(prepared: Prepared, model: nn.Module) -> None:
    _check_stages(model)
    device_map = getattr(model, "hf_device_map", None)
    if device_map is None:
        return
    devices = sorted({str(device) for device in device_map.values()})
    quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    untrained = ("disk",) if prepared.plan.device.type == "cpu" else ("cpu", "disk")
    away = [device for device in devices if device in untrained]
    if quantised and away:
        raise PrepareError(
            f"The quantised model has parts on {' and '.join(away)} by its device_map, where they cannot be trained. "
            "Load it with device_map={'': accelerator.device}."
        )
    if len(devices) < 2 or prepared.process.num_processes == 1:
        return
    raise PrepareError(
        f"The model is spread over {devices} by its device_map, which cannot be combined with "
        f"{prepared.process.num_processes} processes: each needs the whole model on its own device. Load it without "
        "device_map, or start one process."
    )


def prepare_loader(
    prepared: Prepared, loader: DataLoader[Any], placed: bool, slice_fn: Any = None
) -> PreparedLoader | CombinedLoader:
    """Shard a loader over the ranks that read different samples; a prepared one comes back as it is."""
    if _is_new(prepared, loader):
        _meet(prepared, "prepare_data_loader", [type(loader).__name__])
    result = _own_part(prepared, loader, placed, slice_fn)
    if result is not loader:
        check_lengths(prepared.plan.strategy.batch, single_loaders(result))
    return result


def _is_new(prepared: Prepared, loader: DataLoader[Any]) -> bool:
    epoch = getattr(loader, "epoch_state", None)  # shared by a loader and those that skip its first batches
    return not any(loader is known or epoch is known.epoch_state for known in prepared.loaders)


def _meet(prepared: Prepared, operation: str, names: Sequence[str], *, shared: bool = False) -> None:
    """Wait until all ranks call `operation`.

    Args:
        prepared: what is prepared.
        operation: its name.
        names: of what is prepared, for the message.
        shared: ranks hold parts or copies of it; else they share out the batches of loaders alone.
    """
    if shared or prepared.plan.strategy.batch.size > 1:
        prepared.process.all_take_part(
            operation,
            f"All ranks must prepare {', '.join(names)}, because they work on it together: move the call out of "
            "`if accelerator.is_main_process:`, or do not prepare objects that only one rank uses.",
        )


def _own_part(
    prepared: Prepared, loader: DataLoader[Any], placed: bool, slice_fn: Any = None
) -> PreparedLoader | CombinedLoader:
    if not _is_new(prepared, loader):
        return loader  # type: ignore[return-value]
    if isinstance(loader, CombinedLoader):
        options = replace(prepared.options.loaders, use_stateful_dataloader=True)
        result: PreparedLoader | CombinedLoader = loader.prepare_each(
            lambda source: _shard(prepared, source, options, placed, slice_fn), prepared.ledger
        )
        own = {id(source) for source in single_loaders(result)}  # their states are part of the mixture's
        prepared.loaders[:] = [known for known in prepared.loaders if id(known) not in own]
        mark_prepared(result)
    else:
        result = _shard(prepared, loader, prepared.options.loaders, placed, slice_fn)
    prepared.loaders.append(result)
    return result


def _shard(
    prepared: Prepared, loader: DataLoader[Any], options: DataLoaderConfiguration, placed: bool, slice_fn: Any
) -> PreparedLoader:
    result = prepare_for_ranks(
        loader,
        prepared.plan.strategy.batch,
        options,
        device=prepared.plan.device if placed else None,
        rng_types=list(prepared.options.rng_types),
        slice_fn=slice_fn,
        ledger=prepared.ledger,
    )
    mark_prepared(result)
    strategy = prepared.plan.strategy
    if prepared.plan.sequence is not None:
        result.shard_batch = prepared.plan.sequence.shard_batch
    elif type(strategy).shard_batch is not Strategy.shard_batch:
        result.shard_batch = strategy.shard_batch
    if prepared.preemption is not None and _is_new(prepared, loader):
        prepared.preemption.protect_workers(result)
    return result


@contextlib.contextmanager
def overridden_even_batches(loaders: list[Any], even_batches: bool) -> Iterator[None]:
    """Change `even_batches` of prepared map-style loaders, and put it back afterwards."""
    changed: list[tuple[Any, bool]] = []
    try:
        for loader in (single for given in loaders for single in single_loaders(given)):
            if isinstance(loader, DataLoaderDispatcher):
                warn(
                    "even_batches can only be overridden for loaders whose ranks read for themselves; a dispatching "
                    "loader always gives every rank the same number of batches.",
                )
                continue
            sampler = loader.share() if isinstance(loader, DataLoaderShard) else None
            if sampler is not None:
                changed.append((sampler, sampler.even_batches))
                sampler.even_batches = even_batches
        yield
    finally:
        for sampler, before in changed:
            sampler.even_batches = before


def prepare_scheduler(prepared: Prepared, scheduler: Any) -> AcceleratedScheduler:
    """Tie a scheduler to its prepared optimizer, or to all of them when it names none."""
    if any(scheduler is known for known in prepared.schedulers):
        result: AcceleratedScheduler = scheduler
        return result
    if isinstance(scheduler, AcceleratedScheduler):  # another accelerator's
        scheduler = scheduler.scheduler
    target = getattr(scheduler, "optimizer", None)
    owners = [
        known
        for known in prepared.optimizers
        if target is known or target is known.optimizer or target is known.given
    ]
    for owner in owners:
        if owner.given is not owner.optimizer:
            follow(scheduler, owner.given, owner.optimizer)
    options = prepared.options
    wrapped = AcceleratedScheduler(
        scheduler,
        owners or list(prepared.optimizers),
        step_with_optimizer=options.step_scheduler_with_optimizer,
        split_batches=options.loaders.split_batches,
        steps_per_call=_schedule_steps(prepared),
        advance_while_accumulating=options.adjust_scheduler,
        accumulator=prepared.accumulator,
    )
    mark_prepared(wrapped)
    prepared.schedulers.append(wrapped)
    return wrapped


def _schedule_steps(prepared: Prepared) -> int:
    """Steps of a schedule for one step of the optimizer: schedules are planned for one process."""
    options = prepared.options
    return (
        prepared.plan.strategy.batch.size
        if options.scale_scheduler and not options.loaders.split_batches
        else 1
    )
