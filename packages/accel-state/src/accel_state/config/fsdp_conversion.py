"""Conversion of the FSDP options of a configuration file from version 1 to version 2.

The table of keys is that of ``accelerate to-fsdp2`` (Accelerate 1.15), so the result can be read by both. Where
Accelerate copies a value that version 2 does not have, it is translated as the FSDP plugin of accel-train does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import BoundOption, schema_of, unknown
from accel_state.config.sections.fsdp import FSDP_HYBRID_STRATEGIES, FSDP_RESHARDS, FsdpSection
from accel_state.errors import ConfigError

__all__ = ["Change", "convert_fsdp_options", "converted"]

_DROPPED = {
    "backward_prefetch": "version 2 always gathers the next parameters before they are needed (BACKWARD_PRE)",
    "forward_prefetch": "Accelerate's version 2 does not have it; accel does: it gathers the next unit in forward",
    "sync_module_states": "with version 2 all ranks start with rank 0's weights",
    "use_orig_params": "version 2 always has the original parameters",
}
"""Attributes of the section that version 2 does not have, and why."""

_VERSION = "fsdp_version"
_RESHARD = "fsdp_reshard_after_forward"


@dataclass(frozen=True, slots=True)
class Change:
    """The conversion of one key.

    Attributes:
        key: the key as the file has it.
        what: ``keep``: it and its value stay; ``set``: it has another value; ``rename``: it has another name, and
            another value if ``value`` differs; ``drop``: it is gone; ``add``: it was not there.
        before: the old value; None for ``add``.
        name: the new key; None for ``drop``.
        value: the new value.
        why: a clause for the user; may be empty.
        warn: the result does something else, or may be refused.
    """

    key: str
    what: Literal["keep", "set", "rename", "drop", "add"]
    before: Any
    name: str | None
    value: Any = None
    why: str = ""
    warn: bool = False


def convert_fsdp_options(options: Mapping[str, Any], where: str = "") -> list[Change]:
    """Convert each key of an ``fsdp_config`` from version 1 to version 2, in the order of the file.

    Args:
        options: the mapping, with keys in any accepted spelling.
        where: name of the file, for messages.

    Raises:
        ConfigError: a value that must be translated is unknown to version 1.
    """
    _refuse_two_spellings(options, where)
    found = [_change(key, value, options, where) for key, value in options.items()]
    if all(change.name != _VERSION for change in found):
        found.insert(0, Change(_VERSION, "add", None, _VERSION, 2, "without it, files are read as version 1"))
    return found


def converted(changes: list[Change]) -> dict[str, Any]:
    """The new ``fsdp_config``."""
    return {change.name: change.value for change in changes if change.name is not None}


def _bound(key: str) -> BoundOption | None:
    return schema_of(LaunchConfig).by_key.get((FsdpSection.file_key, key))


def _refuse_two_spellings(options: Mapping[str, Any], where: str) -> None:
    spelled: dict[str, str] = {}
    for key, value in options.items():
        bound = _bound(key)
        before = spelled.setdefault(bound.path, key) if bound is not None else key
        if options[before] != value:
            raise ConfigError(
                f"{where}: {before} is {options[before]!r} and {key} is {value!r}, but both set the same option; keep "
                "one of them"
            )


def _change(key: str, value: Any, options: Mapping[str, Any], where: str) -> Change:
    bound = _bound(key)
    if bound is None:
        names = [other for place, other in schema_of(LaunchConfig).by_key if place == FsdpSection.file_key]
        return Change(key, "keep", value, key, value, f"{unknown(key, names, 'key')}", warn=True)
    match bound.attribute:
        case "fsdp_version":
            return _to(key, value, _VERSION, 2)
        case "sharding_strategy" | "reshard_after_forward":
            return _sharding(bound, key, value, options, where)
        case "state_dict_type" if (
            value is not None and bound.read(value, f"{where}: {key}") == "LOCAL_STATE_DICT"
        ):
            why = "version 2 has no LOCAL_STATE_DICT; a sharded one is the parts of each rank too"
            return _to(key, value, key, "SHARDED_STATE_DICT", why, warn=True)
        case attribute if attribute in _DROPPED:
            truth = None if value is None else bound.read(value, f"{where}: {key}")
            lost = (attribute, truth) in (("forward_prefetch", True), ("sync_module_states", False))
            return Change(key, "drop", value, None, why=_DROPPED[attribute], warn=lost)
        case _:
            return Change(key, "keep", value, key, value)


def _sharding(bound: BoundOption, key: str, value: Any, options: Mapping[str, Any], where: str) -> Change:
    """``sharding_strategy``, or ``reshard_after_forward``, which takes precedence, as in the plugin."""
    if bound.attribute == "sharding_strategy":
        other = next(
            (name for name in options if (at := _bound(name)) and at.attribute == "reshard_after_forward"),
            None,
        )
        if other is not None and options[other] is not None:
            return Change(key, "drop", value, None, why=f"{other} sets it")
    if value is None:
        return Change(key, "drop", value, None, why="it is not set")
    read = bound.read(value, f"{where}: {key}")
    name = _RESHARD if bound.attribute == "sharding_strategy" else key
    if not isinstance(read, str):
        return _to(key, value, name, read)
    why, warn = "", False
    if read in FSDP_HYBRID_STRATEGIES:
        why = (
            f"{read} keeps a replica of the model on each machine; with version 2 this is parallelism_config: "
            "parallelism_config_dp_replicate_size is the number of machines, …_dp_shard_size that of processes on one"
        )
        warn = True
    elif read == "NO_SHARD":
        why = (
            "NO_SHARD keeps whole parameters on every rank; version 2 always shards them, with the same results and "
            "less memory. For whole ones use distributed_type MULTI_GPU, without fsdp_config"
        )
        warn = True
    return _to(key, value, name, FSDP_RESHARDS[read], why, warn=warn)


def _to(key: str, before: Any, name: str, value: Any, why: str = "", *, warn: bool = False) -> Change:
    what: Literal["keep", "set", "rename"] = "rename" if name != key else "keep"
    if what == "keep" and (before != value or type(before) is not type(value)):
        what = "set"
    return Change(key, what, before, name, value, why, warn)
