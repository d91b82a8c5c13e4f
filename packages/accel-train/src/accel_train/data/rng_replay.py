"""Reads with the random states of an interrupted run, and restores the current states afterwards."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from accel_state.errors import AccelError
from accel_state.messages import first_line
from accel_state.seeding import (
    check_generator_states,
    numpy_state,
    numpy_state_tree,
    python_state,
    python_state_tree,
)
from accel_train.errors import DataError

__all__ = ["Randomness", "SharedDraws", "generators_of"]

_Raw = tuple[Any, ...]


class Randomness:
    """The generators that reading a loader in this process can draw from.

    Args:
        own: generators that belong to the loader, its samplers or its stream.
        everything: reading runs other people's code here (a user's sampler, a stream), which may draw from
            Python's and NumPy's global generators, too. Torch's own code draws from torch's alone.
    """

    def __init__(self, own: list[Any], everything: bool) -> None:
        self.own = own
        self.everything = everything
        self._afterwards: _Raw | None = None  # inside `as_of`

    def now(self) -> _Raw:
        """The present states, cheaply; `tree` makes them fit for a checkpoint."""
        own = [_get(generator) for generator in self.own]
        if not self.everything:
            return torch.get_rng_state(), own
        return torch.get_rng_state(), own, random.getstate(), np.random.get_state(legacy=False)

    def put_back(self, raw: _Raw) -> None:
        """Set what `now` returned."""
        torch.set_rng_state(raw[0])
        for generator, state in zip(self.own, raw[1], strict=True):
            _set(generator, state)
        if self.everything:
            random.setstate(raw[2])
            np.random.set_state(raw[3])

    def tree(self, raw: _Raw) -> dict[str, Any]:
        """The states that `now` returned, as a tree of tensors and plain data."""
        state: dict[str, Any] = {
            "torch": raw[0],
            "own": [_tree(generator, part) for generator, part in zip(self.own, raw[1], strict=True)],
        }
        if self.everything:
            state |= {"python": python_state_tree(raw[2]), "numpy": numpy_state_tree(raw[3])}
        return state

    def own_trees(self) -> list[Any]:
        """The present states of the loader's own generators, as trees."""
        return [_tree(generator, _get(generator)) for generator in self.own]

    def check_own(self, trees: list[Any]) -> None:
        """Check that `set_own` can set these states; changes nothing.

        Raises:
            DataError: the loader has another number of generators.
        """
        if len(trees) != len(self.own):
            raise DataError(
                f"The saved loader had {len(trees)} own random generators (torch.Generator, random.Random or "
                f"NumPy generators in the loader, its samplers or its stream), this one has {len(self.own)}. Build "
                "the loader as it was built when its state was saved."
            )

    def check(self, state: Mapping[str, Any], trees: Iterable[Any]) -> None:
        """Check that the generators can take all states in the state of a loader: they take them, and are put back.

        Args:
            state: the state of the loader.
            trees: what is in it for `as_of`.

        Raises:
            DataError: a state is not one of such a generator.
        """
        now = self.now()
        try:
            check_generator_states(state)
            self.set_own(state.get("generators", []))
            if "generator" in state["draw"]:
                torch.Generator().set_state(state["draw"]["generator"])
            for tree in trees:
                with self.as_of(tree):
                    pass
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, AccelError):
                raise
            raise DataError(
                f"The state of a data loader has random states that cannot be restored: {first_line(error)}. It is "
                "damaged, or of another loader."
            ) from error
        finally:
            self.put_back(now)

    def set_own(self, trees: list[Any]) -> None:
        """Set the loader's own generators to what `own_trees` returned.

        Raises:
            DataError: see `check_own`.
        """
        self.check_own(trees)
        for generator, tree in zip(self.own, trees, strict=True):
            _set(generator, _untree(generator, tree))

    @contextlib.contextmanager
    def as_of(self, tree: dict[str, Any] | None) -> Iterator[None]:
        """Inside, all generators are as they were saved; afterwards, as they were before."""
        if tree is None:
            yield
            return
        now, outer = self.now(), self._afterwards
        self._afterwards = now
        torch.set_rng_state(tree["torch"])
        self.set_own(tree["own"])
        if self.everything and "python" in tree:
            random.setstate(python_state(tree["python"]))
            np.random.set_state(numpy_state(tree["numpy"], now[3]))
        try:
            yield
        finally:
            self.put_back(self._afterwards)
            self._afterwards = outer

    @contextlib.contextmanager
    def as_afterwards(self) -> Iterator[None]:
        """Inside of `as_of`, draw what was not drawn at that time: from the states that it puts back, and moves on."""
        if self._afterwards is None:
            yield
            return
        inside = self.now()
        self.put_back(self._afterwards)
        try:
            yield
        finally:
            self._afterwards = self.now()
            self.put_back(inside)


_WATCHED = 64  # items; what other code draws in one step, it draws in most


class SharedDraws:
    """Items that are read with the global generators; notes whether other code draws from the same ones in between.

    Reading them again, without that code, draws other numbers.

    Args:
        items: their iterator.

    Attributes:
        found: whether one of the generators was drawn from by both, alternately.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self.found = False
        self._items = items
        self._left = _WATCHED
        self._after: tuple[Any, ...] | None = None
        self._others: set[int] = set()

    def __iter__(self) -> SharedDraws:
        return self

    def __next__(self) -> Any:
        if not self._left or self.found:
            return next(self._items)
        self._left -= 1
        before = _global_states()
        self._others |= _differing(before, self._after or before)
        item = next(self._items)
        self._after = _global_states()
        self.found = not self._others.isdisjoint(_differing(before, self._after))
        return item


def _global_states() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        pickle.dumps(np.random.get_state(legacy=False)),
    )


def _differing(one: tuple[Any, ...], other: tuple[Any, ...]) -> set[int]:
    return {place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}


def generators_of(first: Iterable[Any], holders: Iterable[Any]) -> list[Any]:
    """Random generators, each once: those in `first`, and the attributes of `holders` that are one."""
    found: list[Any] = []
    candidates = [*first]
    for holder in holders:
        candidates += getattr(holder, "__dict__", {}).values()
    for candidate in candidates:
        if isinstance(candidate, random.SystemRandom) or not isinstance(candidate, _KINDS):
            continue
        if all(candidate is not known for known in found):
            found.append(candidate)
    return found


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _tree(generator: Any, state: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return state
    return python_state_tree(state) if isinstance(generator, random.Random) else numpy_state_tree(state)


def _untree(generator: Any, tree: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return tree
    return python_state(tree) if isinstance(generator, random.Random) else numpy_state(tree, _get(generator))
