"""The order in which groups are used, learnt from one forward for the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["Schedule"]


class Schedule:
    """Predicts which groups come next, from what came in the last forward that began at the same module.

    A prediction that fails costs time, never results: after a group that was not expected, what came after it the last
    time is expected, and the new order replaces the old one. An order that is only assumed is worth less: after a group
    that it did not expect, nothing is expected until it was right twice in a row, and then one group more each time.

    Args:
        assumed: what is expected until a forward was seen.
    """

    def __init__(self, assumed: Sequence[int] = ()) -> None:
        self._assumed = list(assumed)
        self._known: dict[Hashable, list[int]] = {}
        self._key: Hashable = None
        self._expected = self._assumed
        self._seen: list[int] = []
        self._next = 0
        self._doubted: set[Hashable] = set()
        self._run = 0  # how many uses in a row were as expected

    def assume(self, key: Hashable, order: Sequence[int]) -> None:
        """Expect an order of forwards that begin at ``key``, if none was seen."""
        if key not in self._known:
            self._known[key] = list(order)
            self._doubted.add(key)

    def begin(self, key: Hashable) -> None:
        """A forward begins at the module that ``key`` stands for."""
        self._key = key
        self._expected = self._known.get(key, self._assumed)
        self._seen = []
        self._next = 0
        self._run = len(self._expected)

    def saw(self, group: int) -> None:
        """A group is used."""
        self._seen.append(group)
        expected = self._expected
        if self._next < len(expected) and expected[self._next] == group:
            self._next += 1
            self._run += 1
            return
        self._run = 0
        if group in expected:
            ahead = group in expected[self._next :]
            self._next = expected.index(group, self._next if ahead else 0) + 1

    def upcoming(self, count: int, *, again: bool = False) -> list[int]:
        """The groups expected next, the first first; each place of the order counts, also of the same group.

        Args:
            count: at most so many.
            again: expect the same forward once more after this one.
        """
        if self._key in self._doubted:
            count = min(count, max(0, self._run - 1))
        following = self._expected[self._next : self._next + count]
        return following + self._expected[: min(self._next, count - len(following))] if again else following

    def end(self, complete: bool) -> None:
        """The forward is over; an order that an error cut short is not learnt."""
        if complete:
            self._known[self._key] = self._seen
            self._doubted.discard(self._key)
