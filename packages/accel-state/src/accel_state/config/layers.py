"""Option values from flags or code, by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accel_state.config.flags import ParsedFlags
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.config.option_types import Bool
from accel_state.config.roots import root_for
from accel_state.config.schema import BoundOption, Schema, plain_flag, schema_of, unknown
from accel_state.errors import ConfigError

__all__ = ["OptionLayer", "named_layer"]


@dataclasses.dataclass(frozen=True)
class OptionLayer:
    """The option values of one origin.

    Attributes:
        values: option values by path.
        denied: paths and values to remove if an origin of lower precedence sets them: ``--no-use_fsdp``.
    """

    values: dict[str, Any]
    denied: tuple[tuple[str, str], ...] = ()


def named_layer(
    given: ParsedFlags | Mapping[str, Any] | None, root: type[Section] | None, what: str
) -> OptionLayer:
    """Build the layer of flags or of code.

    Args:
        given: parsed flags, or a mapping of names, in any accepted form, to values; None: nothing is given.
        root: the root that the names must belong to. None: a local run; unknown names are ignored.
        what: the word for a name in messages, such as ``flag``.

    Raises:
        UnknownKeyError: a name does not exist.
        ConfigError: a value is invalid, or two names set one option to different values.
    """
    names: Mapping[str, Any] = given.values if isinstance(given, ParsedFlags) else (given or {})
    denied = list(given.denied) if isinstance(given, ParsedFlags) else []
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, data in names.items():
        if data is None:
            continue
        match = _find(schema_of(root or root_for({name: data})), name)
        if match is None:
            if root is None:
                continue
            raise _not_here(name, given, root, what)
        bound, meaning = match
        if meaning is not None and not _truth(name, data):
            denied.append((bound.path, meaning))
            continue
        value = bound.read(data if meaning is None else meaning, f"{what} {name}")
        if bound.path in found and found[bound.path] != value:
            raise ConfigError(f"{spelled[bound.path]} and {name} exclude each other; keep one of them")
        found[bound.path] = value
        spelled[bound.path] = name
    return OptionLayer(found, tuple(denied))


def _find(known: Schema, name: str) -> tuple[BoundOption, str | None] | None:
    """The option of that name; for a switch also the value that it sets."""
    plain = name if name in known.by_path or name in known.by_flag else plain_flag(f"--{name.lstrip('-')}")
    bound = known.by_path.get(plain) or known.by_flag.get(plain)
    return (bound, None) if bound is not None else known.switches.get(plain)


def _truth(name: str, data: Any) -> bool:
    try:
        return Bool().read(data)
    except ValueError as error:
        raise ConfigError(f"{name} is {data!r}; expected {error}") from None


def _not_here(name: str, given: Any, root: type[Section], what: str) -> ConfigError:
    if isinstance(given, ParsedFlags):
        kinds = ("a SageMaker job", "a local run")
        wanted, actual = kinds if issubclass(root, LaunchConfig) else reversed(kinds)
        return ConfigError(
            f"{given.spelled.get(name, name)} is for {wanted}, but the configuration is for {actual}"
        )
    known = schema_of(root)
    return unknown(name, [*known.by_path, *known.by_flag, *known.switches], what)
