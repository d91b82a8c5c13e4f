"""Which data loaders are being iterated, and which of them yielded last.

One record belongs to one `Accelerator`. Loaders report to it; gradient accumulation and metrics read it.
It holds weak references only, so a loader that its owner forgets is collected, live or not.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from accel_state.errors import StateError

if TYPE_CHECKING:
    from accel_state.monitoring.heartbeat import Heartbeat

__all__ = ["ActiveLoaders"]


class _Entry:
    __slots__ = ("began", "iterators", "last_yield", "loader")

    def __init__(self, loader: object, clock: int) -> None:
        self.loader: weakref.ref[Any] = weakref.ref(loader)
        self.began = clock
        self.last_yield = 0
        self.iterators = 1


class ActiveLoaders:
    """The live loaders of one `Accelerator`, in the order of their yields.

    A loader is *live* from the call of ``iter()`` until its iterator is exhausted, dropped (``break``), or
    raises.

    Attributes:
        pulse: tells the launcher when a rank waits for a loader; None: the launcher does not ask.
        epochs: the epoch that samplers and datasets were given last, by their `id`; loaders may share a dataset.
    """

    pulse: Heartbeat | None = None
    _gradient_state: weakref.ref[Any] | None = None

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._clock = 0

    @property
    def gradient_state(self) -> Any:
        """The `GradientState` of the `Accelerator` that the record belongs to.

        Raises:
            StateError: the record belongs to no `Accelerator`, or that one no longer exists.
        """
        state = None if self._gradient_state is None else self._gradient_state()
        if state is None:
            raise StateError(
                "This loader belongs to no Accelerator, so it has no gradient_state. Prepare it with "
                "accelerator.prepare(loader)."
            )
        return state

    @gradient_state.setter
    def gradient_state(self, state: Any) -> None:
        self._gradient_state = weakref.ref(state)

    def begin(self, loader: object) -> None:
        """Record that an iteration of `loader` begins; a loader may have several iterators at a time."""
        self._clock += 1
        known = self._entries.pop(id(loader), None)
        entry = self._entries[id(loader)] = _Entry(loader, self._clock)
        if known is not None and known.loader() is loader:
            entry.iterators += known.iterators
            entry.last_yield = known.last_yield

    def yielded(self, loader: object, batch: Any = None) -> None:
        """Record that `loader` returns a batch now, which those that observe a training look at."""
        self._clock = clock = self._clock + 1
        entry = self._entries.get(id(loader))
        if entry is not None:
            entry.last_yield = clock

    def end(self, loader: object) -> None:
        """Record that an iteration of `loader` is over, for whatever reason."""
        entry = self._entries.get(id(loader))
        if entry is None:
            return
        entry.iterators -= 1
        if entry.iterators <= 0:
            del self._entries[id(loader)]

    @property
    def live(self) -> list[Any]:
        """Live loaders, oldest first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.began)
        return [loader for entry in entries if (loader := entry.loader()) is not None]

    @property
    def active(self) -> Any | None:
        """The live loader that yielded last; None when no live loader has yielded."""
        newest = self._newest()
        return None if newest is None else newest.loader()

    def is_live(self, loader: object) -> bool:
        """Whether `loader` is being iterated."""
        entry = self._entries.get(id(loader))
        return entry is not None and entry.loader() is loader

    def last_yield(self, loader: object) -> int:
        """The moment at which the live `loader` yielded last (a former value of `clock`); 0 if it has not."""
        entry = self._entries.get(id(loader))
        return entry.last_yield if entry is not None and entry.loader() is loader else 0

    @property
    def clock(self) -> int:
        """A number that grows with every beginning and every yield."""
        return self._clock

    def interleaved(self) -> list[Any]:
        """Live loaders that yield in turn with the active one.

        Two live loaders are interleaved when each has yielded since the other began, as under ``zip(a,
        b)``. The result is empty for an evaluation loop inside a training loop, and when nothing is live.
        """
        newest = self._newest()
        if newest is None:
            return []
        rivals = (
            entry.loader()
            for entry in self._entries.values()
            if entry is not newest and entry.last_yield > newest.began and newest.last_yield > entry.began
        )
        return [loader for loader in rivals if loader is not None]

    def _newest(self) -> _Entry | None:
        best: _Entry | None = None
        for entry in self._entries.values():
            if entry.last_yield > (best.last_yield if best is not None else 0) and entry.loader() is not None:
                best = entry
        return best

    def __deepcopy__(self, memo: dict[int, Any]) -> ActiveLoaders:
        return self  # a copied loader still reports to its accelerator

    def __getstate__(self) -> dict[str, Any]:
        # Iterations do not travel to another process.
        return {"epochs": {}, "_entries": {}, "_clock": 0}
