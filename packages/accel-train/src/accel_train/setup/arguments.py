"""Check the arguments of `Accelerator`, and merge them with the launcher's settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.enums import DynamoBackend, RNGType
from accel_state.errors import NotAvailableError
from accel_state.handlers import KwargsHandler
from accel_state.messages import warn
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError
from accel_train.plugins import (
    DataLoaderConfiguration,
    DeepSpeedPlugins,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    ProjectConfiguration,
    StrategyPlugin,
    TorchDynamoPlugin,
)
from accel_train.plugins.launched import launched_parallelism

__all__ = [
    "accumulation_plugin",
    "check_types",
    "collect_handlers",
    "dynamo_plugin",
    "loader_config",
    "parallelism",
    "project_configuration",
    "refuse_unavailable",
    "refuse_unknown",
    "rng_type_names",
    "strategy_plugin",
]

#: Classes that hold options which are no arguments of `Accelerator`, and the argument that takes the object.
_CONFIGURATIONS: dict[Any, str] = {
    DataLoaderConfiguration: "dataloader_config={}",
    ProjectConfiguration: "project_config={}",
    GradientAccumulationPlugin: "gradient_accumulation_plugin={}",
    DistributedDataParallelKwargs: "kwargs_handlers=[{}]",
    GradScalerKwargs: "kwargs_handlers=[{}]",
}


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments that `Accelerator` does not have; the error says where the option is, or which name is nearest.

    Args:
        unknown: names of the arguments given.
        known: names of the arguments that exist.

    Raises:
        OptionError: a name is an option of another class.
        TypeError: a name is unknown; the message suggests the nearest one.
    """
    for name in unknown:
        if name in ("fp16", "bf16"):
            raise OptionError(
                f"Accelerator({name}=…) no longer exists; use Accelerator(mixed_precision={name!r})."
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


def check_types(**arguments: tuple[object, type | tuple[type, ...]]) -> None:
    """Refuse arguments that are not of the type they are paired with; None is allowed except for a truth value.

    Raises:
        ArgumentTypeError: names the argument, its type and its value.
    """
    for name, (value, wanted) in arguments.items():
        if isinstance(value, wanted) or (value is None and wanted is not bool):
            continue
        if wanted is bool:
            kind = "True or False"
        else:
            kind = "a list" if isinstance(wanted, tuple) else f"{wanted.__name__}(…)"
        raise ArgumentTypeError(
            f"Accelerator({name}=…) takes {kind}, got {type(value).__name__}: {value!r:.80}."
        )


def strategy_plugin(
    *, strategy: StrategyPlugin | str | None = None, **candidates: object
) -> StrategyPlugin | str | None:
    """Find the plugin or name that selects the strategy; None: the number of processes decides.

    Args:
        strategy: a plugin, or the name of a strategy that needs none.
        candidates: the constructor's other arguments that can hold such a plugin, under their names.

    Raises:
        OptionError: `strategy` is neither a plugin nor a name.
        NotAvailableError: a value is not a plugin of a strategy that this version has.
        IncompatibleOptionsError: two arguments select a strategy.
    """
    if strategy is not None and not isinstance(strategy, StrategyPlugin | str):
        raise OptionError(
            f"Accelerator(strategy=…) takes the name of a strategy or a plugin whose type names one, got "
            f"{type(strategy).__name__}: {strategy!r:.80}."
        )
    given = {name: value for name, value in candidates.items() if value is not None}
    for name in ("deepspeed_plugin", "deepspeed_plugins"):
        several = given.get(name)
        if isinstance(several, Mapping):
            given[name] = DeepSpeedPlugins(several)
    refuse_unavailable(
        {name: value for name, value in given.items() if not isinstance(value, StrategyPlugin)}
    )
    chosen = {name: value for name, value in given.items() if isinstance(value, StrategyPlugin)}
    described = [
        f"{name}={type(value).__name__}(…) (strategy {value.strategy!r})" for name, value in chosen.items()
    ]
    if strategy is not None:
        described.append(f"strategy={strategy if isinstance(strategy, str) else type(strategy).__name__!r}")
    if len(described) > 1:
        raise IncompatibleOptionsError(
            f"Accelerator() got {' and '.join(described)}, but a run has only one strategy. Pass one of them."
        )
    return strategy if strategy is not None else next(iter(chosen.values()), None)


def parallelism(given: object, launched: LaunchConfig) -> tuple[ParallelismConfig | None, object]:
    """The degrees of parallelism, and what else was given in their place: a plugin that selects a strategy.

    Args:
        given: the argument `parallelism_config`.
        launched: the launcher's settings, used if the script gives nothing.
    """
    if isinstance(given, ParallelismConfig):
        return given, None
    return (launched_parallelism(launched) if given is None else None), given


def refuse_unavailable(arguments: Mapping[str, object]) -> None:
    """Refuse constructor arguments whose feature this version does not have.

    Raises:
        NotAvailableError: one of `arguments` (name to value) is not None.
    """
    for name, value in arguments.items():
        if value is not None:
            raise NotAvailableError(
                f"Accelerator({name}={type(value).__name__}(…)) is not available yet in this version. Leave it out to "
                "train with one process or data parallelism (ddp)."
            )


def accumulation_plugin(
    steps: int,
    plugin: GradientAccumulationPlugin | None,
    launched: LaunchConfig,
    selecting: StrategyPlugin | str | None = None,
) -> GradientAccumulationPlugin:
    """Find the options of gradient accumulation.

    A plugin is used as it is: a script that passes one with `num_steps=1` accumulates and scales by itself, and must
    not be scaled again. Over the plain argument, the launcher's number has precedence.

    Args:
        steps: the argument `gradient_accumulation_steps`.
        plugin: the argument `gradient_accumulation_plugin`.
        launched: the launcher's settings.
        selecting: the plugin of the strategy, whose own configuration may have the number.

    Raises:
        IncompatibleOptionsError: the script passes both arguments, or another number than the plugin's configuration.
        OptionError: `steps` is not a whole number of at least 1.
    """
    if plugin is not None and steps != 1:
        raise IncompatibleOptionsError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given. Set the number "
            "in the plugin: GradientAccumulationPlugin(num_steps=…)."
        )
    own = selecting.accumulation_steps if isinstance(selecting, StrategyPlugin) else None
    if own is not None and plugin is None:
        asked_for = steps if steps != 1 else launched.gradient_accumulation.num_steps or 1
        if asked_for not in (1, own):
            origin = "Accelerator(gradient_accumulation_steps=…)" if steps != 1 else "the launcher"
            raise IncompatibleOptionsError(
                f"{origin} asks for {asked_for} gradient accumulation steps, and {type(selecting).__name__}'s "
                f'configuration says {own}. Leave one of them out; "auto" in the configuration takes the other.'
            )
        return GradientAccumulationPlugin(num_steps=own)
    section = launched.gradient_accumulation
    asked = plugin or GradientAccumulationPlugin.from_section(dataclasses.replace(section, num_steps=steps))
    used = asked if plugin is not None else GradientAccumulationPlugin.from_section(section)
    wanted, number = section.num_steps, asked.num_steps or 1
    if wanted is None or wanted == number:
        return asked
    if plugin is not None or number != 1:
        warn(
            f"The launcher asks for {wanted} gradient accumulation steps and the script for {number}; "
            f"{used.num_steps or 1} is used.",
        )
    return used


def dynamo_plugin(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None, launched: LaunchConfig
) -> TorchDynamoPlugin:
    """Find the options of `torch.compile`: the plugin, or the launcher's settings with the given backend.

    Raises:
        IncompatibleOptionsError: the script gives the backend twice.
        OptionError: torch has no such backend.
    """
    if backend is not None and plugin is not None:
        raise IncompatibleOptionsError(
            f"dynamo_backend={str(backend)!r} and dynamo_plugin were both given. Set the backend in the plugin."
        )
    if plugin is not None:
        return plugin
    section = launched.dynamo if backend is None else dataclasses.replace(launched.dynamo, backend=backend)
    return TorchDynamoPlugin.from_section(section)


def loader_config(
    config: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """The options of loaders; the deprecated `split_batches` becomes one of them."""
    config = config or DataLoaderConfiguration()
    if split_batches is not None:
        warn(
            "Accelerator(split_batches=…) is deprecated; use "
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=…)).",
            FutureWarning,
        )
        config = dataclasses.replace(config, split_batches=split_batches)
    return config


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    """The given configuration or a new one; `project_dir` is used if the configuration names no folder."""
    config = config or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return config


def rng_type_names(rng_types: Sequence[str | RNGType] | None) -> list[str]:
    """The names of the generators that are made equal on all ranks; by default only the sampler's.

    Raises:
        OptionError: `rng_types` is not a list, or it contains an unknown name.
    """
    if rng_types is None:
        return [RNGType.GENERATOR.value]
    known = ", ".join(kind.value for kind in RNGType)
    if isinstance(rng_types, str):
        raise OptionError(
            f"rng_types takes a list of names from {known}, got {rng_types!r}. Write [{rng_types!r}]."
        )
    wrong = [kind for kind in rng_types if kind not in RNGType]
    if wrong:
        raise OptionError(f"rng_types contains {wrong[0]!r}; known: {known}.")
    return [RNGType(kind).value for kind in rng_types]


def collect_handlers(
    handlers: list[KwargsHandler] | None, known: Mapping[type[KwargsHandler], str]
) -> dict[str, KwargsHandler]:
    """Sort `kwargs_handlers` by kind.

    Args:
        handlers: what the user passed.
        known: accepted classes, and the key of each in the result.

    Raises:
        OptionError: an object has another class, or is the second of its class.
    """
    found: dict[str, KwargsHandler] = {}
    for handler in handlers or []:
        kind = next((name for cls, name in known.items() if isinstance(handler, cls)), None)
        if kind is None:
            names = ", ".join(sorted(cls.__name__ for cls in known))
            raise OptionError(
                f"kwargs_handlers contains {handler!r}, which is not one of the accepted kinds: {names}."
            )
        if kind in found:
            raise OptionError(f"kwargs_handlers contains two {type(handler).__name__}; pass one.")
        found[kind] = handler
    return found
