"""Weights of sources: fixed, listed by step, or computed for each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from operator import itemgetter
from typing import Any, TypeAlias

from accel_train.errors import ArgumentTypeError, DataError

__all__ = ["Shares", "Weights", "WeightsAt", "quoted", "shares_of"]

Weights: TypeAlias = (
    Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]] | Callable[[int], Mapping[str, float]]
)
"""Weights by name of the source; or pairs of a step and the weights from there on; or a function of the step."""
Shares: TypeAlias = tuple[float, ...]
"""Weights with the sum 1, in the order of the names of the sources."""


class WeightsAt:
    """The weights at each step.

    Args:
        weights: as the script gives them. The first of a list also hold before their step.
        names: of the sources.

    Raises:
        ArgumentTypeError: the weights are none of the three kinds, or a weight is no number.
        DataError: a name is missing or unknown, a weight is negative or not finite, or all are zero; or the steps of a
            list do not increase.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self._names = names
        self._function = weights if callable(weights) and not isinstance(weights, Mapping) else None
        self._listed = _listed(weights, names) if self._function is None else []

    def at(self, step: int) -> Shares:
        """The shares for the batch number `step`, counted from 0."""
        if self._function is not None:
            name = getattr(self._function, "__name__", type(self._function).__name__)
            return shares_of(self._function(step), self._names, f"the weights at step {step} (of {name})")
        place = bisect_right(self._listed, step, key=itemgetter(0))
        return self._listed[max(place - 1, 0)][1]


def _listed(weights: Any, names: Sequence[str]) -> list[tuple[int, Shares]]:
    """Steps, and the shares from there on."""
    if isinstance(weights, Mapping):
        return [(0, shares_of(weights, names, "weights"))]
    if not _is_sequence(weights) or not weights:
        raise ArgumentTypeError(
            "weights must be a mapping from the name of each source to a number, a list of pairs (step, mapping), or "
            f"a function from a step to a mapping, got {weights!r}."
        )
    pairs = [_pair(item) for item in weights]
    steps = [step for step, _ in pairs]
    if any(after <= before for before, after in pairwise(steps)):
        raise DataError(f"The steps of the weights must increase, got {steps}. Sort them, each step once.")
    return [(step, shares_of(given, names, f"the weights from step {step} on")) for step, given in pairs]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _pair(item: Any) -> tuple[int, Any]:
    if _is_sequence(item) and len(item) == 2:
        step = item[0]
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            return step, item[1]
    raise ArgumentTypeError(
        "A list of weights has pairs (step, weights by source) with a whole number of batches from 0, as "
        f"(1000, {{'web': 0.7, 'code': 0.3}}), got {item!r}."
    )


def shares_of(weights: Any, names: Sequence[str], what: str) -> Shares:
    """The shares of weights by name.

    Args:
        weights: a mapping.
        names: of the sources.
        what: describes the weights in messages.

    Raises:
        ArgumentTypeError: `weights` is no mapping, or a weight is no number.
        DataError: a name is missing or unknown, a weight is negative or not finite, or all are zero.
    """
    if not isinstance(weights, Mapping):
        raise ArgumentTypeError(
            f"{what} must be a mapping from the name of each source to a number, got {type(weights).__name__}."
        )
    unknown = [name for name in weights if name not in names]
    missing = [name for name in names if name not in weights]
    if unknown or missing:
        parts = [f"name {quoted(unknown)}, which is no source"] if unknown else []
        parts += [f"lack {quoted(missing)}"] if missing else []
        raise DataError(
            f"{what} {' and '.join(parts)}. The sources are {quoted(names)}; give each of them a weight, 0 to leave "
            "it out."
        )
    values = [_checked(weights[name], name, what) for name in names]
    most = max(values)
    if not most:
        raise DataError(f"{what} are 0 for all of {quoted(names)}. Give at least one a positive weight.")
    total = sum(values)
    if not math.isfinite(total):
        values = [value / most for value in values]
        total = sum(values)
    return tuple(value / total for value in values)


def _checked(value: Any, name: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{what}: the weight of {name!r} must be a number, got {value!r} ({type(value).__name__})."
        )
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise DataError(f"{what}: the weight of {name!r} must be finite and not negative, got {value!r}.")
    return number


def quoted(names: Iterable[Any]) -> str:
    """Names for a message, as Python writes them."""
    return ", ".join(repr(name) for name in names)
