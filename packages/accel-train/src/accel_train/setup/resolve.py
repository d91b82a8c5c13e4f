"""From what the user asked for to what will be done: the only module that sees all three axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel_state.config.launch import LaunchConfig
from accel_state.errors import NotAvailableError
from accel_state.launching.engines import missing_engine, missing_engines, variable_of
from accel_state.world.process import PartialState
from accel_train.errors import IncompatibleOptionsError
from accel_train.placement.base import Placement
from accel_train.placement.registry import PLACEMENTS
from accel_train.placement.single_device import SingleDevicePlacement
from accel_train.plugins import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    StrategyPlugin,
)
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.precision.registry import PRECISIONS
from accel_train.strategies.base import Strategy, StrategyOptions
from accel_train.strategies.registry import STRATEGIES

__all__ = ["Plan", "mixed_precision_name", "resolve"]


@dataclass(frozen=True)
class Plan:
    """What an `Accelerator` will do, decided once.

    Attributes:
        strategy: how ranks cooperate.
        precision: which numbers are computed with.
        placement: where tensors live, when the user leaves it to the accelerator.
        as_is: the placement that moves nothing.
    """

    strategy: Strategy
    precision: Precision
    placement: Placement
    as_is: Placement


def resolve(
    state: PartialState,
    launched: LaunchConfig,
    plugin: StrategyPlugin | None = None,
    *,
    mixed_precision: str,
    device_placement: bool,
    autocast: AutocastKwargs,
    scaler: GradScalerKwargs,
    ddp: DistributedDataParallelKwargs,
) -> Plan:
    """Decide the three axes.

    Raises:
        NotAvailableError: the launcher asks for an engine that this version does not have.
        OptionError: an unknown name.
        IncompatibleOptionsError: two choices exclude each other; names both.
    """
    if plugin is not None:
        strategy_name = plugin.strategy
    else:
        refuse_engines(launched)
        strategy_name = "ddp" if state.num_processes > 1 else "single"
    strategy_class = STRATEGIES.get(strategy_name)
    precision_class = PRECISIONS.get(mixed_precision)
    device = state.device
    _check(strategy_class, precision_class, device, state.num_processes)
    strategy = strategy_class(
        StrategyOptions(
            device=device,
            world_size=state.num_processes,
            # Only what differs from torch's defaults: naming a default may already be deprecated there.
            ddp_kwargs={**ddp.to_kwargs(), "gradient_as_bucket_view": ddp.gradient_as_bucket_view},
            comm_hook=ddp.register_comm_hook,
            plugin=plugin,
        )
    )
    precision = precision_class(
        PrecisionOptions(
            device_type=device.type,
            autocast_enabled=autocast.enabled,
            cache_enabled=autocast.cache_enabled,
            scaler_kwargs=scaler.to_kwargs(),
        )
    )
    as_is = PLACEMENTS.get("as_is")()
    placement = SingleDevicePlacement(device) if device_placement else as_is
    return Plan(strategy, precision, placement, as_is)


def mixed_precision_name(argument: object | None, launched: LaunchConfig) -> str:
    """The precision asked for: the argument, else the launcher's, else "no".

    Raises:
        NotAvailableError: a precision that this version does not have.
        OptionError: an unknown name.
    """
    name = str(launched.mixed_precision or "no" if argument is None else argument).lower()
    if missing_engine("mixed_precision", name) is not None:
        raise NotAvailableError(
            f"mixed_precision={name!r} is not available yet in this version; use 'bf16', or 'no'."
        )
    PRECISIONS.get(name)
    return name


def refuse_engines(launched: LaunchConfig) -> None:
    """Refuse an engine that the launcher asks for.

    Raises:
        NotAvailableError: rather than train another way than was asked for.
    """
    for engine in missing_engines(launched):
        if engine.option == "mixed_precision":
            continue  # the script may have chosen another
        variable = variable_of(engine)
        raise NotAvailableError(
            f"The environment asks for {engine.name} ({variable} is set), which is not available yet in this version. "
            f"Launch without it, or unset {variable}."
        )


def _check(
    strategy: type[Strategy], precision: type[Precision], device: torch.device, world_size: int
) -> None:
    capabilities = strategy.capabilities
    if capabilities.precisions is not None and precision.name not in capabilities.precisions:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} cannot compute with mixed_precision={precision.name!r}; it takes "
            f"{', '.join(sorted(capabilities.precisions))}."
        )
    if capabilities.device_types is not None and device.type not in capabilities.device_types:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} does not run on device {device}; it runs on "
            f"{', '.join(sorted(capabilities.device_types))}."
        )
    if capabilities.needs_process_group and world_size < 2:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} needs more than one process, and there is one; launch with "
            "`accel launch --num_processes 2`."
        )
    if precision.dtype is not None and not torch.amp.is_autocast_available(device.type):
        raise IncompatibleOptionsError(
            f"mixed_precision={precision.name!r} needs autocast, which torch does not have for device {device}; use "
            "mixed_precision='no'."
        )
    if (
        precision.name == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise IncompatibleOptionsError(
            f"mixed_precision='bf16' needs a GPU with bfloat16, and {torch.cuda.get_device_name(device)} has none; "
            "use 'fp16'."
        )
