"""Plugins and kwargs handlers: options that users pass to `Accelerator`."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from accel_state.enums import BaseEnum, DynamoBackend, RNGType
from accel_state.environment import parse_choice_from_env, parse_flag_from_env
from accel_state.handlers import KwargsHandler
from accel_train.errors import ArgumentTypeError, OptionError

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
]


class DDPCommunicationHookType(BaseEnum):
    """Gradient compression of ddp."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast` for prepared models.

    Attributes:
        enabled: whether prepared models run under autocast.
        cache_enabled: whether autocast keeps cast weights within one forward; None is torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`, under its names and with its defaults.

    `gradient_as_bucket_view` is on: gradients are views of the communication buckets, which saves one copy of them.

    Attributes:
        comm_hook: compression of the gradients in flight.
        comm_wrapper: cast around a PowerSGD hook: no, fp16 or bf16.
        comm_state_option: options of `PowerSGDState`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _hook_type("comm_hook", self.comm_hook)
        self.comm_wrapper = _hook_type("comm_wrapper", self.comm_wrapper)
        allowed = (
            DDPCommunicationHookType.NO,
            DDPCommunicationHookType.FP16,
            DDPCommunicationHookType.BF16,
        )
        if self.comm_wrapper not in allowed:
            raise OptionError(f"comm_wrapper must be no, fp16 or bf16, got {str(self.comm_wrapper)!r}.")
        if self.comm_wrapper is not allowed[0] and self.comm_hook is allowed[0]:
            raise OptionError(
                f"comm_wrapper={str(self.comm_wrapper)!r} casts around a comm_hook, and there is none. To compress "
                f"gradients alone, use comm_hook={str(self.comm_wrapper)!r}."
            )
        if self.comm_state_option and self.comm_hook in allowed:
            raise OptionError(
                f"comm_state_option={self.comm_state_option!r} is for comm_hook='power_sgd' and 'batched_power_sgd', "
                f"and comm_hook is {str(self.comm_hook)!r}."
            )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The arguments of the DDP constructor: all fields but those of the communication hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the chosen hook on a DDP model; does nothing without one."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        state: Any = None
        if self.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(process_group=None, **self.comm_state_option)
        if self.comm_wrapper in wrappers:
            hook = wrappers[self.comm_wrapper](hook)
        model.register_comm_hook(state, hook)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`, under its names and with its defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Attributes:
        activities: of "cpu", "cuda", "xpu", "mtia", "hpu"; None lets torch choose.
        schedule_option: arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler when a cycle of the schedule is done.
        output_trace_dir: folder for one Chrome trace per rank, `profile_<rank>.json`.
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> Any:
        """The profiler, not started.

        Raises:
            OptionError: an activity that torch does not know.
        """
        import torch

        known = {name.lower(): value for name, value in torch.profiler.ProfilerActivity.__members__.items()}
        activities = None
        if self.activities is not None:
            unknown = [name for name in self.activities if name not in known]
            if unknown:
                raise OptionError(
                    f"Unknown profiler activity {unknown[0]!r}; known: {', '.join(sorted(known))}."
                )
            activities = [known[name] for name in self.activities]
        schedule = torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Attributes:
        num_steps: micro-batches between two optimizer steps; None: 1.
        adjust_scheduler: the scheduler was given a length in micro-batches, so it also advances while gradients
            accumulate. Off by default: a prepared scheduler advances when the optimizer does.
        sync_with_dataloader: the last batch of a loader ends a window.
        sync_each_batch: reduce gradients at every micro-batch; less memory when sharded, more communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is None:
            return
        # numbers.Integral: NumPy's integers, too.
        if isinstance(steps, bool) or not isinstance(cast(object, steps), numbers.Integral) or steps < 1:
            raise OptionError(
                f"The number of gradient accumulation steps must be a whole number of at least 1, got {steps!r}."
            )
        self.num_steps = int(steps)


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared; `accelerator.dataloader_config` may be changed between two calls of `prepare`.

    Attributes:
        split_batches: the loader's batch size is the global one, divided among ranks; else each rank's own.
        dispatch_batches: rank 0 reads and sends; None: only for iterable datasets on a device.
        even_batches: the last round is filled up so that every rank gets as many batches.
        use_seedable_sampler: the order depends on `data_seed` and the epoch alone.
        data_seed: seed of the seedable sampler; None: torch's initial seed.
        non_blocking: move batches without waiting (wants pinned memory).
        use_stateful_dataloader: loaders save and restore their position inside an epoch.
        pre_sharded: the dataset gives each rank its own part already; None: detect it.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    pre_sharded: bool | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value, may_be_none = getattr(self, option.name), option.default is None
            wanted: type = int if option.name == "data_seed" else bool
            if not isinstance(value, wanted) and not (may_be_none and value is None):
                raise ArgumentTypeError(
                    f"DataLoaderConfiguration({option.name}={value!r}) must be {wanted.__name__}"
                    f"{' or None' if may_be_none else ''}, not {type(value).__name__}. Give one of those."
                )


@dataclass
class ProjectConfiguration:
    """Where checkpoints go and how they are named.

    Attributes:
        project_dir: folder of the project.
        logging_dir: folder of logs; the project's by default.
        automatic_checkpoint_naming: checkpoints go to `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: how many automatic checkpoints are kept; older ones go after a new one is complete.
        iteration: number of the next checkpoint.
        save_on_each_node: every node writes (no shared file system).
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise OptionError(
                f"total_limit must be at least 1, got {self.total_limit}: nothing would be kept."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the project folder, and the logging folder if it has none."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    """The configuration that was given, or a new one, with the folder that was given beside it."""
    config = config or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return config


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile` for prepared models; unset ones come from the launcher's environment.

    Attributes:
        backend: the compiler; NO compiles nothing.
        mode: `torch.compile`'s mode.
        fullgraph: whether a graph break is an error.
        dynamic: whether shapes are dynamic; None lets torch find out.
        options: options of the backend.
        disable: make `torch.compile` a no-op, for testing.
        use_regional_compilation: compile the repeated blocks of a model, each kind once, not the whole.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = parse_choice_from_env("ACCELERATE_DYNAMO_BACKEND", "no")
        self.backend = _dynamo_backend(self.backend)
        if self.mode is None:
            self.mode = parse_choice_from_env("ACCELERATE_DYNAMO_MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = parse_flag_from_env("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = parse_flag_from_env("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
        if self.dynamic is None and parse_flag_from_env("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = True

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend is not DynamoBackend.NO

    @property
    def compiler(self) -> str:
        """The backend under the lower-case name that `torch.compile` takes."""
        return str(self.backend).lower()

    def to_dict(self) -> dict[str, Any]:
        """All fields, the backend as the lower-case name that `torch.compile` takes."""
        fields = super().to_dict()
        fields["backend"] = self.compiler
        return fields

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


def _dynamo_backend(value: object) -> DynamoBackend:
    try:
        return DynamoBackend(str(value))
    except ValueError:
        names = ", ".join(sorted(str(member.value).lower() for member in DynamoBackend))
        raise OptionError(f"Unknown dynamo backend {str(value)!r}; known: {names}.") from None


def _hook_type(name: str, value: object) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        known = ", ".join(DDPCommunicationHookType.list())
        raise OptionError(f"{name} must be one of {known}, got {value!r}.") from None


def rng_type_names(rng_types: Sequence[str | RNGType] | None) -> list[str]:
    """The names of the random states that ranks share; by default the sampler's generator alone.

    Raises:
        OptionError: not a list, or a name in it that is not known.
    """
    if rng_types is None:
        return [RNGType.GENERATOR.value]
    known = ", ".join(kind.value for kind in RNGType)
    if isinstance(rng_types, str):
        raise OptionError(
            f"rng_types takes a list of names out of {known}, got {rng_types!r}. Write [{rng_types!r}]."
        )
    wrong = [kind for kind in rng_types if kind not in RNGType]
    if wrong:
        raise OptionError(f"rng_types holds {wrong[0]!r}; known: {known}.")
    return [RNGType(kind).value for kind in rng_types]


def collect_handlers(
    handlers: list[KwargsHandler] | None, known: Mapping[type[KwargsHandler], str]
) -> dict[str, KwargsHandler]:
    """Sort `kwargs_handlers` by kind.

    Args:
        handlers: what the user passed.
        known: accepted classes and the name each is filed under.

    Raises:
        OptionError: an object that is no handler, of an unknown class, or the second of its class.
    """
    found: dict[str, KwargsHandler] = {}
    for handler in handlers or []:
        kind = next((name for cls, name in known.items() if isinstance(handler, cls)), None)
        if kind is None:
            names = ", ".join(sorted(cls.__name__ for cls in known))
            raise OptionError(
                f"kwargs_handlers holds {handler!r}, which is not one of the accepted kinds: {names}."
            )
        if kind in found:
            raise OptionError(f"kwargs_handlers holds two {type(handler).__name__}; pass one.")
        found[kind] = handler
    return found
