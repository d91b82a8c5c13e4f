"""How objects are prepared: an ordered script per kind of object."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_train.data import DataLoaderDispatcher, PreparedLoader, prepare_data_loader
from accel_train.errors import PrepareError
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.loop.scheduler import AcceleratedScheduler
from accel_train.precision.autocast import restore_forward
from accel_train.setup.compile import compile_model
from accel_train.unwrap import plain_module

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator

__all__ = ["prepare", "prepare_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"]


def prepare(accelerator: Accelerator, objects: tuple[Any, ...], device_placement: list[bool] | None) -> Any:
    """See `Accelerator.prepare`: models, optimizers and loaders first, then what refers to them."""
    if device_placement is None:
        device_placement = [accelerator.device_placement] * len(objects)
    elif len(device_placement) != len(objects):
        raise PrepareError(
            f"device_placement has {len(device_placement)} entries for {len(objects)} objects; give one per object."
        )
    prepared = [
        _first_pass(accelerator, item, placed) for item, placed in zip(objects, device_placement, strict=True)
    ]
    prepared = [
        prepare_scheduler(accelerator, item) if isinstance(item, LRScheduler) else item for item in prepared
    ]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _first_pass(accelerator: Accelerator, item: Any, placed: bool) -> Any:
    if isinstance(item, DataLoader):
        return prepare_loader(accelerator, item, placed)
    if isinstance(item, nn.Module):
        return prepare_model(accelerator, item, placed)
    if isinstance(item, torch.optim.Optimizer):
        return prepare_optimizer(accelerator, item, placed)
    return item


def prepare_model(
    accelerator: Accelerator, model: nn.Module, placed: bool, evaluation_mode: bool = False
) -> nn.Module:
    """Check, convert, place, wrap and compile a model; a prepared one comes back as it is."""
    plan = accelerator._plan
    plain = plain_module(model)
    known = _known_as(accelerator, plain)
    if known is not None:
        if not plan.strategy.is_outdated(known):
            return known
        accelerator._forget_model(known)
        model = plain
    _check_device_map(accelerator, model)
    restore_forward(plain)  # another accelerator may have prepared it, for another precision
    plan.precision.wrap_forward(plain)
    model = (plan.placement if placed else plan.as_is).place_model(model)
    wrapped = model if evaluation_mode else plan.strategy.wrap_model(model)
    wrapped = compile_model(wrapped, accelerator.state.dynamo_plugin)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
    accelerator._register_model(plain if plan.strategy.is_wrapped(model) else model, wrapped)
    return wrapped


def _known_as(accelerator: Accelerator, plain: nn.Module) -> nn.Module | None:
    """What this accelerator returned for a model that it prepared before."""
    return next((item for item in accelerator._prepared_models if plain_module(item) is plain), None)


def _check_device_map(accelerator: Accelerator, model: nn.Module) -> None:
    device_map = getattr(model, "hf_device_map", None)
    if device_map is None or len(set(device_map.values())) < 2 or accelerator.num_processes == 1:
        return
    raise PrepareError(
        f"The model is spread over {sorted(map(str, set(device_map.values())))} by its device_map, which cannot be "
        f"combined with {accelerator.num_processes} processes: each needs the whole model on its own device. Load it "
        "without device_map, or start one process."
    )


def prepare_loader(
    accelerator: Accelerator, loader: DataLoader[Any], placed: bool, slice_fn: Any = None
) -> PreparedLoader:
    """Shard a loader over ranks, as `accelerator.dataloader_config` says now."""
    config = accelerator.dataloader_config
    epoch = getattr(loader, "epoch_state", None)  # shared by a loader and those that skip its first batches
    if any(loader is known or epoch is known.epoch_state for known in accelerator._dataloaders):
        return loader  # type: ignore[return-value]
    prepared = prepare_data_loader(
        loader,
        device=accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=config.split_batches,
        put_on_device=placed,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        ledger=accelerator._ledger,
        pre_sharded=config.pre_sharded,
    )
    prepared._is_accelerate_prepared = True
    if accelerator.preemption is not None:
        accelerator.preemption.protect_workers(prepared)
    accelerator._dataloaders.append(prepared)
    return prepared


@contextlib.contextmanager
def overridden_even_batches(loaders: list[Any], even_batches: bool) -> Iterator[None]:
    """Change `even_batches` of prepared map-style loaders, and put it back afterwards."""
    changed: list[tuple[Any, bool]] = []
    try:
        for loader in loaders:
            if isinstance(loader, DataLoaderDispatcher):
                warnings.warn(
                    "even_batches can only be overridden for loaders whose ranks read for themselves; a dispatching "
                    "loader always gives every rank as many batches.",
                    stacklevel=4,
                )
                continue
            sampler = loader.share()
            if sampler is not None:
                changed.append((sampler, sampler.even_batches))
                sampler.even_batches = even_batches
        yield
    finally:
        for sampler, before in changed:
            sampler.even_batches = before


def prepare_optimizer(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, placed: bool
) -> AcceleratedOptimizer:
    """Wrap an optimizer; a prepared one comes back as it is."""
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer.follow(accelerator._accumulator, accelerator._plan.precision)
        if not any(optimizer is known for known in accelerator._optimizers):
            accelerator._optimizers.append(optimizer)
        return optimizer
    wrapped = AcceleratedOptimizer(
        optimizer,
        device_placement=placed,
        accumulator=accelerator._accumulator,
        precision=accelerator._plan.precision,
    )
    wrapped._is_accelerate_prepared = True
    accelerator._optimizers.append(wrapped)
    return wrapped


def prepare_scheduler(accelerator: Accelerator, scheduler: Any) -> AcceleratedScheduler:
    """Tie a scheduler to its prepared optimizer, or to all of them when it names none."""
    if any(scheduler is known for known in accelerator._schedulers):
        prepared: AcceleratedScheduler = scheduler
        return prepared
    if isinstance(scheduler, AcceleratedScheduler):  # another accelerator's
        scheduler = scheduler.scheduler
    target = getattr(scheduler, "optimizer", None)
    owners = [known for known in accelerator._optimizers if target is known or target is known.optimizer]
    wrapped = AcceleratedScheduler(
        scheduler,
        owners or list(accelerator._optimizers),
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=accelerator.split_batches,
        steps_per_call=accelerator._scheduler_steps_per_call(),
        advance_while_accumulating=accelerator.gradient_state.adjust_scheduler,
        accumulator=accelerator._accumulator,
    )
    wrapped._is_accelerate_prepared = True
    accelerator._schedulers.append(wrapped)
    return wrapped
