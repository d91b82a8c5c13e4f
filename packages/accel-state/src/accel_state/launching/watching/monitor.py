"""The view of a machine into its ranks: their progress, their stacks, and the folder in which they report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_state.launching.watching.hang_report import (
    LastCollective,
    RankStack,
    is_whole,
    parse_stack,
    render_hang,
)
from accel_state.launching.watching.straggler_report import render_phases
from accel_state.launching.watching.tracebacks import listed
from accel_state.monitoring.answers import STACK_SIGNAL
from accel_state.monitoring.heartbeat import PHASES, HeartbeatFile, Pulse

__all__ = ["CAN_WATCH", "Activity", "Limits", "Monitor"]

CAN_WATCH = STACK_SIGNAL is not None and hasattr(os, "mkfifo") and sys.platform == "linux"
_SHARED = Path("/dev/shm")
_PATIENCE = 2.0
"""Seconds that ranks have to answer; a process that does not run (stopped, or in the kernel) never does."""
_LOOK = 0.05
"""Seconds between two looks at what ranks have answered."""
_GAP = 2.0
"""Seconds between two looks after which the launcher itself was stopped, and its ranks may have been too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs in seconds; None: none.

    Attributes:
        start: time until all ranks have joined their world.
        step: time without progress of any rank, outside saves.
        checkpoint: time of a save.
    """

    start: float | None = None
    step: float | None = None
    checkpoint: float | None = None

    def __bool__(self) -> bool:
        return not (self.start is None and self.step is None and self.checkpoint is None)


@dataclass(frozen=True, slots=True)
class Activity:
    """The progress of the ranks of a machine.

    Attributes:
        joined: all have joined their world.
        since: the latest progress of any, in nanoseconds of ``time.monotonic_ns``.
        saving: some are in a save.
        late: which ranks have not joined, or have not ended a save, in time, in words; None: all have.
    """

    joined: bool
    since: int
    saving: bool
    late: str | None = None


class Monitor:
    """Watches the ranks of one machine.

    Args:
        ranks: they have these numbers in the world.
        limits: time-outs.
        timed: ranks report every step.
        folded: fold the frames of libraries in stacks.
    """

    def __init__(
        self, ranks: range, limits: Limits | None = None, *, timed: bool = False, folded: bool = True
    ) -> None:
        self._ranks = ranks
        self._limits = limits or Limits()
        self._timed = timed or bool(self._limits)
        self._folded = folded
        shared = str(_SHARED) if os.access(_SHARED, os.W_OK) else None  # writing there never waits for a disk
        self.folder = Path(tempfile.mkdtemp(prefix="accel-run-", dir=shared))
        self._begun = self._looked = self._resumed = 0
        self._file = self._fresh_file()

    def _fresh_file(self) -> HeartbeatFile:
        return HeartbeatFile.create(self.folder / "heart", self._ranks.stop, timed=self._timed)

    def begin(self) -> None:
        """Begin an attempt: reports of earlier processes are discarded."""
        self._file = self._fresh_file()
        for rank in self._ranks:
            for name in (f"stack.{rank}", f"answer.{rank}", f"ask.{rank}"):
                (self.folder / name).unlink(missing_ok=True)
            os.mkfifo(self.folder / f"ask.{rank}", 0o600)
        self._begun = self._looked = self._resumed = time.monotonic_ns()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def stalled(self, ranks: Iterable[int]) -> str | None:
        """Why the run is considered to hang, in words; None if it makes progress.

        Args:
            ranks: those that run.
        """
        if not self._limits:
            return None
        activity = self.activity(ranks)
        return activity.late or self._late_step(activity)

    def activity(self, ranks: Iterable[int]) -> Activity:
        """The progress of ranks.

        Args:
            ranks: those that run.
        """
        now = time.monotonic_ns()
        if now - self._looked > _GAP * 1e9:
            self._resumed = now  # ranks were stopped as well (Ctrl-Z): their time begins again
        self._looked = now
        pulses = {rank: self._file.read(rank) for rank in ranks}
        return Activity(
            all(pulse.joined for pulse in pulses.values()),
            max((pulse.since for pulse in pulses.values()), default=0),
            any(pulse.saving for pulse in pulses.values()),
            self._late_start(pulses, now) or self._late_save(pulses, now),
        )

    def _late_start(self, pulses: Mapping[int, Pulse], now: int) -> str | None:
        late = [rank for rank, pulse in pulses.items() if not pulse.joined]
        limit = self._limits.start
        if limit is None or not late or self._age(self._begun, now) <= limit:
            return None
        verb = "has" if len(late) == 1 else "have"
        return f"{_ranks(late)} {verb} not joined the other ranks within {limit:g} s (--start_timeout)"

    def _late_save(self, pulses: Mapping[int, Pulse], now: int) -> str | None:
        limit = self._limits.checkpoint
        if limit is None:
            return None
        late = [
            rank for rank, pulse in pulses.items() if pulse.saving and self._age(pulse.saving, now) > limit
        ]
        if not late:
            return None
        verb = "has" if len(late) == 1 else "have"
        return f"{_ranks(late)} {verb} been saving for more than {limit:g} s (--checkpoint_timeout)"

    def _late_step(self, activity: Activity) -> str | None:
        limit = self._limits.step
        if limit is None or not (activity.since and activity.joined) or activity.saving:
            return None
        if self._age(activity.since, time.monotonic_ns()) <= limit:
            return None
        return f"no rank has made progress for {limit:g} s (--step_timeout)"

    def _age(self, since: int, now: int) -> float:
        return (now - max(since, self._resumed)) / 1e9

    def hang_report(self, ranks: Iterable[int]) -> str:
        """The stacks of ranks and the collectives that they wait in, in words; takes up to two seconds.

        Args:
            ranks: those that run.
        """
        return render_hang(self.stacks(ranks), folded=self._folded)

    def stacks(self, ranks: Iterable[int]) -> list[RankStack]:
        """The stacks of ranks and the collectives that they wait in; takes up to two seconds.

        Args:
            ranks: those that run.
        """
        assert STACK_SIGNAL is not None, "a monitor is only made where there are such signals"
        pulses = {rank: self._file.read(rank) for rank in ranks}
        present = {rank: pulse for rank, pulse in pulses.items() if pulse.pid}
        before = {rank: self._size(f"stack.{rank}") for rank in present}
        for rank, pulse in present.items():
            (self.folder / f"answer.{rank}").unlink(missing_ok=True)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pulse.pid, STACK_SIGNAL)
        self._wait_for_answers(present, before)
        return [
            self._stack(rank, pulse, before[rank])
            if rank in present
            else RankStack(rank, note="it has not created an Accelerator or PartialState")
            for rank, pulse in pulses.items()
        ]

    def phases(self) -> str:
        """The time per phase of a step by rank; empty if no rank has made a step."""
        return render_phases(self.pulses())

    def pulses(self) -> dict[int, Pulse]:
        """The progress that each rank has reported."""
        return {rank: self._file.read(rank) for rank in self._ranks}

    @property
    def limits(self) -> Limits:
        """The time-outs."""
        return self._limits

    @property
    def timed(self) -> bool:
        """Whether ranks report their steps."""
        return self._timed

    def _ask(self, rank: int) -> bool:
        """Ask for the collectives of a rank; False: its thread has not opened the pipe yet."""
        try:
            question = os.open(self.folder / f"ask.{rank}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            os.write(question, b"?")
        os.close(question)
        return True

    def _wait_for_answers(self, present: Mapping[int, Pulse], before: Mapping[int, int]) -> None:
        until = time.monotonic() + _PATIENCE
        waiting, unasked = set(present), set(present)
        while waiting and time.monotonic() < until:
            unasked = {rank for rank in unasked if not self._ask(rank)}
            time.sleep(_LOOK)
            waiting = {rank for rank in waiting if not self._has_answered(rank, before[rank])}

    def _has_answered(self, rank: int, start: int) -> bool:
        return (self.folder / f"answer.{rank}").exists() and is_whole(self._written(rank, start))

    def _written(self, rank: int, start: int) -> str:
        """The part of a rank's stack that it has written since the file had `start` bytes."""
        path = self.folder / f"stack.{rank}"
        return path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def _stack(self, rank: int, pulse: Pulse, start: int) -> RankStack:
        text = self._written(rank, start)
        answer = self.folder / f"answer.{rank}"
        told = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
        note = "" if pulse.joined else "it has not joined the other ranks"
        if pulse.steps:
            seconds = (time.monotonic_ns() - pulse.since) / 1e9
            note = (
                f"after {pulse.steps} steps, in phase {PHASES.get(pulse.phase, 'start')} for {seconds:.0f} s"
            )
        recorded = tuple(LastCollective(*entry) for entry in told.get("recorded", ()))
        return RankStack(rank, parse_stack(text), tuple(told.get("collectives", ())), note, recorded)


def _ranks(ranks: Sequence[int]) -> str:
    return listed([f"rank {rank}" for rank in ranks])
