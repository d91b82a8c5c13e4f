"""Progress and time per phase of a step, which ranks write to memory that they share with their launcher.

A file holds one record of integers per rank. A rank writes its own record and nothing else, so that no lock is needed;
the launcher reads all of them. One change of phase takes about half a microsecond, and no system call.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "BACKWARD",
    "DATA",
    "FORWARD",
    "OTHER",
    "PHASES",
    "SAVE",
    "START",
    "STEP",
    "Heartbeat",
    "HeartbeatFile",
    "Pulse",
]

_SLOTS: Final = 32
"""Integers of one record; records of different ranks share no cache line."""
_BYTES: Final = 8 * _SLOTS
_TIMED: Final = 1
"""Slot of the first record, which is the file's own: whether ranks report their progress."""

_PID, _JOINED, _SINCE, _PHASE, _SAVING, _STEPS = range(6)
START: Final = 15
"""Before the first batch or backward; no part of a step."""
OTHER: Final = 16
"""None of the phases below: between backward and step, and after the step."""
DATA: Final = 17
"""Waiting for the loader's next batch."""
FORWARD: Final = 18
"""From a batch to ``backward``."""
BACKWARD: Final = 19
"""In ``backward``, which with several ranks includes waiting for the others' gradients."""
STEP: Final = 20
"""In the optimizer's step."""
SAVE: Final = 21
"""In a save; the part of an asynchronous one that training waits for."""
PHASES: Final = {
    DATA: "data",
    FORWARD: "forward",
    BACKWARD: "backward",
    STEP: "step",
    SAVE: "save",
    OTHER: "other",
}


class Heartbeat:
    """The record of this rank, for writing. Times are those of ``time.monotonic_ns``.

    Args:
        view: the record's integers.
    """

    __slots__ = ("_phase", "_since", "_view")

    def __init__(self, view: memoryview[int]) -> None:
        self._view = view
        self._phase = view[_PHASE] or START
        self._since = view[_SINCE] or time.monotonic_ns()

    def joined(self) -> None:
        """Record that this rank has joined its world."""
        now = time.monotonic_ns()
        self._view[_JOINED] = now
        self._view[_SINCE] = self._since = now
        self._view[_PHASE] = self._phase = START

    def enter(self, phase: int) -> int:
        """Begin a phase and end the one before it; any change of phase is progress.

        Returns:
            the phase that ended.
        """
        view, before = self._view, self._phase
        now = time.monotonic_ns()
        view[before] += now - self._since
        view[_SINCE] = self._since = now
        view[_PHASE] = self._phase = phase
        return before

    def stepped(self, before: int) -> None:
        """Record the end of an optimizer step; the phase ``before`` continues."""
        self._view[_STEPS] += 1
        self.enter(before)

    def beat(self) -> None:
        """Report progress, in loops without ``Accelerator``."""
        self.enter(self._phase)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a save, during which the launcher's time-out for saves counts."""
        before = self.enter(SAVE)
        self._view[_SAVING] = self._since
        try:
            yield
        finally:
            self.enter(before)
            self._view[_SAVING] = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Heartbeat:
        return self  # copies of training objects report for the same rank

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # another process has a record of its own, or none


@dataclass(frozen=True, slots=True)
class Pulse:
    """Progress that one rank has reported. Times are in nanoseconds of ``time.monotonic_ns``; 0: not yet, or not now.

    Attributes:
        pid: its process.
        joined: when it joined its world.
        since: when its current phase began: its latest progress.
        phase: its current phase.
        saving: when the save in progress began.
        steps: optimizer steps so far.
        spent: nanoseconds in each phase that has ended, and in the current one so far, unless it is ``OTHER``: a
            program stays in that after its last step.
    """

    pid: int
    joined: int
    since: int
    phase: int
    saving: int
    steps: int
    spent: dict[int, int]


class HeartbeatFile:
    """The file with the records of all ranks of a machine.

    Args:
        path: an existing file, made by ``create``.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._view = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, ranks: int, *, timed: bool) -> HeartbeatFile:
        """Create the file, without records.

        Args:
            path: where; an earlier file is replaced, and ranks that map it keep it.
            ranks: number of records.
            timed: whether ranks report their progress.
        """
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(_BYTES * (ranks + 1)))
        made = cls(path)
        made._view[_TIMED] = timed
        return made

    @property
    def timed(self) -> bool:
        """Whether ranks report their progress."""
        return bool(self._view[_TIMED])

    def claim(self, rank: int) -> Heartbeat | None:
        """The record of this process as rank ``rank``; None if it belongs to another process, such as its parent.

        Args:
            rank: index of the rank on this machine.
        """
        view = self._record(rank)
        if view is None or view[_PID] not in (0, os.getpid()):
            return None
        view[_PID] = os.getpid()  # from now on the launcher sends signals
        return Heartbeat(view)

    def read(self, rank: int) -> Pulse:
        """The progress that rank ``rank`` has reported so far."""
        view = self._record(rank)
        assert view is not None, "the launcher knows how many ranks there are"
        pulse = Pulse(
            view[_PID],
            view[_JOINED],
            view[_SINCE],
            view[_PHASE],
            view[_SAVING],
            view[_STEPS],
            {phase: view[phase] for phase in PHASES},
        )
        if pulse.phase in pulse.spent and pulse.phase != OTHER:
            pulse.spent[pulse.phase] += max(0, time.monotonic_ns() - pulse.since)
        return pulse

    def _record(self, rank: int) -> memoryview[int] | None:
        start = _SLOTS * (rank + 1)
        return self._view[start : start + _SLOTS] if start + _SLOTS <= len(self._view) else None
