"""`Accelerator`, the object that a training script creates first; its methods pass their work on to other modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_ckpt.saving.background import BackgroundSaver, SaveHandle
from accel_state.config.launch import LaunchConfig
from accel_state.config.launched import launched_config
from accel_state.constants import PREEMPTED
from accel_state.enums import DistributedType, DynamoBackend, FP8BackendType, LoggerType, RNGType
from accel_state.errors import StateError
from accel_state.handlers import InitProcessGroupKwargs, KwargsHandler
from accel_state.host.memory import release_memory
from accel_state.log import get_logger
from accel_state.messages import warn
from accel_state.monitoring.answers import training_heartbeat
from accel_state.operations import collectives, differentiable
from accel_state.world.process import PartialState
from accel_train.checkpoints import checkpoint
from accel_train.checkpoints.resume import resume as resume_training
from accel_train.data import ActiveLoaders, skip_first_batches
from accel_train.data.loader import PreparedLoader
from accel_train.errors import (
    ArgumentTypeError,
    IncompatibleOptionsError,
    OptionError,
    PrepareError,
    TrackerError,
)
from accel_train.loop import clipping, lomo, metrics, profiling
from accel_train.loop.accumulation import Accumulator
from accel_train.loop.garbage import GarbageCollector, collect_garbage
from accel_train.loop.observers import StepReporter
from accel_train.loop.offloading import Offloading
from accel_train.loop.optimizer import AcceleratedOptimizer
from accel_train.loop.preemption import Preemption, PreemptionConfig
from accel_train.loop.preemption import start as start_preemption
from accel_train.loop.scheduler import AcceleratedScheduler
from accel_train.loop.state import AcceleratorState, GradientState, register_newest
from accel_train.loop.step_guard import GuardState, StepGuard, StepGuardOptions
from accel_train.loop.usual_mistakes import explain_no_gradient
from accel_train.offload.report import OffloadReport
from accel_train.offload.tensors import KINDS
from accel_train.optimizer_parameters import parameter_ids
from accel_train.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    StrategyPlugin,
    TERecipeKwargs,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from accel_train.plugins.launched import launched_plugin
from accel_train.proof import step_recorder
from accel_train.rehearsal import TrainingRehearsal
from accel_train.setup import arguments, prepare
from accel_train.setup.fp8 import RECIPES
from accel_train.setup.prepared import LoadHook, Prepared, PrepareOptions, SaveHook
from accel_train.setup.resolve import Given, mixed_precision_name, resolve
from accel_train.setup.unwrap import unwrap
from accel_train.state_part import STATE_PARTS
from accel_train.strategies.base import DefersSync, Strategy
from accel_train.strategies.equal_states import take_states
from accel_train.strategies.uneven_inputs import UnevenInputs
from accel_train.tracking.base import GeneralTracker
from accel_train.tracking.running import OnFailure, Trackers
from accel_train.tracking.selection import select_trackers

if TYPE_CHECKING:
    from accel_ckpt.transfer.offers import OfferedWeights  # which few trainings need

__all__ = ["Accelerator"]

_logger = get_logger(__name__)

T = TypeVar("T")
# Types of prepared objects: models, optimizers, loaders and schedulers come back as instances of what they were.
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T6 = TypeVar("T6")
_Many = tuple[Any, Any, Any, Any, Any, Any, Any, *tuple[Any, ...]]  # 7 or more
_Tracker: TypeAlias = str | LoggerType | GeneralTracker
_RowsT = TypeVar("_RowsT", Tensor, tuple[Tensor, Tensor])

_HANDLERS: dict[type[KwargsHandler], str] = {
    AutocastKwargs: "autocast",
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "init",
    ProfileKwargs: "profile",
    **RECIPES,
}


class Accelerator:
    """Runs a PyTorch training loop on one process or many, on any device, with any strategy and precision.

    Args:
        device_placement: move models, optimizer states and batches to this process's device.
        split_batches: deprecated; use `DataLoaderConfiguration(split_batches=True)`.
        mixed_precision: "no", "bf16", "fp16" or "fp8"; None: the launcher's setting, else "no".
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: use the CPU even if there is an accelerator device.
        dataloader_config: how loaders are prepared.
        rng_types: random generators that are made equal on all ranks at the start of an epoch; None: "generator", the
            sampler's own.
        log_with: experiment trackers, started by `init_trackers`: a name ("tensorboard", "wandb", …), a `LoggerType`, a
            `GeneralTracker`, or a list of these; "all": every tracker that is installed.
        project_dir: folder for checkpoints and logs; checkpoints can also go to a URI of object storage.
        project_config: how checkpoints are named, and how many are kept.
        gradient_accumulation_plugin: instead of `gradient_accumulation_steps`, with more options.
        step_scheduler_with_optimizer: a prepared scheduler steps only when its optimizer does. False: every call of its
            `step()` is a step.
        kwargs_handlers: options of the objects created here, at most one of each kind.
        dynamo_backend: backend of `torch.compile` for prepared models.
        dynamo_plugin: instead of `dynamo_backend`, with more options.
        strategy: how ranks cooperate: the name of a registered strategy, or a `StrategyPlugin`, whose type names one;
            None: what another argument's plugin selects, else "ddp" for several processes and "single" for one.
        scale_scheduler: per optimizer step, a prepared scheduler takes one step for each rank that reads different
            samples (unless batches are split). This suits a schedule planned with the length of the unprepared loader.
            False: one step per optimizer step.
        preemption: listen for SIGTERM (under Slurm also SIGUSR1): `should_stop` then becomes true, on all ranks at the
            same step. A `PreemptionConfig` chooses other signals.

    `deepspeed_plugin`, `deepspeed_plugins`, `fsdp_plugin`, `torch_tp_plugin` and `megatron_lm_plugin` take a
    `StrategyPlugin`, whose type selects the strategy; `deepspeed_plugins` also takes a mapping of names to
    `DeepSpeedPlugin`. `parallelism_config` takes a `ParallelismConfig`: if no other argument selects a strategy, it
    follows from the degrees ("fsdp2" if parameters are sharded, else "tp" if tensors are divided, else "ddp").

    Raises:
        OptionError: a value cannot be used, or two options exclude each other.
        NotAvailableError: this version does not have the feature of an option.
        MissingDependencyError: the package of a tracker is not installed; names the command that installs it.
        StateError: `preemption` was given outside the main thread, where Python allows no signal handlers.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: StrategyPlugin | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: _Tracker | Collection[_Tracker] | None = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: StrategyPlugin | str | None = None,
        scale_scheduler: bool = True,
        preemption: bool | PreemptionConfig = False,
        **unknown: Never,  # so that type checkers refuse them as well
    ) -> None:
        arguments.refuse_unknown(unknown, inspect.signature(Accelerator.__init__).parameters)
        launched = launched_config()
        parallelism, other = arguments.parallelism(parallelism_config, launched)
        selecting = arguments.strategy_plugin(
            strategy=strategy,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=other,
        ) or launched_plugin(launched)
        arguments.check_types(
            cpu=(cpu, bool),
            dataloader_config=(dataloader_config, DataLoaderConfiguration),
            project_config=(project_config, ProjectConfiguration),
            gradient_accumulation_plugin=(gradient_accumulation_plugin, GradientAccumulationPlugin),
            dynamo_plugin=(dynamo_plugin, TorchDynamoPlugin),
            kwargs_handlers=(kwargs_handlers, (list, tuple)),
        )
        plugin = arguments.accumulation_plugin(
            gradient_accumulation_steps, gradient_accumulation_plugin, launched, selecting
        )
        dynamo = arguments.dynamo_plugin(dynamo_backend, dynamo_plugin, launched)
        handlers: dict[str, Any] = dict(arguments.collect_handlers(kwargs_handlers, _HANDLERS))
        self.autocast_handler: AutocastKwargs | None = handlers.get("autocast")
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.get("ddp")
        self.scaler_handler: GradScalerKwargs | None = handlers.get("scaler")
        self.init_handler: InitProcessGroupKwargs | None = handlers.get("init")
        self.profile_handler: ProfileKwargs | None = handlers.get("profile")
        self.project_configuration = arguments.project_configuration(project_config, project_dir)
        self._trackers = Trackers(*select_trackers(log_with, self.logging_dir))
        self._options = PrepareOptions(
            device_placement=device_placement,
            loaders=arguments.loader_config(dataloader_config, split_batches),
            rng_types=arguments.rng_type_names(rng_types),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scale_scheduler=scale_scheduler,
            adjust_scheduler=plugin.adjust_scheduler,
            dynamo=dynamo,
        )
        given = Given(
            mixed_precision=mixed_precision_name(
                mixed_precision if launched.runtime.proof is None else None, launched, selecting
            ),
            strategy=selecting,
            parallelism=parallelism,
            handlers=handlers,
            sync_each_batch=plugin.sync_each_batch,
        )
        self._begin(cpu, launched, given, plugin)
        self._prepared.preemption = start_preemption(preemption, self._process, self._accumulator, self)
        register_newest(self)

    def _begin(
        self, cpu: bool, launched: LaunchConfig, given: Given, plugin: GradientAccumulationPlugin
    ) -> None:
        """Join the other processes, decide what to do, and start with nothing prepared and no window open."""
        init_kwargs = self.init_handler.to_kwargs() if self.init_handler else {}
        self._process = PartialState(cpu, **init_kwargs)
        self._trackers.warn_of_absent()  # by the main process, which is known now
        self._plan = resolve(self._process, launched, given)
        self.state = AcceleratorState(
            self._process,
            mixed_precision=given.mixed_precision,
            dynamo_plugin=self._options.dynamo,
            strategy=self._plan.strategy,
            parallelism_config=self._plan.parallelism,
        )
        models: list[nn.Module] = []
        optimizers: list[AcceleratedOptimizer] = []
        observed = self._process.rehearsal
        rehearsal = None if observed is None else TrainingRehearsal(observed)
        follower = rehearsal or (
            None if launched.runtime.proof is None else step_recorder(Path(launched.runtime.proof))
        )
        ledger = ActiveLoaders() if follower is None else follower.ledger
        self._accumulator = Accumulator(
            self._plan.strategy,
            ledger,
            all_models=models,
            all_optimizers=optimizers,
            num_steps=plugin.num_steps or 1,
            sync_with_dataloader=plugin.sync_with_dataloader,
            rehearsed=rehearsal is not None,
        )
        ledger.pulse = training_heartbeat()
        if ledger.pulse is not None:  # the launcher wants to see the progress of ranks
            self._accumulator.observers.append(StepReporter(ledger.pulse))
        self._plan.precision.on_scale_change(self._accumulator.rescale_pending)
        self._prepared = Prepared(
            process=self._process,
            plan=self._plan,
            options=self._options,
            project=self.project_configuration,
            accumulator=self._accumulator,
            ledger=ledger,
            saver=BackgroundSaver(),
            offloading=Offloading(self._plan.strategy, models, optimizers, self._accumulator.observers),
            models=[],
            prepared_models=models,
            optimizers=optimizers,
        )
        installed: Any = [STATE_PARTS.get(name) for name in STATE_PARTS.names()]
        self._prepared.parts += [part(self._prepared) for part in installed]
        if follower is not None:
            self._accumulator.observers.append(follower)
            follower.follow(self._prepared)
        self._has_begun = False
        self.gradient_state = GradientState(plugin, accumulator=self._accumulator, ledger=ledger)
        self.flag_tensor: Tensor | None = None

    # Facts about the process

    @property
    def distributed_type(self) -> DistributedType:
        """How processes cooperate."""
        return self.state.distributed_type

    @property
    def strategy(self) -> Strategy:
        """The strategy in use, selected by `Accelerator(strategy=…)`, a plugin or the number of processes."""
        return self._plan.strategy

    # Facts about the configuration

    @property
    def step(self) -> int:
        """A counter for the script's own use; `save_state` includes it."""
        return self._prepared.step

    @step.setter
    def step(self, step: int) -> None:
        self._prepared.step = step

    @property
    def preemption(self) -> Preemption | None:
        """The listener for signals that stop training; None without `Accelerator(preemption=…)`."""
        return self._prepared.preemption

    @property
    def device_placement(self) -> bool:
        """Whether models, optimizer states and batches move to this process's device."""
        return self._options.device_placement

    @device_placement.setter
    def device_placement(self, device_placement: bool) -> None:
        self._options.device_placement = device_placement

    @property
    def rng_types(self) -> list[str]:
        """Random generators that are made equal on all ranks at the start of an epoch."""
        return self._options.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str | RNGType]) -> None:
        self._options.rng_types = arguments.rng_type_names(rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers step when their optimizer does."""
        return self._options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, step: bool) -> None:
        self._options.step_scheduler_with_optimizer = step

    @property
    def scale_scheduler(self) -> bool:
        """Whether a prepared scheduler takes one step per rank that reads different samples."""
        return self._options.scale_scheduler

    @scale_scheduler.setter
    def scale_scheduler(self, scale: bool) -> None:
        self._options.scale_scheduler = scale

    @property
    def mixed_precision(self) -> str:
        """The name of the precision: "no", "bf16", "fp16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether autocast is in use.

        Assigning False switches it off for `autocast()` and for models that are prepared afterwards; those prepared
        before, and the gradient scaler, do not change. Assigning True switches it on again.
        """
        return self._plan.precision.uses_autocast

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        self._plan.precision.use_autocast(native_amp)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; None unless mixed_precision is "fp16"."""
        return self._plan.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._plan.precision.replace_scaler(scaler)

    @property
    def project_dir(self) -> str | None:
        """Folder for checkpoints, and by default for logs."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder for logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin that selected DeepSpeed; None if another strategy runs."""
        return self.state.deepspeed_plugin

    # Preparing

    @overload
    def prepare(self, item: T1, /, *, device_placement: list[bool] | None = None) -> T1: ...
    @overload
    def prepare(self, a: T1, b: T2, /, *, device_placement: list[bool] | None = None) -> tuple[T1, T2]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, e: T5, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4, T5]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, e: T5, f: T6, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4, T5, T6]: ...
    # More objects than above. If this one took any number, an argument of type Any, such as DataLoader[Any], would
    # match two overloads, and mypy would answer Any.
    @overload
    def prepare(self, *args: *_Many, device_placement: list[bool] | None = None) -> Any: ...
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order; other objects come back unchanged.

        Args:
            args: the objects.
            device_placement: per object, whether it moves to the device; None: as the accelerator does.

        Returns:
            The prepared object, or a tuple of them in the order given. Prepared objects come back as they are.

        Raises:
            PrepareError: an object cannot be prepared.
        """
        return prepare.prepare(self._prepared, args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; with `evaluation_mode` each rank has it whole, and no gradients are reduced."""
        if not evaluation_mode:
            prepared: nn.Module = prepare.prepare_one(self._prepared, model, device_placement)
            return prepared
        placed = self.device_placement if device_placement is None else device_placement
        return prepare.prepare_for_evaluation(self._prepared, model, placed)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one data loader."""
        placed = self.device_placement if device_placement is None else device_placement
        return prepare.prepare_loader(self._prepared, data_loader, placed, slice_fn_for_dispatch)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        prepared: AcceleratedOptimizer = prepare.prepare_one(self._prepared, optimizer, device_placement)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler, after its optimizer."""
        return prepare.prepare_scheduler(self._prepared, scheduler)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader of the same kind that starts after `num_batches` batches."""
        # It shares the epoch of `dataloader`, which is the one that checkpoints hold.
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(self, model: T1, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> T1:
        """Return the model inside a prepared one; see `extract_model_from_parallel`.

        For type checkers the result has the class of `model`, like the result of `prepare`.
        """
        plain = unwrap(self._plan.strategy, cast(nn.Module, model), keep_fp32_wrapper, keep_torch_compile)
        return cast(T1, plain)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything prepared and give memory back; returns one None per object, to rebind their names.

        Averages of weights of prepared models (`AveragedWeights`) are forgotten, too, and no longer part of states;
        so is each of `objects` that was registered for checkpointing. Other registered objects stay.

        Raises:
            OffloadedStatesError: states are in host memory, and would be lost.
        """
        self._prepared.offloading.refuse("free_memory()")
        self._prepared.clear(objects)
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model, or a module of it, is spread over several devices by a device map."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(device_map is not None and len(device_map) > 1 for device_map in maps)

    # Gradients

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are complete: False inside an accumulation window, True at its last micro-batch."""
        return self._accumulator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._accumulator.sync_gradients = sync_gradients

    def gradients_complete(self, model: nn.Module) -> bool:
        """`sync_gradients` of the window that a model was trained in last, where models have windows of their own.

        False, too, while the model's optimizers wait for another window: they have stepped with that one.
        """
        if not self._accumulator.windows_take_turns:
            return self._accumulator.sync_gradients
        optimizers = self._optimizers_of(model)
        if not optimizers:
            return self._accumulator.are_complete(model.parameters())
        return any(optimizer.gradients_complete for optimizer in optimizers)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulator.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulator.num_steps = GradientAccumulationPlugin(num_steps=steps).num_steps or 1

    def accumulate(
        self, *models: nn.Module, dataloader: DataLoader[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Context for one micro-batch; optimizers and schedulers inside step at the last one of a window.

        Args:
            models: the models trained in this block. They share one window and reduce their gradients at its end.
                Prepared models and parameters of prepared optimizers that no other block names belong to it, too.
            dataloader: the loader whose last batch ends the window; None: the loader that yielded last.

        Raises:
            AmbiguousLoaderError: several loaders are iterated in turn and none was named.
        """
        return self._accumulator.micro_batch(models, cast(Any, dataloader))

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context in which backward passes of a model accumulate gradients locally, without communication."""
        strategy = self._plan.strategy
        deferred = strategy.no_sync(model) if isinstance(strategy, DefersSync) else contextlib.nullcontext()
        with self._accumulator.hold_back(), deferred:
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward reduces gradients even though the forwards ran under `no_sync`."""
        strategy = self._plan.strategy
        if isinstance(strategy, DefersSync):
            return strategy.trigger_sync_in_backward(model)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Context for training when ranks have different numbers of batches.

        A rank that runs out of data takes part in the reductions of the others with a gradient of zero. At the end it
        takes over the states of prepared optimizers, of schedulers and averages of weights that are prepared or
        registered, and the loss scale from a rank that had data to the end; what else a step changes stays its own.
        Inside, a window of `accumulate` also ends when another rank runs out, and `backward(num_items=…)` is refused.

        Args:
            joinables: prepared models and optimizers that support torch's `Join`. With several models, finish the
                forward and backward of one before those of the next begin, in this order.
            even_batches: overrides the setting of prepared map-style loaders inside the context.
        """
        even = self.even_batches if even_batches is None else even_batches
        joined: UnevenInputs | None = None
        with contextlib.ExitStack() as stack:
            if even_batches is not None:
                stack.enter_context(prepare.overridden_even_batches(self._prepared.loaders, even_batches))
            if not even and self.num_processes > 1:
                strategy = self._plan.strategy
                if not strategy.capabilities.separate_steps:
                    raise IncompatibleOptionsError(
                        f"join_uneven_inputs() lets ranks train on different numbers of batches, which the strategy "
                        f"{strategy.name!r} cannot. Use even_batches=True."
                    )
                stack.enter_context(self._accumulator.without_counting())
                joined = strategy.uneven
                stack.enter_context(joined.join(joinables))
            yield
        if joined is not None:
            joined.end([*self._prepared.inner_optimizers, *self._prepared.followers])
        if not even and self.num_processes > 1 and self.preemption is not None:
            self.preemption.level()  # ranks with less data have taken fewer steps

    def backward(
        self,
        loss: Tensor,
        *,
        num_items: int | Tensor | None = None,
        learning_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Compute gradients, scaled so that they are exact at the end of an accumulation window.

        Args:
            loss: a scalar. Without `num_items` it is the mean loss of this micro-batch: the window's gradient is the
                mean over its micro-batches and over ranks.
            num_items: the number of items (tokens, say) that `loss` is the *sum* over. The window's gradient is then
                that of one big batch with the items of all micro-batches and ranks. 0 is allowed. A tensor (one
                element, whole number) on the device avoids waiting for it.
            learning_rate: for an optimizer of lomo-optim, which updates parameters here.
            kwargs: arguments of `Tensor.backward`.

        Raises:
            AccumulationError: only a part of the window's micro-batches was given `num_items`.
            NoGradientError: the loss depends on nothing that requires a gradient.
            OptionError: the project's folder has automatic checkpoints of another run, and they were not loaded.
        """
        if not self._has_begun:
            self._begin_training()
        if learning_rate is not None:
            lomo.check_arguments(num_items, kwargs)
            self.lomo_backward(loss, learning_rate)
            return
        try:
            self._accumulator.backward(loss, num_items, kwargs)
        except (AttributeError, TypeError):
            if not isinstance(loss, Tensor):
                raise ArgumentTypeError(
                    f"backward() takes a loss tensor, got {type(loss).__name__}: {loss!r:.80}. Pass the tensor itself, "
                    "not its .item() or the model's whole output."
                ) from None
            raise
        except RuntimeError as error:
            explain_no_gradient(loss, error)
            raise

    def lomo_backward(self, loss: Tensor, learning_rate: float | None) -> None:
        """Compute gradients, and update each parameter as soon as its gradient is computed (lomo-optim).

        Args:
            loss: a scalar.
            learning_rate: of this update.

        Raises:
            OptionError: no learning rate is given, or not exactly one optimizer of lomo-optim is prepared.
            AccumulationError: gradient accumulation is on.
        """
        optimizers = self._prepared.inner_optimizers
        lomo.fused_backward(optimizers, loss, learning_rate, self._accumulator.num_steps)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer of lomo-optim is prepared."""
        return any(optimizer.steps_in_backward for optimizer in self._prepared.optimizers)

    def _begin_training(self) -> None:
        """Check, before the first backward, for mistakes that would show only hours later."""
        self._has_begun = True
        if self.project_configuration.automatic_checkpoint_naming:
            checkpoint.refuse_used_folder(self._prepared)
        ranks = self._plan.strategy.loss.size
        if ranks > 1 and not self._prepared.prepared_models:
            warn(
                f"backward() was called on {ranks} ranks, but no model is prepared: each rank trains on its own "
                "gradients, which are not averaged. Pass the model to accelerator.prepare() and train the model that "
                "it returns.",
            )

    def expert_tokens(self) -> dict[str, Tensor]:
        """How many tokens each expert got in training since the last call, of layers divided by ``ep_size``.

        All ranks call it. An uneven distribution means that some ranks compute more than others.

        Returns:
            For each layer, by its name in the model, a tensor (experts,) of whole numbers, summed over all ranks. Empty
            without divided experts.
        """
        return self._plan.strategy.expert_tokens()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16 gradients by the loss scale; those of one or several optimizers, or of all.

        Calling it again in the same step changes nothing. Clipping unscales by itself.
        """
        chosen: Any = self._prepared.optimizers if optimizer is None else optimizer
        for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self._plan.strategy.unscale_(cast(Any, getattr(item, "optimizer", item)))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the total norm of the gradients of `parameters`.

        Inside an accumulation window nothing is clipped, because the gradients are not complete.

        Returns:
            The norm before clipping, a 0-d tensor.
        """
        return clipping.clip_grad_norm_(
            self._plan.strategy,
            self._prepared.optimizers,
            parameters,
            max_norm,
            norm_type,
            are_complete=self._accumulator.are_complete,
            observers=self._accumulator.observers,
        )

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to [-clip_value, clip_value], once they are complete."""
        clipping.clip_grad_value_(
            self._plan.strategy,
            self._prepared.optimizers,
            parameters,
            clip_value,
            are_complete=self._accumulator.are_complete,
        )

    def share_states(self, from_process: int = 0) -> None:
        """Give all processes one's states of optimizers and schedules, after steps of their own; a collective."""
        here, strategy = self._prepared, self._plan.strategy
        owners = [*here.inner_optimizers, *here.followers]
        take_states(owners, from_process, strategy.loss, strategy.options.device)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any prepared optimizer skipped its last step: inf or NaN gradients, or a step guard refused it."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    def step_was_skipped(self, model: nn.Module) -> bool:
        """Whether the optimizers of a model have skipped their last step, all of them."""
        return self.optimizer_step_was_skipped and all(
            optimizer.step_was_skipped for optimizer in self._optimizers_of(model)
        )

    def _optimizers_of(self, model: nn.Module) -> list[AcceleratedOptimizer]:
        """The prepared optimizers that step parameters of a model."""
        parts = self._plan.strategy.gathered.parts_of(list(model.parameters()))
        parameters = {id(parameter) for parameter in parts}
        optimizers = self._prepared.optimizers
        return [each for each in optimizers if not parameters.isdisjoint(parameter_ids(each))]

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Context that computes in the chosen precision outside a prepared model (a loss, say)."""
        handler = autocast_handler or self.autocast_handler or AutocastKwargs()
        return self._plan.precision.autocast(handler.enabled, handler.cache_enabled)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Context that runs torch's profiler and returns it."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        return profiling.profile(handler, self.process_index, self.wait_for_everyone)

    # Talking to other ranks

    @overload
    def gather_for_metrics(
        self,
        input_data: _RowsT,
        use_gather_object: Literal[False] = False,
        *,
        dataloader: DataLoader[Any] | None = None,
    ) -> _RowsT: ...
    @overload
    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, dataloader: DataLoader[Any] | None = None
    ) -> Any: ...
    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, dataloader: DataLoader[Any] | None = None
    ) -> Any:
        """Gather results of a batch from all ranks, one row per sample, without rows that only pad the last batch.

        Args:
            input_data: nested tensors whose first dimension is the batch dimension (0-d tensors: one per rank), or
                objects: a list, tuple or array with one per sample. Anything else is gathered as one object per rank.
                In mappings, named tuples, lists that hold tensors, and tuples that hold tensors or lists, each value is
                gathered separately.
            use_gather_object: gather tensors as lists of their rows, whose shapes may differ between ranks.
            dataloader: the loader of the batch; None: the loader that yielded last.

        Returns:
            Nested tensors, lists and tuples like `input_data`, on every rank; mappings with objects as dictionaries.
            With one process `input_data` itself, without rows that repeat a value beyond the batch that came.

        Raises:
            MetricsShapeError: a value does not have one row per sample.
            AmbiguousLoaderError: several loaders are iterated in turn and none was named.
        """
        return metrics.gather_for_metrics(
            input_data,
            self._prepared.ledger,
            ranks=self._plan.strategy.batch,
            loader=dataloader,
            use_gather_object=use_gather_object,
        )

    def end_training(self) -> None:
        """Finish what is being saved, end the trackers, and leave the process group; the last call of a script.

        Raises:
            CheckpointSaveError: an asynchronous save has failed.
            TrackerError: a tracker failed to end, with `init_trackers(on_failure="raise")`.
        """
        with (
            contextlib.ExitStack() as stack
        ):  # what comes last in it is done first, and all of it in any case
            stack.callback(self._process.destroy_process_group)
            if self.preemption is not None:
                stack.callback(self.preemption.close)
            stack.callback(self._trackers.finish)
            self._prepared.saver.drain()

    # Stopping early

    @property
    def should_stop(self) -> bool:
        """Whether training should stop now because of a stop signal; False without `preemption`.

        It becomes true at the end of an optimizer step, the same one on all ranks, and stays true. It never changes
        inside an accumulation window. It may be read anywhere and any number of times.
        """
        return self.preemption is not None and self.preemption.should_stop

    def exit_preempted(self) -> NoReturn:
        """End training and exit the process with code 75, on all ranks; call it after `save_state`.

        Exit code 75 tells `accel launch` and schedulers that training is not finished. From here on the signals that
        `preemption` listens for are ignored. A script may also call it for reasons of its own.
        """
        if self.preemption is not None:
            self.preemption.finish()
        try:
            self.end_training()
        except TrackerError as error:  # what is saved must be continued, whatever became of the logs
            warn(str(error))
        raise SystemExit(PREEMPTED)

    def resume(self) -> bool:
        """Load the newest complete automatic checkpoint on all ranks, if the script runs under `accel launch --resume`.

        Returns:
            True if a checkpoint was loaded; False if none exists yet, after a warning, or if `--resume` was not given.

        Raises:
            OptionError: automatic checkpoint naming is off.
            CheckpointNotFoundError: there are checkpoints, but none is complete for all ranks.
        """
        return resume_training(self._prepared, self.load_state)

    # Memory between phases of training

    def offload_states(
        self,
        *objects: nn.Module | torch.optim.Optimizer,
        include: Collection[str] = KINDS,
        pin_memory: bool = True,
    ) -> OffloadReport:
        """Move states to host memory and free the device's, for a phase in which something else needs it.

        Tensors stay the same objects; what needs their values raises `OffloadedStatesError` until `reload_states()`.
        States that are in host memory already, as on a CPU, stay there and refuse as well. No rank waits for another
        one: each calls it for itself, usually all. A second call moves what is still on the device.

        Args:
            objects: prepared models and optimizers. None given: all of them, the loss scale and averages of weights.
            include: kinds of states: "parameters" (with buffers), "gradients", "optimizer".
            pin_memory: copy to pinned host memory, at the rate of the bus. It is kept for the next call.

        Returns:
            The bytes that were freed.

        Raises:
            OffloadedStatesError: there is too little host memory, or the engine cannot do it now; nothing has moved.
            NotAvailableError: the strategy's engine cannot do it (Megatron-LM, XLA).
            ArgumentTypeError: an object is not a prepared model or optimizer.
            OptionError: `include` names an unknown kind.
        """
        here = self._prepared
        registered = [each.item for each in here.registered]
        return here.offloading.offload(objects, include, pin_memory, registered)

    def reload_states(self, *objects: nn.Module | torch.optim.Optimizer) -> None:
        """Move states back to the device; training continues as if they had stayed.

        Args:
            objects: prepared models and optimizers. None given: all that `offload_states` has moved. Others stay where
                they are.

        Raises:
            OffloadedStatesError: the device has too little memory; what does not fit is still in host memory. Or
                objects share tensors with others that stay in host memory.
            ArgumentTypeError: an object is not a prepared model or optimizer.
        """
        self._prepared.offloading.reload(objects)

    @contextlib.contextmanager
    def offloaded_states(
        self,
        *objects: nn.Module | torch.optim.Optimizer,
        include: Collection[str] = KINDS,
        pin_memory: bool = True,
    ) -> Iterator[OffloadReport]:
        """Context in which states are in host memory; see `offload_states`, and `reload_states` at its end."""
        report = self.offload_states(*objects, include=include, pin_memory=pin_memory)
        try:
            yield report
        finally:
            self.reload_states(*objects)

    # Saving

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object once: on the main process, or on one process per node if nodes share no file system.

        Tensors that are divided among ranks, such as those of `model.state_dict()` under FSDP2, are gathered; all
        processes must call it then.

        Raises:
            DividedTensorError: the object holds divided tensors, and only the main process calls.
        """
        checkpoint.save_object(self._prepared, obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        push_to_hub: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
    ) -> None:
        """Write a model's weights so that transformers, safetensors and torch can read them.

        Args:
            model: prepared or not.
            save_directory: the folder; weights of an earlier save in it are replaced.
            max_shard_size: bytes per file, or a size such as ``"5GB"``.
            safe_serialization: safetensors, or else ``.bin``.
            push_to_hub: a repository ``org/name``; the main process uploads the saved weights to it. All processes
                must call `save_model` then, and all raise if the upload fails.
            token: for the upload; by default the token of the last login.
            private: whether a newly created repository is private.
            commit_message: message of the upload's commit.
        """
        self._prepared.offloading.refuse("save_model()", model)
        checkpoint.save_model(
            self._prepared,
            model,
            save_directory,
            max_shard_size,
            safe_serialization,
            push_to_hub,
            token=token,
            private=private,
            commit_message=commit_message,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's full state dict under its own names, without wrappers; gathered if ranks hold parts."""
        self._prepared.offloading.refuse("get_state_dict()", model)
        return checkpoint.state_dict(self._prepared, model) if unwrap else model.state_dict()

    def weight_source(self, model: nn.Module, *, dtype: torch.dtype | str | None = None) -> OfferedWeights:
        """Offer a prepared model's weights to other processes, such as inference engines, without gathering them.

        All ranks must call it. The result gives `(name, dtype, box, tensor)` for each block that this rank holds; the
        ranks together give every value once, under the names that `save_model` writes. Each iteration gives the current
        values. Pass it to `accel_ckpt.WeightTransfer`, `WeightFolder` or `VLLMWeightTransfer`.

        Args:
            model: the model that `prepare` returned.
            dtype: send floating-point weights in this dtype, such as that of the inference engine; by default in the
                one that `save_model` writes.

        Raises:
            UnsupportedValueError: a weight is not plain values in memory.
        """
        return checkpoint.weight_source(self._prepared, model, dtype)

    def whole_parameters(self, model: nn.Module, *, write_back: bool = False) -> AbstractContextManager[None]:
        """Context in which every rank has the whole parameters of a prepared model, under every strategy.

        Inside, `model` and `unwrap_model(model)` are plain modules: their parameters are tensors of full shape and of
        the dtype that is trained, and calling them, `generate` for example, needs no other rank. All ranks must enter
        and leave the context. Each needs memory for the whole model on its device, besides its part. Gradients of calls
        inside are dropped. Where nothing is divided, parameters are the trained ones themselves.

        Args:
            model: the model that `prepare` returned.
            write_back: at the end, send the main process's values to all ranks, and continue training with them.
                False: changes to divided parameters are lost.

        Raises:
            PrepareError: a parameter was replaced by one of another shape (raised on all ranks), or the engine cannot
                give whole parameters.
        """
        self._prepared.offloading.refuse("whole_parameters()", model)
        return self._plan.strategy.states.whole_parameters(model, write_back=write_back)

    def register_for_checkpointing(self, *objects: Any, trusted: bool = False) -> None:
        """Make `save_state` and `load_state` include objects with `state_dict` and `load_state_dict`.

        Args:
            objects: the objects; on loading they must be registered in the same order.
            trusted: allow states with more than plain data and tensors, which are pickled. Without it, saving them is
                an error. A pickle can run any code when it is loaded, so `load_state` then needs
                `trust_custom_objects=True`.
        """
        checkpoint.register(self._prepared.registered, objects, trusted)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes; returns a removable handle."""
        return self._prepared.hooks.add_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` loads; returns a removable handle."""
        return self._prepared.hooks.add_load(hook)

    @overload
    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Literal[False] = False,
        when_busy: Literal["wait", "refuse"] = "wait",
        trainable_only: bool = False,
        **kwargs: Any,
    ) -> Path: ...

    @overload
    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Literal[True],
        when_busy: Literal["wait", "refuse"] = "wait",
        trainable_only: bool = False,
        **kwargs: Any,
    ) -> SaveHandle: ...

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool = False,
        when_busy: Literal["wait", "refuse"] = "wait",
        trainable_only: bool = False,
        **kwargs: Any,
    ) -> Path | SaveHandle:
        """Save a checkpoint of everything prepared and registered; the folder appears when it is complete.

        All processes call it. If every process has a replica of the models, the main process may call it alone; on
        load, the random states of the other processes are then derived.

        Args:
            output_dir: the folder, or a URI of object storage (`s3://bucket/run/last`); unused with automatic naming.
            safe_serialization: write weights as safetensors, else as files of `torch.save`.
            asynchronous: return as soon as everything is copied, and write in the background. The checkpoint has the
                values at the time of the call, whatever the script changes afterwards.
            when_busy: while an earlier asynchronous save is running, "wait" for its end or "refuse".
            trainable_only: leave out parameters with `requires_grad=False`, such as the base model of an adapter.
                `load_state` keeps the script's values for them, and refuses values that differ from those at the save.
            kwargs: no other argument is known; any raises.

        Returns:
            The folder, or with `asynchronous` a handle with `done()`, `result()` and `wait()`.

        Raises:
            CheckpointSaveError: nothing was saved; or an earlier asynchronous save failed; or only the main process
                calls while other processes hold parts of the state.
            CollectiveMismatchError: some processes did not call, and it was not the main process alone that did.
            SaveInProgressError: an earlier save is still running, with `when_busy="refuse"`.
        """
        self._prepared.offloading.refuse("save_state()")
        return checkpoint.save_state(
            self._prepared, output_dir, safe_serialization, asynchronous, when_busy, trainable_only, **kwargs
        )

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_missing_rng: bool = False,
        trust_custom_objects: bool = False,
        only: Collection[str] | None = None,
        **kwargs: Any,
    ) -> Path:
        """Restore a checkpoint of `save_state`; without a folder, the newest complete automatic checkpoint.

        Everything is read and verified on all ranks before anything is changed on any rank. If only models and loaders
        are prepared, as for an evaluation, the weights of a training are restored and a warning names the rest.

        Args:
            input_dir: the folder, or a URI of object storage.
            load_kwargs: must be empty; kept for scripts that pass it.
            allow_missing_rng: keep the current random state if the checkpoint has none for this rank. (Not needed for
                the new ranks of a larger world: each derives a state from a saved one.)
            trust_custom_objects: unpickle objects that were registered as `trusted` and saved as pickles. Only for
                checkpoints of people you trust: a pickle can run any code.
            only: the parts to restore, some of "models", "optimizers" (with the loss scale), "schedulers",
                "registered", "loaders" and "random"; by default all. The rest stays as it is here, whether it fits or
                not, and so do `step`, unfinished accumulation windows and the number of the next automatic checkpoint.
            kwargs: `strict=False` loads models as `load_state_dict(strict=False)` does.

        Returns:
            The folder that was loaded.

        Raises:
            CheckpointNotFoundError: there is no such complete checkpoint, or it has no state for this rank.
            CorruptCheckpointError: a file was damaged or changed after the save.
            StateMismatchError: the prepared or registered objects differ from the saved ones.
            OptionError: `only` names a part that does not exist.
        """
        self._prepared.offloading.refuse("load_state()")
        return checkpoint.load_state(
            self._prepared, input_dir, load_kwargs, allow_missing_rng, trust_custom_objects, only, **kwargs
        )

    # The object itself

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # Objects that hold an accelerator are copied by other libraries; there is one per training.
        return self

    def __repr__(self) -> str:
        return (
            f"Accelerator(rank {self.process_index} of {self.num_processes}, device={str(self.device)!r}, "
            f"strategy={self._plan.strategy.name!r}, mixed_precision={self.mixed_precision!r})"
        )

    # Processes

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self._process.num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._process.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._process.local_process_index

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._process.device

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._process.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator device."""
        return self._process.use_distributed and self._process.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        """True on the process with rank 0."""
        return self._process.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True on one process of each node, the one with local rank 0."""
        return self._process.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True on the process with the highest rank."""
        return self._process.is_last_process

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the main process only, return None elsewhere."""
        return self._process.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the main process of each node only."""
        return self._process.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on the last process only."""
        return self._process.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: run on the process with this rank only."""
        return self._process.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: run on the process with this local rank only, on every node."""
        return self._process.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context that the main process enters first; the others follow when it has left."""
        return self._process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context that the main process of each node enters first."""
        return self._process.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Context with this process's part of a list, tuple, dict, tensor or dataset."""
        return self._process.split_between_processes(inputs, apply_padding=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        self._process.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this (a barrier)."""
        self._process.wait_for_everyone()

    # Collectives

    def gather(self, tensor: T) -> T:
        """Gather tensors of all ranks, concatenated along the first dimension in rank order; nested structures too.

        The result carries no gradient; use `gather_with_grad` for that.
        """
        gathered: T = collectives.gather(tensor)
        return gathered

    def gather_with_grad(self, tensor: T, *, ragged: bool = False) -> T:
        """Gather like `gather`, with gradients that flow back to every rank, for a loss over the samples of all ranks.

        With gradients averaged over ranks the training is that of one big batch. All ranks must use it in their loss.

        Args:
            tensor: nested tensors; those that require no gradient, such as labels, are gathered as they are.
            ragged: allow first dimensions that differ between ranks.
        """
        self._accumulator.expect_equal_losses()
        gathered: T = differentiable.gather_with_grad(tensor, ragged=ragged)
        return gathered

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduce tensors over ranks to their sum (or "mean", "max", "min"), times `scale`; nested structures too."""
        reduced: T = collectives.reduce(tensor, reduction=reduction, scale=scale)
        return reduced

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad tensors along `dim` to the longest size of all ranks."""
        padded: T = collectives.pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )
        return padded

    def set_trigger(self) -> None:
        """Set this rank's flag; `check_trigger` then returns True on every rank, once."""
        self.flag_tensor = torch.tensor(1, device=self._process.device)

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since the last True; all ranks must call it."""
        flag = self.flag_tensor
        raised = torch.tensor(0, device=self._process.device) if flag is None else flag
        if collectives.reduce(raised, reduction="sum").item() < 1:
            return False
        self.flag_tensor = None
        return True

    # Precision

    @property
    def fp8_enabled(self) -> bool:
        """Whether models compute in fp8."""
        return self._plan.recipe is not None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; without fp8 the one that the launcher names, or NO."""
        return self._plan.fp8_backend

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is an fp8 recipe, given by the script or made by default."""
        return self._plan.recipe is not None

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The fp8 recipe, if torchao computes in fp8."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, AORecipeKwargs) else None

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The fp8 recipe, if TransformerEngine computes in fp8."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, TERecipeKwargs) else None

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The fp8 recipe, if the script passed the deprecated class `FP8RecipeKwargs`."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, FP8RecipeKwargs) else None

    @property
    def msamp_recipe_handler(self) -> None:
        """Always None: MS-AMP is not supported."""
        return

    # Loaders

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are prepared."""
        return self._options.loaders

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._options.loaders = config

    @property
    def split_batches(self) -> bool:
        """Whether the loader's batch size is the global one, divided among ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data and sends each rank its part; None: only for iterable datasets on a device."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every rank gets the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders save and restore their position inside an epoch."""
        return self.dataloader_config.use_stateful_dataloader

    # Places in the mesh

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The degree of each kind of parallelism; None if neither the script nor the launcher set any."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """PyTorch's `DeviceMesh` of the dimensions with more than one rank; None for data parallelism alone."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with FSDP2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """The same as `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process should call `save_model`: one process of each node, or all with a parallelism config."""
        return self.parallelism_config is not None or self._process.is_local_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group; 0 without tensor parallelism."""
        return self._place("tp", "tensor_parallel_rank")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's index in its context-parallel group; 0 without context parallelism."""
        return self._place("cp", "context_parallel_rank")

    @property
    def sequence_parallel_rank(self) -> int:
        """This rank's index in its sequence-parallel group; 0 without sequence parallelism."""
        return self._place("sp", "sequence_parallel_rank")

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this rank belongs to; 0 if there is only one."""
        return self._place("dp_replicate", "data_parallel_rank")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's index among the ranks that a replica is sharded over; 0 without sharding."""
        return self._place("dp_shard", "data_parallel_shard_rank")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's index among the ranks of a pipeline; 0 without pipelines."""
        return self._place("pp", "pipeline_parallel_rank")

    def _place(self, dimension: str, name: str) -> int:
        if self.parallelism_config is None:
            raise StateError(
                f"accelerator.{name} is an index in a mesh, but there is no mesh. Pass Accelerator(parallelism_config="
                "ParallelismConfig(…)), or launch with --use_parallelism_config."
            )
        return self._plan.mesh.index(dimension)

    def deepspeed_ulysses_dl_adapter(self, dl: DataLoader[Any], model: Any) -> DataLoader[Any]:
        """Return a loader whose batches hold this rank's part of each sequence; a prepared loader comes back unchanged.

        Args:
            dl: a loader.
            model: not used; kept for scripts that call this after they have prepared it.

        Raises:
            PrepareError: sequences are divided among ranks (`sp_size`, `cp_size`), and the loader is not prepared.
        """
        if self._plan.sequence is not None and not isinstance(dl, PreparedLoader):
            raise PrepareError(
                f"deepspeed_ulysses_dl_adapter() got a {type(dl).__name__} that is not prepared, so its batches hold "
                "whole sequences. Call accelerator.prepare(dataloader) first; the loader that it returns divides them."
            )
        return dl

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Context in which tensors hold this rank's part of each sequence; does nothing without divided sequences.

        Prepared loaders divide their batches already, and those stay as they are here. So this is for tensors from
        elsewhere, and for scripts that were written with it.

        Args:
            buffers: tensors that are cut in place, and restored when the context ends.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that are not restored.

        Raises:
            OptionError: the number of dimensions differs from the number of buffers.
            IncompatibleOptionsError: the length of a sequence cannot be divided.
        """
        sequence = self._plan.sequence
        if sequence is None:
            _logger.warning_once(
                "maybe_context_parallel() does nothing: no cp_size or sp_size above 1 was asked for"
            )
            return contextlib.nullcontext()
        return sequence.cut_buffers(buffers or (), buffer_seq_dims or (), list(no_restore_buffers or ()))

    # Trackers. Any rank may call these, alone or with others, and none waits. What a rank passes is logged where a
    # tracker runs: on the main process, unless its class has `main_process_only = False`.

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers given as `log_with`, names and objects, each once."""
        return self._trackers.chosen

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` started on this rank."""
        return self._trackers.running

    @trackers.setter
    def trackers(self, trackers: Iterable[GeneralTracker]) -> None:
        self._trackers.keep(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
        *,
        on_failure: OnFailure = "warn",
    ) -> None:
        """Start the trackers of `log_with`, and store the run's configuration in them.

        All are checked before the first starts. A second call ends the runs of the first.

        Args:
            project_name: the project, or what the tracker calls it (experiment, folder of runs).
            config: names to numbers, strings, booleans or None.
            init_kwargs: name of a tracker to a dictionary of keyword arguments for the function that starts its run
                (``{"wandb": {"mode": "offline"}}``). Options of trackers that are not used are ignored.
            on_failure: what happens when a tracker fails, here and later: "warn" warns once and goes on without it,
                "raise" raises.

        Raises:
            OptionError: a name or an argument is unknown, or a tracker is not logged in.
            TrackerError: a tracker failed, with `on_failure="raise"`.
        """
        logging_dir = self.project_configuration.logging_dir
        self._trackers.start(project_name, config, init_kwargs, on_failure, logging_dir)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log the values of a step with every tracker.

        Args:
            values: names to values. Tensors and NumPy values of one element become Python numbers, tensors on a device
                in one copy; anything else goes to the tracker as it is.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log`.
        """
        for observer in self._accumulator.observers:
            observer.logged(values)
        self._trackers.log(values, step, log_kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log images with every tracker that stores images; each of the others warns once.

        Args:
            values: names to an image, a list of images, or a batch in one tensor or array. An image is a PIL image, a
                tensor [channels, height, width], an array [height, width, channels], either [height, width], or a pair
                `(image, caption)`; floating values are from 0 to 1, whole numbers from 0 to 255.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log_images`.

        Raises:
            OptionError: an image has another shape or range.
        """
        self._trackers.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any | None = None,
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log a table with every tracker that stores tables; each of the others warns once.

        Args:
            table_name: the name.
            columns: names of columns; None with `data`: the first row holds them.
            data: rows.
            dataframe: a pandas dataframe, instead of `columns` and `data`.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log_table`.

        Raises:
            OptionError: there are no rows, or a row is of another length than `columns`.
        """
        self._trackers.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name.

        Args:
            name: the name of a tracker in `log_with`.
            unwrap: return the object of the tracker's own library (a SummaryWriter, a run).

        Returns:
            The tracker. On a rank where it does not run, or if it failed to start or is not installed, an object whose
            methods all do nothing.

        Raises:
            OptionError: the tracker is not in `log_with`, or `init_trackers` was not called.
        """
        return self._trackers.get(name, unwrap)

    # Watching over steps

    @property
    def step_guard(self) -> StepGuard | None:
        """The guard that skips harmful updates, and counts them; None unless `guard_steps` was called."""
        observers = self._prepared.accumulator.observers
        return next((item for item in observers if isinstance(item, StepGuard)), None)

    def guard_steps(
        self,
        *,
        nonfinite_gradients: bool = True,
        loss_spike: float | None = None,
        reference: Literal["median", "ema"] = "median",
        history: int = 100,
        warmup: int = 20,
        max_consecutive: int | None = 10,
    ) -> StepGuard:
        """Skip harmful updates (NaN gradients, loss spikes) on all ranks alike; call it before the first backward.

        When an update is skipped, prepared schedulers do not step either, and `optimizer.step_was_skipped` is true, as
        after an overflow under fp16. `save_state` includes counts and history.

        Args:
            nonfinite_gradients: skip an update if a gradient of the optimizer is inf or NaN. Under fp16 the gradient
                scaler does so, and its skipped updates are counted here.
            loss_spike: skip an update if its loss, the mean over the window and over ranks, is not finite or more than
                this many times the reference; None: losses are not checked.
            reference: "median" of the last losses, or their exponential moving average, "ema". Losses of skipped
                updates do not count.
            history: number of an optimizer's updates that the reference covers.
            warmup: number of losses before the first one is judged.
            max_consecutive: skipped updates in a row after which `StepGuardError` is raised; None: never.

        Raises:
            OptionError: a value cannot be used, or this is the second call.
            IncompatibleOptionsError: the strategy's engine owns the step (DeepSpeed, Megatron-LM), or an optimizer
                updates during backward (LOMO).
        """
        options = StepGuardOptions(
            nonfinite_gradients, loss_spike, reference, history, warmup, max_consecutive
        )
        here = self._prepared
        if self.step_guard is not None:
            raise OptionError("guard_steps() was called twice; one guard decides about all updates.")
        guard = StepGuard(
            options, here.plan.strategy, here.process.num_processes, here.prepared_models, here.accumulator
        )
        for optimizer in here.inner_optimizers:
            guard.check_optimizer(optimizer)
        here.accumulator.observers.append(guard)
        here.parts.append(GuardState(guard, here.optimizers))
        return guard

    def collect_garbage(
        self, every: int = 1000, *, generation: int = 2
    ) -> AbstractContextManager[GarbageCollector]:
        """Context in which Python collects garbage only once per `every` optimizer steps, on all ranks together.

        Otherwise each rank collects at its own moments, and the others wait for it at the next reduction. Everything is
        collected once at the beginning. The end of the context, also after an error, restores the former setting.

        Args:
            every: steps of prepared optimizers, skipped ones included.
            generation: as `gc.collect` takes it. Below 2 it is faster, and cycles that live longer stay until the end.

        Raises:
            OptionError: `every` is below 1, or the generation is unknown.
        """
        return collect_garbage(self._prepared.accumulator.observers, GarbageCollector(every, generation))

    # Lists that clients of Accelerate read and write

    @property
    def _models(self) -> MutableSequence[nn.Module]:
        return self._prepared.models_view()

    @_models.setter
    def _models(self, models: Iterable[nn.Module]) -> None:
        _replace(self._models, models)

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: Iterable[AcceleratedOptimizer]) -> None:
        _replace(self._prepared.optimizers, optimizers)

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: Iterable[AcceleratedScheduler]) -> None:
        _replace(self._prepared.schedulers, schedulers)

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[Any]) -> None:
        _replace(self._prepared.loaders, loaders)

    @property
    def _custom_objects(self) -> MutableSequence[Any]:
        return self._prepared.registered_view()

    @_custom_objects.setter
    def _custom_objects(self, objects: Iterable[Any]) -> None:
        _replace(self._custom_objects, objects)


def _replace(items: MutableSequence[T], values: Iterable[T]) -> None:
    """Give a list other items; it stays the object that others hold."""
    items[:] = list(values)
