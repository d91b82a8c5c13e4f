"""The choice of the source of each batch: at random by a hash of the step, or as evenly as the weights allow.

Neither touches a random generator. All ranks choose alike, and any number of ranks chooses what one does.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, TypeAlias

from accel_train.data.mixing.weights import Shares, WeightsAt
from accel_train.errors import OptionError

__all__ = ["BalancedChoice", "Choice", "ChoiceName", "RandomChoice", "choice_called", "uniform", "until_end"]

ChoiceName: TypeAlias = Literal["random", "balanced"]

_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    number &= _BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _BITS
    return number ^ (number >> 31)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on the seed and the step alone: output `step` of a SplitMix64 generator."""
    return (_mixed(_mixed(seed) + (step + 1) * _STEP) >> 11) * 2.0**-53


class Choice(ABC):
    """Chooses the place of a source, given the shares of all."""

    name: ClassVar[ChoiceName]

    @abstractmethod
    def choose(self, step: int, shares: Shares) -> int:
        """The place of the source of batch number `step`; changes nothing."""

    @abstractmethod
    def take(self, place: int, shares: Shares) -> None:
        """A batch came from the source that was chosen with these shares."""

    @abstractmethod
    def copy(self) -> Choice:
        """One that goes on by itself."""

    @abstractmethod
    def dump(self) -> list[float]:
        """What it remembers, a number for each source or nothing."""

    @abstractmethod
    def load(self, state: Sequence[float]) -> None:
        """Take over what `dump` returned."""


class RandomChoice(Choice):
    """Draws independently for each step; remembers nothing.

    Args:
        seed: any whole number.
    """

    name = "random"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: Shares | None = None
        self._bounds: list[float] = []
        self._last = 0

    def choose(self, step: int, shares: Shares) -> int:
        """The place whose part of [0, 1) the hash of the step falls into."""
        if shares is not self._of:
            self._of, self._bounds = shares, list(itertools.accumulate(shares))
            self._last = max(place for place, share in enumerate(shares) if share)
        bounds = self._bounds
        return min(bisect_right(bounds, uniform(self._seed, step) * bounds[-1]), self._last)

    def take(self, place: int, shares: Shares) -> None:
        """Nothing to remember."""

    def copy(self) -> RandomChoice:
        """Another one."""
        return RandomChoice(self._seed)

    def dump(self) -> list[float]:
        """Nothing."""
        return []

    def load(self, state: Sequence[float]) -> None:
        """Nothing to load."""


class BalancedChoice(Choice):
    """Keeps the number of batches of each source within 1 of the sum of its shares, if the weights do not change.

    The rule is Tijdeman's (The chairman assignment problem, Discrete Mathematics 32, 1980): of the sources that are
    behind far enough, the one comes next that would first be behind too far. The largest deficit alone does not keep
    within 1 if there are many sources.

    Args:
        sources: their number.
    """

    name = "balanced"

    def __init__(self, sources: int) -> None:
        self._behind = [0.0] * sources
        self._slack = 1 / (2 * sources - 2) if sources > 1 else 0.0

    def choose(self, step: int, shares: Shares) -> int:
        """The source with the earliest deadline; the first one of equals."""
        slack, best, chosen = self._slack, 0.0, -1
        for place, share in enumerate(shares):
            behind = self._behind[place] + share
            if share and behind >= slack - 1e-9:
                deadline = (1 - slack - behind) / share
                if chosen < 0 or deadline < best:
                    best, chosen = deadline, place
        if chosen < 0:  # a source that is behind has no weight any more
            places = [place for place, share in enumerate(shares) if share]
            chosen = max(places, key=lambda place: self._behind[place] + shares[place])
        return chosen

    def take(self, place: int, shares: Shares) -> None:
        """Every source gets its share, and the chosen one pays a batch."""
        behind = self._behind = [before + share for before, share in zip(self._behind, shares, strict=True)]
        behind[place] -= 1.0

    def copy(self) -> BalancedChoice:
        """One that goes on by itself."""
        copied = BalancedChoice(len(self._behind))
        copied._behind = self._behind  # replaced, never changed
        return copied

    def dump(self) -> list[float]:
        """How many batches each source is behind its shares."""
        return list(self._behind)

    def load(self, state: Sequence[float]) -> None:
        """Take these over."""
        self._behind = [float(behind) for behind in state]


def choice_called(name: str, seed: int, sources: int) -> Choice:
    """The choice of a name.

    Raises:
        OptionError: there is none.
    """
    if name == "random":
        return RandomChoice(seed)
    if name == "balanced":
        return BalancedChoice(sources)
    raise OptionError(
        f"choice must be 'random' (independent draws) or 'balanced' (counts within 1 of the weights), got {name!r}."
    )


def until_end(
    choice: Choice,
    weights: WeightsAt,
    step: int,
    left: Iterable[int | None],
    *,
    all_must_end: bool,
    limit: int,
) -> int | None:
    """How many batches lead to the end of one source, or of all, by choosing ahead.

    Args:
        choice: the choice as it is at `step`; it stays so.
        weights: the weights at each step.
        step: the number of the next batch.
        left: by source, how many batches it has; None: not known; 0: it has ended.
        all_must_end: the end of all, the sources beginning again, and not the end of the first.
        limit: how many batches are looked ahead at most.

    Returns:
        The number; None where it is not known, is above `limit`, or there is no end.
    """
    rest = list(left)
    fixed = weights.fixed_from
    if any(count is None for count in rest) or (all_must_end and fixed is None):
        return None  # a function may leave out a source for ever
    counts = [count for count in rest if count]
    if not counts:
        return 0
    if (max(counts) if all_must_end else min(counts)) > limit:
        return None
    choice = choice.copy()
    waiting = len(counts) if all_must_end else 1
    for number in range(step, step + limit):
        shares = weights.at(number)
        if all_must_end and fixed is not None and number >= fixed:
            if any(count and not share for count, share in zip(rest, shares, strict=True)):
                return None
            fixed = None
        place = choice.choose(number, shares)
        choice.take(place, shares)
        count = rest[place]
        if count:
            rest[place] = count - 1
            waiting -= count == 1
            if not waiting:
                return number + 1 - step
    return None
