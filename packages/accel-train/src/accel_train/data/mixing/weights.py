"""Weights of sources: fixed, interpolated between steps, or computed for each step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias

from accel_train.errors import ArgumentTypeError, DataError, OptionError

__all__ = ["Interpolation", "Shares", "Weights", "WeightsAt", "quoted", "shares_of", "weights_of"]

Interpolation: TypeAlias = Literal["linear", "constant"]
Weights: TypeAlias = (
    Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]] | Callable[[int], Mapping[str, float]]
)
"""Weights by name of the source; or knots, pairs of a step and weights; or a function from a step to weights."""
Shares: TypeAlias = tuple[float, ...]
"""Weights with the sum 1, in the order of the names of the sources."""


class WeightsAt(Protocol):
    """The weights at each step."""

    @property
    def fixed_from(self) -> int | None:
        """The step from which they no longer change; None: nobody knows."""

    def at(self, step: int) -> Shares:
        """The shares for the batch number `step`, counted from 0."""


class FixedWeights:
    """The same weights at each step."""

    fixed_from = 0

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def at(self, step: int) -> Shares:
        """The shares; the same tuple each time."""
        return self._shares


class KnotWeights:
    """Weights given for some steps; the first hold before the first of these, the last after the last.

    Args:
        steps: increasing.
        shares: for each.
        linear: interpolate between two knots; else those of the earlier one hold.
    """

    def __init__(self, steps: list[int], shares: list[Shares], linear: bool) -> None:
        self._steps, self._shares, self._linear = steps, shares, linear

    @property
    def fixed_from(self) -> int:
        """The step of the last knot."""
        return self._steps[-1]

    def at(self, step: int) -> Shares:
        """The shares at a step."""
        place = bisect.bisect_right(self._steps, step)
        before = self._shares[max(place - 1, 0)]
        if place in (0, len(self._steps)) or not self._linear:
            return before
        start, end = self._steps[place - 1 : place + 1]
        part = (step - start) / (end - start)
        after = self._shares[place]
        return tuple(low + (high - low) * part for low, high in zip(before, after, strict=True))


class CalledWeights:
    """Weights that a function computes.

    Args:
        schedule: the function; it must return the same for the same step.
        names: of the sources.
    """

    fixed_from = None

    def __init__(self, schedule: Callable[[int], Mapping[str, float]], names: Sequence[str]) -> None:
        self._schedule, self._names = schedule, names
        self._called = getattr(schedule, "__name__", type(schedule).__name__)

    def at(self, step: int) -> Shares:
        """The shares that the function returns for a step."""
        return shares_of(self._schedule(step), self._names, f"the weights at step {step} (of {self._called})")


def weights_of(weights: Weights, names: Sequence[str], interpolation: Interpolation = "linear") -> WeightsAt:
    """Check weights, and make them shares.

    Args:
        weights: as the script gives them.
        names: of the sources.
        interpolation: between knots.

    Raises:
        ArgumentTypeError: they are none of the three kinds, or a weight is no number.
        DataError: a name is missing or unknown, a weight is negative or not finite, or all are zero.
        OptionError: `interpolation` is unknown.
    """
    if interpolation not in ("linear", "constant"):
        raise OptionError(
            f"interpolation must be 'linear' or 'constant' (weights stay until the next knot), got {interpolation!r}."
        )
    if isinstance(weights, Mapping):
        return FixedWeights(shares_of(weights, names, "weights"))
    if callable(weights):
        return CalledWeights(weights, names)
    if not _is_sequence(weights) or not weights:
        raise ArgumentTypeError(
            "weights must be a mapping from the name of each source to a number, a list of pairs (step, mapping), or "
            f"a function from a step to a mapping, got {weights!r}."
        )
    steps: list[int] = []
    shares: list[Shares] = []
    for knot in weights:
        step, mapping = _knot(knot)
        steps.append(step)
        shares.append(shares_of(mapping, names, f"the weights of the knot at step {step}"))
    if any(after <= before for before, after in pairwise(steps)):
        raise DataError(f"The steps of the knots must increase, got {steps}. Sort them, each step once.")
    return KnotWeights(steps, shares, interpolation == "linear")


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _knot(knot: Any) -> tuple[int, Any]:
    if _is_sequence(knot) and len(knot) == 2:
        step = knot[0]
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            return step, knot[1]
    raise ArgumentTypeError(
        "A knot of the weights is a pair (step, weights by source) with a whole number of batches from 0, as "
        f"(1000, {{'web': 0.7, 'code': 0.3}}), got {knot!r}."
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
