"""The resolver: from options to a plan. It is the only module that sees strategies and precisions together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel_state.config.launch import LaunchConfig
from accel_state.enums import FP8BackendType
from accel_state.errors import NotAvailableError
from accel_state.host.devices import BACKENDS
from accel_state.world.process import PartialState
from accel_train.errors import IncompatibleOptionsError
from accel_train.mesh import Mesh
from accel_train.plugins import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ParallelismConfig,
    StrategyPlugin,
)
from accel_train.plugins.launched import launched_plugin_type
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.precision.engine import EnginePrecision
from accel_train.precision.registry import PRECISIONS
from accel_train.setup.fp8 import backend_of, fp8_recipe
from accel_train.setup.meshes import asked_degrees, make_mesh, sequences
from accel_train.strategies.base import Strategy, StrategyOptions
from accel_train.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from accel_train.sequence.parallel import SequenceParallel

__all__ = ["Given", "RunPlan", "mixed_precision_name", "module_of", "resolve", "strategy_name"]

_MODULES = {"megatron-core": "megatron"}
"""Import names that are not those of the packages."""


@dataclass(frozen=True)
class RunPlan:
    """The decisions of an `Accelerator`, made once: strategy, precision and mesh.

    Attributes:
        strategy: how ranks cooperate.
        precision: which numbers are computed with.
        mesh: degrees of parallelism, and the ranks that follow from them.
        device: of this rank.
        recipe: how fp8 is computed; None in another precision.
        fp8_backend: by which library; in another precision the one that the launcher names.
        parallelism: ranks of each kind of parallelism, complete; None: nobody gave any.
        sequence: divides sequences among ranks; None: each rank has whole ones.
    """

    strategy: Strategy
    precision: Precision
    mesh: Mesh
    device: torch.device
    recipe: Any = None
    fp8_backend: FP8BackendType = FP8BackendType.NO
    parallelism: ParallelismConfig | None = None
    sequence: SequenceParallel | None = None


@dataclass(frozen=True)
class Given:
    """The arguments of `Accelerator` that decide the plan.

    Attributes:
        mixed_precision: name of a precision.
        strategy: name of a strategy, or a plugin whose type has it in `strategy`; None: the number of processes
            decides.
        parallelism: ranks of each kind of parallelism; None: as the strategy has them.
        handlers: options of what is built, by their key: "autocast", "scaler", "ddp", and recipes of fp8.
        sync_each_batch: reduce gradients in every micro-batch.
    """

    mixed_precision: str
    strategy: StrategyPlugin | str | None = None
    parallelism: ParallelismConfig | None = None
    handlers: Mapping[str, Any] = field(default_factory=dict)
    sync_each_batch: bool = False


def resolve(process: PartialState, launched: LaunchConfig, given: Given) -> RunPlan:
    """Decide both axes.

    Raises:
        NotAvailableError: the environment asks for an engine that this version does not have, or what a strategy
            requires is not installed.
        MissingDependencyError: no library that computes the precision is installed.
        OptionError: an unknown name.
        IncompatibleOptionsError: two choices exclude each other; names both.
    """
    config: Any = given.strategy
    degrees = asked_degrees(given.parallelism, process.num_processes)
    name = strategy_name(config, process.num_processes, process.device, degrees)
    strategy_class = STRATEGIES.get(name)
    _check_launched(launched, strategy_class, process.device)
    precision_class = PRECISIONS.get(given.mixed_precision)
    device = process.device
    if degrees is not None and degrees["pp"] > 1:
        _check_precision(strategy_class, precision_class, device)  # inside of a stage
        strategy_class = _of_stages(strategy_class, degrees["pp"])
    _check(strategy_class, precision_class, device, process.num_processes)
    _check_hook(strategy_class, given.handlers.get("ddp"), process.num_processes)
    recipe = fp8_recipe(given.handlers, launched, given.mixed_precision)
    autocast = given.handlers.get("autocast") or AutocastKwargs()
    scaler = given.handlers.get("scaler") or GradScalerKwargs()
    precision: Precision = precision_class(
        PrecisionOptions(
            device_type=device.type,
            autocast_enabled=autocast.enabled,
            cache_enabled=autocast.cache_enabled,
            scaler_kwargs=scaler.to_kwargs(),
            recipe=recipe,
        )
    )
    if strategy_class.capabilities.computes_precision:
        precision = EnginePrecision(precision)
    ddp = given.handlers.get("ddp") or DistributedDataParallelKwargs()
    if config is None or isinstance(config, str):
        config = ddp if name == "ddp" else None
    experts = (given.parallelism.ep_size or 1) if given.parallelism is not None else 1
    mesh = make_mesh(strategy_class, config, process, degrees, experts)
    strategy = strategy_class(
        StrategyOptions(
            device=device,
            mesh=mesh,
            precision=precision,
            config=config,
            sync_each_batch=given.sync_each_batch,
            by_degrees=degrees is not None,
            ddp=ddp,
            pipeline=given.parallelism.pp_handler if given.parallelism is not None else None,
            rehearsal=process.rehearsal,
        )
    )
    parallelism = given.parallelism
    if parallelism is not None:
        parallelism = parallelism.on(mesh.degrees, mesh.device_mesh)
    return RunPlan(
        strategy,
        precision,
        mesh,
        device,
        recipe,
        backend_of(recipe, launched),
        parallelism,
        sequences(parallelism, mesh),
    )


def strategy_name(
    given: StrategyPlugin | str | None,
    num_processes: int,
    device: torch.device,
    degrees: Mapping[str, int] | None = None,
) -> str:
    """The strategy that was asked for: by name, by its plugin's type, or by degrees; else by device and processes."""
    if given is None:
        if device.type == "xla":
            return "xla"
        if degrees is not None and degrees["dp_shard"] > 1:
            return "fsdp2"
        if degrees is not None and degrees["tp"] > 1:
            return "tp"
        return "ddp" if num_processes > 1 else "single"
    return given if isinstance(given, str) else given.strategy


def _of_stages(strategy: type[Strategy], degree: int) -> type[Strategy]:
    """The strategy that divides a model into stages, which are trained as by another one.

    Raises:
        IncompatibleOptionsError: that one cannot train stages.
    """
    if not strategy.capabilities.in_stages:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} cannot train with pp_size={degree}. Leave it out; stages of a pipeline hold "
            "replicas, or are sharded by FSDP (dp_shard_size), or divided by tensor parallelism (tp_size)."
        )
    return STRATEGIES.get("pp")


def mixed_precision_name(
    argument: object | None, launched: LaunchConfig, selecting: StrategyPlugin | str | None = None
) -> str:
    """The precision asked for: the argument, else the launcher's, else the plugin's own, else "no".

    Raises:
        IncompatibleOptionsError: the plugin's own configuration asks for another one.
        OptionError: an unknown name.
    """
    asked = launched.mixed_precision if argument is None else argument
    own = selecting.launched_precision if isinstance(selecting, StrategyPlugin) else None
    name = str(asked or own or "no").lower()
    if own is not None and name != own and name != "no":
        origin = "Accelerator(mixed_precision=…)" if argument is not None else "the launcher"
        raise IncompatibleOptionsError(
            f"{origin} asks for mixed_precision={name!r}, but {type(selecting).__name__}'s configuration enables "
            f"{own}. Leave one of them out."
        )
    name = own or name
    PRECISIONS.get(name)
    return name


def _check_launched(launched: LaunchConfig, strategy: type[Strategy], device: torch.device) -> None:
    """Refuse a strategy or device of the script that is not the one which the launcher asks for."""
    if launched.use_tpu and device.type not in ("xla", "tpu"):
        raise IncompatibleOptionsError(
            f"The launcher asks for XLA devices (--tpu) and the script for {device}. Leave --tpu or cpu=True out."
        )
    asked = launched_plugin_type(launched)
    if (
        asked is None
        or strategy.name == asked.strategy
        or strategy.distributed_type == launched.distributed_type
    ):
        return
    raise IncompatibleOptionsError(
        f"The launcher asks for {launched.distributed_type} (strategy {asked.strategy!r}) and the script for strategy "
        f"{strategy.name!r}, but a run has only one strategy. Leave one of them out."
    )


def _check(
    strategy: type[Strategy], precision: type[Precision], device: torch.device, world_size: int
) -> None:
    capabilities = strategy.capabilities
    missing = [package for package in capabilities.requires if not _is_installed(package)]
    if missing:
        raise NotAvailableError(
            f"strategy {strategy.name!r} needs {', '.join(missing)}. Install it: pip install "
            f"{' '.join(repr(package) for package in missing)}."
        )
    _check_precision(strategy, precision, device)
    _check_device(strategy, device)
    if capabilities.needs_process_group and world_size < 2:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} needs more than one process, but there is only one; launch with "
            "`accel launch --num_processes 2`, or leave the strategy out (--use_fsdp, --use_parallelism_config, "
            "strategy=): its state loads on one process too."
        )
    if precision.dtype is not None and not torch.amp.is_autocast_available(device.type):
        raise IncompatibleOptionsError(
            f"mixed_precision={precision.name!r} needs autocast, which torch does not have for device {device}; use "
            "mixed_precision='no'."
        )
    if (
        precision.dtype is torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise IncompatibleOptionsError(
            f"mixed_precision={precision.name!r} needs a GPU with bfloat16, and "
            f"{torch.cuda.get_device_name(device)} has none; use 'fp16'."
        )


def _check_precision(strategy: type[Strategy], precision: type[Precision], device: torch.device) -> None:
    capabilities = strategy.capabilities
    precisions = capabilities.precisions_for(device.type)
    if precisions is not None and precision.name not in precisions:
        where = f" on device {device}" if device.type in capabilities.precisions_on else ""
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} cannot compute with mixed_precision={precision.name!r}{where}; it takes "
            f"{', '.join(sorted(precisions))}."
        )


def _check_hook(
    strategy: type[Strategy], handler: DistributedDataParallelKwargs | None, world_size: int
) -> None:
    """Refuse a compression of gradients that would not happen; one process sends none."""
    if handler is None or world_size == 1 or strategy.capabilities.communication_hooks:
        return
    if handler.comm_hook is not DDPCommunicationHookType.NO:
        raise IncompatibleOptionsError(
            f"DistributedDataParallelKwargs(comm_hook={str(handler.comm_hook)!r}) compresses the gradients that ddp "
            f"sends, and the strategy {strategy.name!r} reduces its own. Leave comm_hook out, or train with the "
            "strategy 'ddp'."
        )


def _is_installed(requirement: str) -> bool:
    """Whether a package is here, in a version that is asked for."""
    if importlib.util.find_spec(module_of(requirement)) is None:
        return False
    from packaging.requirements import Requirement  # 6 ms, which few runs need

    wanted = Requirement(requirement)
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:  # importable without metadata: a checkout on the path
        return True
    return wanted.specifier.contains(found, prereleases=True)


def _check_device(strategy: type[Strategy], device: torch.device) -> None:
    declared = strategy.capabilities.device_types
    lazy = device.type in BACKENDS and BACKENDS[device.type].lazy
    if device.type in declared if declared is not None else not lazy:
        return
    runs_on = "devices that run operations eagerly" if declared is None else ", ".join(sorted(declared))
    advice = ""
    if lazy:
        advice = " Leave the strategy out to get that of the device, or pass cpu=True."
    elif declared is not None and "xla" in declared:
        advice = " Launch with `accel launch --tpu`, or set PJRT_DEVICE to TPU (or CPU), without --cpu."
    raise IncompatibleOptionsError(
        f"strategy {strategy.name!r} does not run on device {device}; it runs on {runs_on}.{advice}"
    )


def module_of(requirement: str) -> str:
    """The import name of a requirement such as ``deepspeed>=0.19.4``."""
    name = requirement.split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip()
    return _MODULES.get(name, name.replace("-", "_"))
