"""Which parts of a training state `load_state` restores: all, or those that the script names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from accel_train.errors import OptionError
from accel_train.setup.prepared import Prepared

__all__ = ["ALL", "MODELS", "Parts", "choose", "left_out", "part_of", "trains"]

Parts: TypeAlias = frozenset[str]

_TREES = {
    "optimizer": "optimizers",
    "scaler": "optimizers",
    "scheduler": "schedulers",
    "custom": "registered",
    "pickled": "registered",
    "loader": "loaders",
}

MODELS: Parts = frozenset({"models"})
ALL: Parts = MODELS | {*_TREES.values()} | {"random"}


def choose(only: Collection[str] | str | None) -> Parts:
    """The parts that a script names.

    Raises:
        OptionError: there is no part of that name, or none is named.
    """
    if only is None:
        return ALL
    named = frozenset([only] if isinstance(only, str) else only)
    unknown = sorted(map(repr, named - ALL))
    if unknown or not named:
        raise OptionError(
            f"load_state(only=…) got {', '.join(unknown) or 'nothing'}; the parts of a training state are "
            f"{', '.join(sorted(ALL))}."
        )
    return named


def part_of(tree: str) -> str | None:
    """The part that a saved tree belongs to; None for what only a whole state restores."""
    return _TREES.get(tree.partition("_")[0])


def trains(prepared: Prepared) -> bool:
    """Whether more is prepared than an evaluation needs: something that only training has."""
    return bool(prepared.optimizers or prepared.schedulers or prepared.registered)


def left_out(parts: Parts, saved: Iterable[str]) -> list[str]:
    """Describe the parts of a checkpoint that are not restored.

    Args:
        parts: those that are restored.
        saved: the names of its shared trees.
    """
    if parts == ALL:
        return []
    others = [] if "models" in parts else ["weights"]
    others += sorted(tree for tree in saved if part_of(tree) not in {*parts, None})
    others += [] if "loaders" in parts else ["places of loaders"]
    others += [] if "random" in parts else ["random states"]
    return [*others, "unfinished accumulation windows", "accelerator.step"]
