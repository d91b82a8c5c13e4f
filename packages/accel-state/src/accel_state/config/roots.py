"""The options of a local run: those of ``LaunchConfig``, and those of installed strategies if the run names one.

A run that names none costs nothing: nothing is searched and nothing is imported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import plain_flag, schema_of
from accel_state.config.strategies import LaunchableStrategy, installed_strategies
from accel_state.enums import DistributedType

__all__ = ["complete_root", "root_for", "root_of_environment", "selects_installed"]

_TYPE = "distributed_type"
_SWITCH = "ACCELERATE_USE_"


def complete_root() -> type[LaunchConfig]:
    """``LaunchConfig`` with the sections, choices and flags of all installed strategies.

    Raises:
        ConfigError: an installed strategy cannot be imported.
    """
    strategies = installed_strategies()
    return _extended(strategies) if strategies else LaunchConfig


def root_for(names: Mapping[str, Any]) -> type[LaunchConfig]:
    """The root that has these options.

    Args:
        names: paths, flags or switches of options, in any accepted spelling, to values.
    """
    known = schema_of(LaunchConfig)
    for name, value in names.items():
        plain = name if name in known.by_path else plain_flag(f"--{name.lstrip('-')}")
        is_known = plain in known.by_path or plain in known.by_flag or plain in known.switches
        if value is not None and (not is_known or (plain == _TYPE and selects_installed(value))):
            return complete_root()
    return LaunchConfig


def root_of_environment(environ: Mapping[str, str]) -> type[LaunchConfig]:
    """The root of the configuration that ``environ`` encodes."""
    known = schema_of(LaunchConfig).by_variable
    if selects_installed(environ.get("ACCELERATE_DISTRIBUTED_TYPE") or None):
        return complete_root()
    switches = {name for name in environ if name.startswith(_SWITCH)}
    return LaunchConfig if switches <= known.keys() else complete_root()


def selects_installed(value: object) -> bool:
    """Whether a value of ``distributed_type`` is none of those that need no installed strategy."""
    if not isinstance(value, str):
        return False
    about = schema_of(LaunchConfig).by_path[_TYPE].about
    word = value.strip().lower()
    return bool(word) and word not in {choice.lower() for choice in about.choices} | set(about.synonyms)


@functools.lru_cache(maxsize=32)
def _extended(strategies: tuple[LaunchableStrategy, ...]) -> type[LaunchConfig]:
    fields: list[Any] = [(_TYPE, "str | None", _distributed_type(strategies))]
    fields += [
        (each.section_name, each.section, dataclasses.field(default_factory=each.section))
        for each in strategies
    ]
    body: dict[str, Any] = {
        "strategies": strategies, "__doc__": LaunchConfig.__doc__, "__module__": __name__,
    }  # fmt: skip
    return dataclasses.make_dataclass(
        "LaunchConfig", fields, bases=(LaunchConfig,), namespace=body, frozen=True, repr=False, eq=False
    )


def _distributed_type(strategies: tuple[LaunchableStrategy, ...]) -> Any:
    """The option with the choices and flags of the strategies."""
    (declared,) = (field for field in dataclasses.fields(LaunchConfig) if field.name == _TYPE)
    about = declared.metadata["option"]
    known = {*about.choices, *(each.distributed_type for each in strategies)}
    listed = [member.value for member in DistributedType if member.value in known]
    switches = {each.flag: (each.distributed_type, each.variable) for each in strategies}
    more = dataclasses.replace(
        about,
        choices=tuple(dict.fromkeys([*listed, *sorted(known)])),
        switches={**about.switches, **switches},
    )
    return dataclasses.field(default=declared.default, metadata={"option": more})
