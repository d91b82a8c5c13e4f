"""The state of one `Accelerator`: its plan, its options, and the objects that it prepared and registered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from accel_train.list_view import ListView
from accel_train.strategies.relink import Replaced

if TYPE_CHECKING:
    from accel_ckpt.saving.background import BackgroundSaver
    from accel_state.world.process import PartialState
    from accel_train.data import ActiveLoaders
    from accel_train.loop.accumulation import Accumulator
    from accel_train.loop.offloading import Offloading
    from accel_train.loop.optimizer import AcceleratedOptimizer
    from accel_train.loop.preemption import Preemption
    from accel_train.loop.scheduler import AcceleratedScheduler
    from accel_train.plugins import DataLoaderConfiguration, ProjectConfiguration, TorchDynamoPlugin
    from accel_train.setup.resolve import RunPlan
    from accel_train.state_part import StatePart

__all__ = ["Hooks", "LoadHook", "PrepareOptions", "Prepared", "Registered", "SaveHook", "mark_prepared"]

SaveHook: TypeAlias = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook: TypeAlias = Callable[[list[nn.Module], str], Any]


@dataclass(frozen=True)
class Registered:
    """An object that the script registered for checkpointing.

    Args:
        item: the object, with `state_dict()` and `load_state_dict()`.
        trusted: its state may be pickled if it is more than plain data and tensors.
    """

    item: Any
    trusted: bool = False


class Hooks:
    """The script's hooks that run before a state is saved or loaded."""

    def __init__(self) -> None:
        self.save: OrderedDict[int, SaveHook] = OrderedDict()
        self.load: OrderedDict[int, LoadHook] = OrderedDict()

    def add_save(self, hook: SaveHook) -> RemovableHandle:
        """Add a hook that runs before a state is written."""
        return _add(self.save, hook)

    def add_load(self, hook: LoadHook) -> RemovableHandle:
        """Add a hook that runs before a state is loaded."""
        return _add(self.load, hook)


def _add(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@dataclass
class PrepareOptions:
    """Options of preparing objects; the script may change them between two calls of `prepare()`.

    Attributes:
        device_placement: move models, optimizer states and batches to this process's device.
        loaders: how loaders are prepared.
        rng_types: random generators that are made equal on all ranks at the start of an epoch.
        step_scheduler_with_optimizer: a prepared scheduler steps only when its optimizer does.
        scale_scheduler: a prepared scheduler takes one step per rank that reads different samples.
        adjust_scheduler: schedulers also advance while gradients accumulate.
        dynamo: whether and how models are compiled.
    """

    device_placement: bool
    loaders: DataLoaderConfiguration
    rng_types: list[str]
    step_scheduler_with_optimizer: bool
    scale_scheduler: bool
    adjust_scheduler: bool
    dynamo: TorchDynamoPlugin


@dataclass
class Prepared:
    """The state of one `Accelerator`, handed to the functions that do its work.

    Attributes:
        process: this process and its world.
        plan: strategy, precision and mesh.
        options: how objects are prepared.
        project: where checkpoints are written, and how they are named.
        accumulator: accumulation windows.
        ledger: the loaders that are being iterated.
        saver: saves in the background.
        models: the script's own modules, without wrappers.
        prepared_models: the same models as `prepare()` returned them.
        optimizers: as `prepare()` returned them.
        schedulers: as `prepare()` returned them.
        loaders: as `prepare()` returned them.
        registered: other objects of the state.
        parts: other kinds of state: of installed packages, and of features that the script has switched on.
        hooks: the script's hooks that run before a state is saved or loaded.
        replaced: parameters that preparation replaced.
        preemption: listens for signals, if asked to.
        offloading: knows which states are in host memory.
        step: a counter that scripts may use; part of the state.
    """

    process: PartialState
    plan: RunPlan
    options: PrepareOptions
    project: ProjectConfiguration
    accumulator: Accumulator
    ledger: ActiveLoaders
    saver: BackgroundSaver
    offloading: Offloading
    models: list[nn.Module]
    prepared_models: list[nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    registered: list[Registered] = field(default_factory=list)
    parts: list[StatePart] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    replaced: Replaced = field(default_factory=Replaced)
    preemption: Preemption | None = None
    step: int = 0

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers inside the wrappers that `prepare()` returned."""
        return [optimizer.optimizer for optimizer in self.optimizers]

    @property
    def followers(self) -> list[Any]:
        """What steps of the optimizers change as well: schedulers, and torch's averages of weights, also registered."""
        kinds = (LRScheduler, AveragedModel)
        return [*self.schedulers, *(known.item for known in self.registered if isinstance(known.item, kinds))]

    def models_view(self) -> ListView[nn.Module]:
        """The script's own modules, as a list whose changes are those of the prepared ones too."""

        def write(model: nn.Module) -> tuple[nn.Module, nn.Module]:
            known = zip(self.models, self.prepared_models, strict=True)
            return next(((own, done) for own, done in known if model is own or model is done), (model, model))

        return ListView(self.models, self.prepared_models, read=lambda model: model, write=write)

    def registered_view(self) -> ListView[Any]:
        """The registered objects, as a list."""

        def write(item: Any) -> tuple[Registered]:
            return (next((known for known in self.registered if known.item is item), Registered(item)),)

        return ListView(self.registered, read=lambda registered: registered.item, write=write)

    def clear(self, objects: Sequence[Any] = ()) -> None:
        """Forget everything prepared, averages of its weights, and what is registered of `objects`."""
        released = {id(item) for item in (*self.plan.strategy.weight_averages, *objects)}
        self.registered[:] = [known for known in self.registered if id(known.item) not in released]
        for items in (self.models, self.prepared_models, self.optimizers, self.schedulers, self.loaders):
            items.clear()
        self.accumulator.forget()
        self.plan.strategy.release()
        self.step = 0

    def add_model(self, model: nn.Module, prepared: nn.Module, before: nn.Module | None = None) -> None:
        """Add a model under both its faces: the script's own module, and what `prepare()` returns for it.

        Args:
            model: the script's own.
            prepared: what is returned.
            before: what was returned for it earlier, whose place it takes: states hold models by their place.
        """
        if before is None:
            self.models.append(model)
            self.prepared_models.append(prepared)
            return
        place = next(i for i, known in enumerate(self.prepared_models) if known is before)
        self.models[place], self.prepared_models[place] = model, prepared
        self.accumulator.forget_model(before)


def mark_prepared(item: Any) -> None:
    """Set the attribute by which other libraries recognise what `prepare()` returned."""
    item._is_accelerate_prepared = True
