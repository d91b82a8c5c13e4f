"""Environment variables with a prefix of this library that nothing reads, such as misspelt ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from accel_state.config.launch import LaunchConfig
from accel_state.config.roots import complete_root
from accel_state.config.schema import schema_of, variables_of
from accel_state.constants import DEVICE_COUNT, NAMES_TOLD, RANK_PREFIXED, RUN_FOLDER, STORE_SECRET
from accel_state.messages import did_you_mean, nearest

__all__ = ["misspelt_variables", "unknown_variables"]

_PYTHON = "ACCEL_PYTHON"  # accel launch --as_accelerate sets it for the command accelerate
_OURS = ("ACCELERATE_", "ACCEL_", "FSDP_")
"""Prefixes of this library's variables. ``ACCEL_TEST…`` are for tests of programs that use it."""


def unknown_variables(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables with a prefix of ours that nothing reads, and the nearest ones that exist.

    What follows the prefix is compared, because the prefix is alike in all.
    """
    suspects = [
        name for name in sorted(environ) if name.startswith(_OURS) and not name.startswith("ACCEL_TEST")
    ]
    if not suspects:
        return {}
    if _known(LaunchConfig).issuperset(suspects):
        return {}
    known = _known(complete_root())  # looking for installed strategies takes ten milliseconds
    return {name: _nearest(name, known) for name in suspects if name not in known}


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence about each variable that looks like a misspelt one of this library."""
    return [
        f"environment variable {name} is not read{did_you_mean(name, near)}"
        for name, near in unknown_variables(environ).items()
        if near
    ]


def _known(root: type[LaunchConfig]) -> set[str]:
    own = {DEVICE_COUNT, NAMES_TOLD, RANK_PREFIXED, RUN_FOLDER, STORE_SECRET, _PYTHON}
    return own.union(*map(variables_of, schema_of(root).options))


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    prefix = next(prefix for prefix in _OURS if name.startswith(prefix))
    bare = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
    asked = name.removeprefix(prefix)
    found = nearest(asked, bare, cutoff=0.75)
    return [prefix + other for other in found if _means_the_same(asked, other)]


def _means_the_same(asked: str, other: str) -> bool:
    """Whether names differ by letters only: USE_FP8 is no misspelt USE_FSDP, and DISABLE_… is not ENABLE_…."""
    import difflib

    pairs = [*zip(asked.split("_"), other.split("_"), strict=False)]
    if asked.count("_") != other.count("_"):
        return True
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.7 for pair in pairs)
