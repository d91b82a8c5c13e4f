"""What the machines of a run tell each other through its store: progress, hangs, failures and times of steps.

Each machine has one thread with a connection of its own, so that nothing else waits for the store. Once a second it
sends one or two counters. Hangs and failures are events, numbered by the store in the order in which they come, because
the clocks of machines differ. Values are JSON of bounded size, and are checked.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_state.constants import PEER_FAILED, PREEMPTED, STALLED
from accel_state.errors import UntrustedMessageError
from accel_state.launching.machines.failures import Failure, FailureCause
from accel_state.launching.watching.hang_report import RankStack, as_data, from_data, render_hang, shown_line
from accel_state.launching.watching.straggler_report import render_phases
from accel_state.messages import first_line, say
from accel_state.monitoring.heartbeat import PHASES, Pulse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from accel_state.launching.watching.monitor import Monitor

__all__ = ["End", "MachineWatch"]

_INTERVAL = 1.0
"""Seconds between two looks at the ranks and at the store."""
_ALERT = 0.05
"""The same while something is waited for."""
_GAP = 5.0
"""Seconds between two looks after which this machine itself was stopped, and its ranks may have been too."""
_SILENCE = 20.0
"""Seconds without an answer of the store, which answers in milliseconds, after which it is lost."""
_STACKS = 10.0
"""Seconds that the machines have to send what they know; each needs two for the stacks of its ranks."""
_REPORT = 20.0
"""Seconds that the other machines wait for the report of the first."""
_WORD = 5.0
"""Seconds that a machine whose ranks lost a connection waits for word of the machine that failed first."""
_OWN_WAY = 2.0
"""Seconds that ranks have to fail by themselves after another machine has, so that errors of their own are seen."""
_LONGEST = 4 << 20
"""Bytes of a value that is read; the stack of a rank has some 10 kB."""


@dataclass(frozen=True, slots=True)
class End:
    """How this machine ends: its exit code, a sentence that says why, and whether a restart may help."""

    code: int
    why: str
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class _Peer:
    """The failure of another machine, and when this one heard of it."""

    host: str
    failure: Failure
    heard: float


class MachineWatch:
    """The thread of this machine that exchanges with the other machines, for one attempt.

    Only the thread asks the store, which may not answer; other threads read what it has found.

    Args:
        store: a connection of its own, for keys of this run.
        attempt: number of restarts, where attempts share the store.
        machine: number of this machine.
        machines: how many there are.
        running: returns the ranks of this machine that run.
        monitor: watches the ranks; None: there is no time-out and no report.
        folded: fold the frames of libraries in stacks.

    Attributes:
        phases: on the first machine, once the run is over, the times of all ranks in each phase of a step; empty if
            none has made a step.
    """

    def __init__(
        self,
        store: Store,
        attempt: int,
        machine: int,
        machines: int,
        running: Callable[[], Collection[int]],
        monitor: Monitor | None = None,
        *,
        folded: bool = True,
    ) -> None:
        self._store = store
        self._prefix = f"{attempt}/"
        self._machine = machine
        self._machines = machines
        self._running = running
        self._monitor = monitor
        self._folded = folded
        self._host = socket.gethostname()
        self._limits = repr(monitor.limits if monitor is not None and monitor.limits else None)
        self._compared = False
        self._stop, self._wake = threading.Event(), threading.Event()
        self._answered = self._looked = self._changed = time.monotonic()
        self._joined = self._all_joined = False
        self._since = self._progress = self._events = 0
        self._failure: Failure | None = None
        self._posted = self._finished = self._told_end = False
        self._ended_machines = 0
        self.phases = ""
        self._peers: list[_Peer] = []
        self._end: End | None = None
        self._thread = threading.Thread(target=self._run, name="accel-machine-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._stop.set()
        self._wake.set()

    @property
    def is_lost(self) -> bool:
        """Whether the store does not answer: the machine that hosts it is gone."""
        return not self._thread.is_alive() or time.monotonic() - self._answered > _SILENCE

    def end(self) -> End | None:
        """Why the ranks of this machine have to end although none of them has failed; None: they go on."""
        if self._end is None and self.is_lost and self._monitor is not None:
            running = list(self._running())
            why = self._monitor.stalled(running)
            if why is not None:
                why = f"{why}, and the machine that hosts the store of this run does not answer"
                self._say_hang(why, self._monitor.stacks(running), self._monitor.pulses(), {})
                self._end = End(PEER_FAILED, why)
        if self._end is None and self._peers and time.monotonic() - self._peers[0].heard > _OWN_WAY:
            first = self._peers[0]
            if first.failure.code != PREEMPTED:  # ranks that are preempted may still be saving
                self._end = self._because_of(first)
        return self._end

    def settle(self, failure: Failure) -> End:
        """Tell the other machines of a failure, and find out whether another machine failed first.

        Args:
            failure: the failure that caused the others of this machine.
        """
        own = End(failure.code, f"rank {failure.rank} failed first, with exit code {failure.code}")
        self._failure = failure
        self._wake.set()
        until = time.monotonic() + _WORD
        while time.monotonic() < until and not self.is_lost:
            if failure.cause is FailureCause.OWN and self._posted:
                break
            first = next((peer for peer in self._peers if peer.failure.cause is FailureCause.OWN), None)
            if failure.cause is not FailureCause.OWN and first is not None:
                return self._because_of(first)
            time.sleep(_ALERT)
        if failure.cause is FailureCause.OWN:
            return own
        # No machine knows of a cause of its own. The first that does not know of another one either has the failure.
        unknown = next((peer for peer in self._peers if peer.failure.cause is FailureCause.UNKNOWN), None)
        if unknown is not None:
            return self._because_of(unknown)
        if failure.cause is FailureCause.UNKNOWN and not self.is_lost:
            return own
        error = failure.error[:200] or f"exit code {failure.code}"
        why = (
            f"another machine failed first, without a word: rank {failure.rank} lost its connection ({error})"
        )
        return End(PEER_FAILED, why)

    def finish(self) -> None:
        """Tell the other machines that the ranks of this machine have ended well."""
        self._finished = True
        self._wake.set()

    @property
    def run_is_over(self) -> bool:
        """Whether no machine has to be waited for any more: all have finished, or one has failed."""
        return self._ended_machines >= self._machines or bool(self._peers) or self.is_lost

    def _phases(self) -> str:
        pulses: dict[int, Pulse] = {}
        hosts: dict[int, str] = {}
        for machine, host, data in self._collect("times"):
            try:
                found = _pulses(data)
            except (TypeError, ValueError):
                say(
                    f"accel: the times of machine {machine} ({host}) are not those of ranks; they are left out"
                )
                continue
            pulses |= found
            hosts |= dict.fromkeys(found, host)
        return render_phases(pulses, hosts)

    def _because_of(self, first: _Peer) -> End:
        preempted = first.failure.code == PREEMPTED
        return End(
            PREEMPTED if preempted else PEER_FAILED,
            f"rank {first.failure.rank} on {first.host} {'was preempted' if preempted else 'failed'} first, with exit "
            f"code {first.failure.code}; the ranks of {self._host} ended because of it",
        )

    def _run(self) -> None:
        try:
            self._set(f"host/{self._machine}", self._host)
            if self._machine == 0:
                self._set("limits", self._limits)
            while not self._stop.is_set():
                self._look()
                quick = self._finished or self._failure is not None
                self._wake.wait(_ALERT if quick else _INTERVAL)
                self._wake.clear()
        except RuntimeError as error:  # it is gone with the machine that hosts it: `is_lost`
            if not self._stop.is_set():
                say(f"accel: {self._host} lost the store of this run ({first_line(error).rstrip('.')})")

    def _look(self) -> None:
        if not self._compared and self._store.check(["limits"]):
            self._compared = True
            if self._get("limits") != self._limits:
                say(
                    f"accel: the time-outs of {self._host} are not those of the first machine, so a hang may not be "
                    "noticed; give --start_timeout, --step_timeout and --checkpoint_timeout on all machines alike"
                )
        if self._failure is not None and not self._posted:
            failure = self._failure
            self._post("failure", [failure.rank, failure.code, int(failure.cause), failure.error[:200]])
            self._posted = True
        if self._finished:
            self._tell_end()
        elif self._monitor is not None and self._monitor.limits and self._failure is None:
            why = self._late(self._monitor)
            if why is not None and self._end is None and not self._peers:
                self._post("hang", why)
        count = self._add(f"{self._prefix}events", 0)
        for number in range(self._events + 1, count + 1):
            self._on_event(f"{self._prefix}event/{number}")
        self._events = count

    def _late(self, monitor: Monitor) -> str | None:
        """Compare the progress of this machine, and of all, with the time-outs."""
        activity, now = monitor.activity(self._running()), time.monotonic()
        if now - self._looked > _GAP:
            self._changed = now
        self._looked = now
        if not self._all_joined:
            joins = activity.joined and not self._joined
            self._joined |= joins
            self._all_joined = self._add(f"{self._prefix}joined", int(joins)) >= self._machines
            self._changed = now
        progress = self._add(f"{self._prefix}progress", int(activity.saving or activity.since != self._since))
        if progress != self._progress:
            self._changed = now
        self._since, self._progress = activity.since, progress
        limit = monitor.limits.step
        if activity.late is not None:
            return f"on {self._host} {activity.late}"
        if limit is not None and now - self._changed > limit:
            return f"no rank of any machine has made progress for {limit:g} s (--step_timeout)"
        return None

    def _tell_end(self) -> None:
        if not self._told_end:
            if self._monitor is not None:
                self._set(f"times/{self._machine}", _times(self._monitor.pulses()))
            self._add(f"{self._prefix}joined", int(not self._joined))
            self._add("finished", 1)  # a machine that has finished does not restart, so attempts share it
            self._told_end = True
        ended = self._add("finished", 0)
        if ended >= self._machines and self._machine == 0 and self._monitor is not None:
            self.phases = self._phases()
        self._ended_machines = ended

    def _post(self, kind: str, value: object) -> None:
        number = self._add(f"{self._prefix}events", 1)
        self._set(f"{self._prefix}event/{number}", [kind, self._machine, self._host, value])

    def _on_event(self, key: str) -> None:
        if not self._wait_for([key], _WORD):
            return  # its machine has ended between the two messages
        try:
            kind, machine, host, value = self._get(key)
            host = shown_line(host)
            if kind == "hang" and self._end is None and not self._peers:
                self._on_hang(shown_line(value))
            elif kind == "failure" and machine != self._machine:
                rank, code, cause, error = value
                failure = Failure(int(rank), int(code), FailureCause(cause), shown_line(error))
                self._peers.append(_Peer(host, failure, time.monotonic()))
        except (TypeError, ValueError):
            say(f"accel: {key} in the store of this run is no event of a machine, so it was not read")

    def _on_hang(self, why: str) -> None:
        """Send the stacks of this machine's ranks; the first machine prints those of all."""
        monitor = self._monitor
        stacks = [] if monitor is None else monitor.stacks(list(self._running()))
        pulses = {} if monitor is None else monitor.pulses()
        mine = [[as_data(stack, folded=self._folded) for stack in stacks], _times(pulses)]
        self._set(f"{self._prefix}stacks/{self._machine}", mine)
        if self._machine == 0:
            silent = self._report(why)
            self._set(f"{self._prefix}reported", silent)
        if not self._wait_for([f"{self._prefix}reported"], _REPORT):
            self._say_hang(f"{why}; the first machine does not answer", stacks, pulses, {})
            silent = ["the first machine"]
        elif self._machine:
            silent = [shown_line(name) for name in self._get(f"{self._prefix}reported")]
        gone = f"{', '.join(silent)} does not answer"
        self._end = End(PEER_FAILED, gone, True) if silent else End(STALLED, why, True)

    def _report(self, why: str) -> list[str]:
        """Print where the ranks of all machines are; returns the names of those that do not answer."""
        stacks: list[RankStack] = []
        pulses: dict[int, Pulse] = {}
        hosts: dict[int, str] = {}
        silent = set(range(self._machines))
        for machine, host, data in self._collect(f"{self._prefix}stacks"):
            silent.remove(machine)
            try:
                its_stacks, its_times = data
                found = [from_data(stack, host) for stack in its_stacks]
                times = _pulses(its_times)
            except (TypeError, ValueError):
                say(
                    f"accel: what machine {machine} ({host}) says of its ranks cannot be read; it is left out"
                )
                continue
            stacks += found
            pulses |= times
            hosts |= dict.fromkeys(times, host)
        names = [self._name_of(machine) for machine in sorted(silent)]
        self._say_hang(
            "; ".join([why, *(f"{name} does not answer" for name in names)]), stacks, pulses, hosts
        )
        return names

    def _say_hang(
        self, why: str, stacks: Sequence[RankStack], pulses: Mapping[int, Pulse], hosts: Mapping[int, str]
    ) -> None:
        report = render_hang(stacks, folded=self._folded)
        phases = render_phases(pulses, hosts)
        say("\n".join(filter(None, [f"accel: {why}; ending all ranks", report, phases])))

    def _collect(self, key: str) -> Iterable[tuple[int, str, Any]]:
        """Number, host and value of each machine that has set ``key`` in time."""
        keys = [f"{key}/{machine}" for machine in range(self._machines)]
        came = self._wait_for(keys, _STACKS)
        for machine, name in enumerate(keys):
            if came or self._store.check([name]):
                try:
                    yield machine, self._name_of(machine), self._get(name)
                except ValueError as error:
                    say(f"accel: {name} in the store of this run cannot be read: {error}")

    def _name_of(self, machine: int) -> str:
        key = f"host/{machine}"
        return shown_line(self._get(key)) if self._store.check([key]) else f"machine {machine}"

    def _wait_for(self, keys: list[str], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (there := bool(self._store.check(keys))) and time.monotonic() < until:
            self._answered = time.monotonic()
            time.sleep(_ALERT)
        return there

    def _add(self, key: str, amount: int) -> int:
        found = int(self._store.add(key, amount))
        self._answered = time.monotonic()
        return found

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))
        self._answered = time.monotonic()

    def _get(self, key: str) -> Any:
        """The value of an existing key.

        Raises:
            ValueError: it is longer than a message of a machine, is no JSON, or is not signed by this job.
        """
        try:
            raw = self._store.get(key)
            if len(raw) > _LONGEST:
                raise ValueError(f"it has {len(raw)} bytes, more than {_LONGEST}")
            return json.loads(raw)
        except (UntrustedMessageError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _times(pulses: Mapping[int, Pulse]) -> list[list[int]]:
    return [[rank, pulse.steps, *(pulse.spent[phase] for phase in PHASES)] for rank, pulse in pulses.items()]


def _pulses(data: Any) -> dict[int, Pulse]:
    """The inverse of `_times`; raises ValueError or TypeError if it is none."""
    found = {}
    for rank, steps, *spent in data:
        times = dict(zip(PHASES, map(int, spent), strict=True))
        found[int(rank)] = Pulse(0, 0, 0, 0, 0, int(steps), times)
    return found
