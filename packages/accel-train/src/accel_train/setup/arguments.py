"""What the arguments of `Accelerator` come to: checked, and merged with what the launcher asks for."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Iterable
from typing import Any

from accel_state.enums import DynamoBackend
from accel_state.environment import get_int_from_env
from accel_state.errors import NotAvailableError
from accel_train.config import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError

__all__ = [
    "accumulation_plugin",
    "check_types",
    "dynamo_plugin",
    "loader_config",
    "refuse_unknown",
    "strategy_plugin",
]

#: Where an option goes that is no argument of `Accelerator` itself.
_CONFIGURATIONS: dict[Any, str] = {
    DataLoaderConfiguration: "dataloader_config={}",
    ProjectConfiguration: "project_config={}",
    GradientAccumulationPlugin: "gradient_accumulation_plugin={}",
    DistributedDataParallelKwargs: "kwargs_handlers=[{}]",
    GradScalerKwargs: "kwargs_handlers=[{}]",
}


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Say what was meant by arguments that `Accelerator` does not have.

    Args:
        unknown: names of the arguments given.
        known: names of those that exist.

    Raises:
        OptionError: a name that exists elsewhere.
        TypeError: any other; it suggests the nearest one.
    """
    for name in unknown:
        if name in ("fp16", "bf16"):
            raise OptionError(
                f"Accelerator({name}=…) does not exist any more; use Accelerator(mixed_precision={name!r})."
            )
        for kind, argument in _CONFIGURATIONS.items():
            if name in {field.name for field in dataclasses.fields(kind)}:
                raise OptionError(
                    f"Accelerator({name}=…) does not exist; {name} is an option of {kind.__name__}: "
                    f"Accelerator({argument.format(f'{kind.__name__}({name}=…)')})."
                )
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"Accelerator() got an unexpected argument {name!r}.{hint}")


def check_types(**arguments: tuple[Any, type | tuple[type, ...]]) -> None:
    """Refuse arguments that are neither None nor of the type they are paired with."""
    for name, (value, wanted) in arguments.items():
        if value is not None and not isinstance(value, wanted):
            kind = "a list" if isinstance(wanted, tuple) else f"{wanted.__name__}(…)"
            raise ArgumentTypeError(
                f"Accelerator({name}=…) takes {kind}, got {type(value).__name__}: {value!r:.80}."
            )


def accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The accumulation options: what the script says, unless the launcher says otherwise.

    Raises:
        IncompatibleOptionsError: the script says it twice.
    """
    if plugin is not None and steps != 1:
        raise IncompatibleOptionsError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given; put the number "
            "into the plugin: GradientAccumulationPlugin(num_steps=…)."
        )
    plugin = plugin or GradientAccumulationPlugin(num_steps=steps)
    if plugin.num_steps is not None and plugin.num_steps != 1:
        asked = plugin.num_steps
    else:
        asked = 1
    launched = get_int_from_env(["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], asked)
    if launched == (plugin.num_steps or 1):
        return plugin
    if asked != 1:
        warnings.warn(
            f"The launcher asks for {launched} gradient accumulation steps and the script for {asked}; the launcher's "
            "number is used.",
            stacklevel=3,
        )
    return GradientAccumulationPlugin(
        num_steps=launched,
        adjust_scheduler=plugin.adjust_scheduler,
        sync_with_dataloader=plugin.sync_with_dataloader,
        sync_each_batch=plugin.sync_each_batch,
    )


def dynamo_plugin(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """The options of `torch.compile`.

    Raises:
        IncompatibleOptionsError: the backend is given twice.
    """
    if backend is not None and plugin is not None:
        raise IncompatibleOptionsError(
            f"dynamo_backend={str(backend)!r} and dynamo_plugin were both given; put the backend into the plugin."
        )
    return plugin or TorchDynamoPlugin(backend=backend)


def loader_config(
    config: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """The options of loaders; the deprecated `split_batches` becomes one of them."""
    config = config or DataLoaderConfiguration()
    if split_batches is not None:
        warnings.warn(
            "Accelerator(split_batches=…) is deprecated; use "
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=…)).",
            FutureWarning,
            stacklevel=3,
        )
        config = dataclasses.replace(config, split_batches=split_batches)
    return config


def strategy_plugin(**candidates: Any) -> Any:
    """The one argument that selects a strategy: a name, or a plugin whose type names it; None without any.

    Raises:
        IncompatibleOptionsError: several do.
        NotAvailableError: a plugin of a strategy that this version does not have.
    """
    given = {name: value for name, value in candidates.items() if value is not None}
    if len(given) > 1:
        raise IncompatibleOptionsError(
            f"Accelerator() got {' and '.join(given)}, and each selects a strategy. Give one."
        )
    for name, value in given.items():
        if name != "strategy" and not isinstance(getattr(type(value), "strategy", None), str):
            raise NotAvailableError(
                f"Accelerator({name}=…) is not available yet in this version. Leave it out to train with one process "
                "or data parallelism (ddp)."
            )
        return value
    return None
