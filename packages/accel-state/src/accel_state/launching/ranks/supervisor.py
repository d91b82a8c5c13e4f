"""Supervision of one node's ranks: forward output and signals, end all when one fails, restart, clean up.

One thread per stream of a rank reads output. The main loop waits for events and handles four of them: the first exit
that is a failure (the report names the rank with the earliest traceback among those that ended by themselves), a
signal, a deadline, and the end of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from accel_state.constants import PREEMPTED, STALLED
from accel_state.launching.ranks.processes import (
    HAS_SESSIONS,
    Guardian,
    RankProcess,
    end_group,
    end_strays,
    group_is_alive,
)
from accel_state.launching.ranks.signals import EXITED, SignalQueue, receive_signals
from accel_state.launching.watching.monitor import Monitor
from accel_state.launching.watching.output import Console, RankOutput, StreamName
from accel_state.launching.watching.tracebacks import (
    last_line,
    last_place,
    last_traceback,
    listed,
    summarize,
    timed_out,
    waited_for_another,
)

__all__ = ["Outcome", "Policy", "SupervisedProcess", "supervise"]

_SETTLE = 2.0
"""Seconds that a rank whose traceback preceded the first exit gets to exit, so that the report names the right rank."""
_CATCH_UP = 0.5
"""Seconds that the readers of standard error get, on a busy machine, to reach the time of the first exit."""
_CRASHES = {
    -int(getattr(signal, name))
    for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
    if hasattr(signal, name)
}
"""Exit codes of ends that another rank's failure does not cause."""
_FAILURE_GRACE = 5.0
_SWEEP_GRACE = 1.0
_DRAIN = 1.0
_KILL_PATIENCE = 10.0
_SPEAKING = 0.5
_START_UP = 60.0  # seconds after the start of ranks, in which a mistake of the script shows
_MISTAKES = frozenset(
    [
        "ArgumentTypeError",
        "AssertionError",
        "AttributeError",
        "ConfigError",
        "FileNotFoundError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "OptionError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    ]
)
"""Errors that a restart does not fix; failures of machines and networks have other types."""
_REPORT = "SIGUSR2"
"""The signal that asks the launcher where its ranks are, unless it is one of those that are passed on."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Timeouts and restart rules for a group of ranks.

    Attributes:
        grace_period: seconds between a forwarded SIGTERM or SIGUSR1 and the kill.
        interrupt_grace: the same after the first Ctrl-C.
        max_restarts: how often the group is restarted after a crash.
        restart_preempted: restart the group, without limit, when ranks exit with code 75 although this launcher
            received no stop signal; otherwise the exit code is passed on to the caller.
        resumable: the program resumes from its newest checkpoint, so a launcher that receives a stop signal (other
            than Ctrl-C) exits with code 75 even if ranks had no time to save.
        monitor_interval: seconds between polls of the ranks on systems that do not report exits.
        quiet: print no progress messages; the traceback of the failing rank is still printed.
        signals: names of the signals that are passed on to ranks; empty: the usual ones.
        patience: seconds that an agent, which starts ranks itself, has to end them if the launcher dies.
    """

    grace_period: float = 30.0
    interrupt_grace: float = 5.0
    max_restarts: int = 0
    restart_preempted: bool = False
    resumable: bool = False
    monitor_interval: float = 0.1
    quiet: bool = False
    patience: float = 0.0
    signals: tuple[str, ...] = ()


@dataclass(slots=True)
class SupervisedProcess:
    """A started process with its output and, once it has ended, its exit code."""

    process: RankProcess
    output: RankOutput
    label: str
    code: int | None = None
    ended_at: float = 0.0

    def crashed(self) -> bool:
        """Whether it ended without a traceback, by a signal that is not the consequence of another rank's failure."""
        return self.code in _CRASHES and self.output.traceback_at is None

    def waited(self) -> bool:
        """Whether its error says that another rank was gone."""
        return self.output.traceback_at is not None and waited_for_another(self.error())

    def was_interrupted(self) -> bool:
        """Whether Ctrl-C has ended it, directly or because another rank that it waited for has ended."""
        return (
            (self.code == -signal.SIGINT and self.output.traceback_at is None)
            or self.error() == "KeyboardInterrupt"
            or self.waited()
        )

    def error(self) -> str:
        """The last line of its last traceback."""
        return last_line(last_traceback(self.output.tail))

    def failed_at(self) -> float:
        """Time of failure: its last traceback precedes its exit and the exits of other ranks that it causes."""
        return (
            self.ended_at
            if self.output.traceback_at is None
            else min(self.output.traceback_at, self.ended_at)
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended.

    Attributes:
        code: exit code for the shell; 128 + n for signal n.
        failed: the rank that failed first, unless it was stopped on request.
        label: name of that process in messages.
        how: how it ended, in words.
        by_signal: a signal ended that process.
        error: last traceback of that rank, or the end of its standard error.
        others: a line for each way in which other ranks failed.
        stopped_by: the signal that stopped the launcher, if any.
        stalled: the launcher ended the ranks because they made no progress, and has reported where they were.
    """

    code: int
    failed: int | None = None
    label: str = ""
    how: str = ""
    by_signal: bool = False
    error: str = ""
    others: tuple[str, ...] = ()
    stopped_by: int | None = None
    stalled: bool = False


def supervise(
    start: Callable[[int], Sequence[SupervisedProcess]],
    policy: Policy,
    console: Console,
    *,
    guarded: bool = True,
    monitor: Monitor | None = None,
) -> Outcome:
    """Run a group of ranks until it ends, including restarts.

    Args:
        start: starts attempt number n (from 0) and returns its processes; if it raises, it must have ended
            those it had started.
        policy: see ``Policy``.
        console: destination of output and messages.
        guarded: fork a guardian that ends the ranks if this process is killed; only safe while this process
            has no threads.
        monitor: knows the progress of the ranks, and where they are.
    """
    requests = () if monitor is None or _REPORT in policy.signals else (_REPORT,)
    crashes = attempt = 0
    mistake = ""
    with (
        receive_signals(policy.signals, requests=requests) as signals,
        contextlib.closing(Guardian(guarded)) as guardian,
    ):
        if monitor is not None:
            guardian.remove(str(monitor.folder))
        while True:
            if monitor is not None:
                monitor.begin()
            began = time.monotonic()
            group = _Group(start(attempt), policy, console, signals, guardian, monitor)
            outcome = group.run()
            preempted = outcome.code == PREEMPTED
            # A stopped launcher does not restart: the machine is needed.
            ends = outcome.code == 0 or outcome.stopped_by is not None
            ends = ends or not (policy.restart_preempted if preempted else crashes < policy.max_restarts)
            before, mistake = mistake, _mistake(outcome, time.monotonic() - began)
            if not ends and mistake and mistake == before:
                ends = True
                _say(
                    console,
                    policy,
                    f"{outcome.label} failed as before, at its start; it is not restarted again",
                )
            group.show_errors(reported=ends and outcome.failed is not None)
            if ends:
                return outcome
            attempt += 1
            crashes += not preempted
            if preempted:
                _say(console, policy, f"training was preempted (exit code {PREEMPTED}); restarting all ranks")
            else:
                count = f"({crashes} of {policy.max_restarts})"
                _say(console, policy, f"{outcome.label} failed ({outcome.how}); restarting all ranks {count}")


def _mistake(outcome: Outcome, seconds: float) -> str:
    """The error of ranks that failed soon after their start and would fail the same way again; else empty."""
    error = last_line(outcome.error)
    kind = error.partition(":")[0].rpartition(".")[2]
    return error if seconds < _START_UP and kind in _MISTAKES else ""


@dataclass(slots=True)
class _Group:
    """One attempt. States: running → ending (a rank failed, or a signal arrived) → all ended."""

    members: Sequence[SupervisedProcess]
    policy: Policy
    console: Console
    signals: SignalQueue
    guardian: Guardian
    monitor: Monitor | None = None
    stall: str | None = None
    first_exit: float | None = None
    first_failed: SupervisedProcess | None = None
    stopped_by: int | None = None
    interrupted: bool = False
    terminated: bool = False
    deadline: float | None = None
    killed: bool = False

    def run(self) -> Outcome:
        try:
            for member in self.members:
                self.guardian.watch(member.process.pid, self.policy.patience)
                for stream, pipe in member.process.pipes:
                    member.output.forward(cast("StreamName", stream), pipe)
            while any(self._alive()):
                event = self.signals.get(self._patience())
                if event != EXITED:
                    self._on_signal(event)
                self._collect()
                self._on_failure()
                self._on_stall()
                self._on_deadline()
        finally:
            self._clean_up()
        return self._outcome()

    def show_errors(self, *, reported: bool) -> None:
        """Print the tracebacks that were held back, or drop those of failed ranks if the outcome has them.

        After Ctrl-C the tracebacks of ranks that it has ended are dropped; one line says where one of them was.

        Args:
            reported: the caller shows the outcome.
        """
        interrupted = [
            member
            for member in self.members
            if self.stopped_by == signal.SIGINT and member.code and member.was_interrupted()
        ]
        for member in self.members:
            if member in interrupted or (reported and member.code):
                member.output.drop_held()
            else:
                member.output.show_held()
        if interrupted:
            places = [
                f"; {member.label} was in {place}"
                for member in interrupted
                if not member.waited() and (place := last_place(last_traceback(member.output.tail)))
            ]
            self._say(f"ended by Ctrl-C{''.join(places[:1])}")

    def _alive(self) -> list[SupervisedProcess]:
        return [member for member in self.members if member.code is None]

    def _patience(self) -> float:
        waits = [self.policy.monitor_interval]
        if self.deadline is not None:
            waits.append(self.deadline - time.monotonic())
        if self.first_exit is not None and self.first_failed is None:
            waits.append(0.02)
        return min(waits)

    def _collect(self) -> None:
        for member in self._alive():
            member.code = member.process.poll()
            if member.code is None:
                continue
            member.ended_at = time.monotonic()
            if HAS_SESSIONS:
                # Child processes that it left running would keep its output open. Helpers that clean up
                # after it ignore SIGTERM.
                end_group(member.process.pid, signal.SIGTERM)
            if member.code != 0 and self.first_exit is None:
                self.first_exit = member.ended_at

    def _on_failure(self) -> None:
        if self.first_exit is None or self.first_failed is not None:
            return
        now = time.monotonic()
        if now - self.first_exit < _CATCH_UP and not all(m.output.caught_up() for m in self.members):
            return
        self._collect()  # an earlier end of another rank may have been polled too early to be seen
        failed = [member for member in self.members if member.code]
        cause, sure = self._cause(failed)
        if not sure and self._alive() and now - self.first_exit < _SETTLE:
            return
        self.first_failed = cause
        if self.stopped_by is not None or self.stall is not None:
            return
        raised = self.first_failed.output.traceback_at is not None
        if self.monitor is not None and raised and timed_out(self.first_failed.error()):
            self._report("a collective has timed out")
        alive = [member.label for member in self._alive()]
        if self.first_failed.code == PREEMPTED:
            # It was preempted, and so were the other ranks, which may still be saving.
            self._shorten(now + self.policy.grace_period)
            ending = f"{listed(alive)} should exit within {self.policy.grace_period:g} s"
        else:
            self._send(signal.SIGTERM)
            self._shorten(now + min(_FAILURE_GRACE, self.policy.grace_period))
            ending = f"ending {listed(alive)}"
        if alive:
            what = "was preempted" if self.first_failed.code == PREEMPTED else "failed"  # the report says how
            self._say(f"{self.first_failed.label} {what}; {ending}")

    def _cause(self, failed: Sequence[SupervisedProcess]) -> tuple[SupervisedProcess, bool]:
        """The failed rank that caused the other failures, and whether ranks that still run cannot be the cause.

        A rank that waits for a crashed one fails at once, and its error may arrive before the crash is known.
        """
        crashed = [member for member in failed if member.crashed()]
        causes = crashed or [member for member in failed if not member.waited()]
        first = min(causes or failed, key=SupervisedProcess.failed_at)
        sure = bool(crashed) or (bool(causes) and not any(map(self._failed_before, self._alive())))
        return first, sure

    def _failed_before(self, member: SupervisedProcess) -> bool:
        """Whether the traceback of a rank that still runs precedes those of the ranks that have failed."""
        written = member.output.traceback_at
        return written is not None and written < min(m.failed_at() for m in self.members if m.code)

    def _on_stall(self) -> None:
        """End all ranks if they make no progress."""
        if self.monitor is None or self.deadline is not None or self.stall is not None:
            return
        self.stall = self.monitor.stalled(member.process.rank for member in self._alive())
        if self.stall is not None:
            self._report(self.stall, ending="; ending all ranks")
            self._send(signal.SIGTERM)
            self._shorten(time.monotonic() + min(_FAILURE_GRACE, self.policy.grace_period))

    def _report(self, why: str, ending: str = "") -> None:
        """Print where the ranks are, and how long the phases of their steps take."""
        assert self.monitor is not None
        alive = [member.process.rank for member in self._alive()]
        text = f"accel: {why}{ending}\n{self.monitor.hang_report(alive)}" if alive else f"accel: {why}"
        if self.monitor.timed:
            text = f"{text}\n{self.monitor.phases()}".rstrip()
        _speak(self.console, text)

    def _on_deadline(self) -> None:
        if self.deadline is None or self.killed or time.monotonic() < self.deadline:
            return
        alive = [member.label for member in self._alive()]
        if alive:
            self._say(f"{listed(alive)} did not exit in time; killing")
            self._kill()

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if number == getattr(signal, "SIGTSTP", None):
            self._suspend()
        elif self._is_request(number):
            self._report(f"{_REPORT} received: this is where the ranks are")
        elif number == signal.SIGINT:
            if self.interrupted:
                self._say("interrupted again; killing")
                self._kill()
                return
            self.interrupted = True
            self.stopped_by = self.stopped_by or number
            self._say(
                f"interrupted; ranks have {self.policy.interrupt_grace:g} s to exit, Ctrl-C again kills them"
            )
            self._send(signal.SIGINT)
            self._shorten(now + self.policy.interrupt_grace)
        elif not self.terminated:
            self.terminated = True
            self.stopped_by = self.stopped_by or number
            seconds = f"{self.policy.grace_period:g} s"
            self._say(f"{_signal_name(number)} received and forwarded; ranks have {seconds} to exit")
            self._send(signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number)
            self._shorten(now + self.policy.grace_period)

    def _is_request(self, number: int) -> bool:
        return (
            self.monitor is not None
            and _REPORT not in self.policy.signals
            and number == getattr(signal, _REPORT, None)
        )

    def _suspend(self) -> None:
        for member in self._alive():
            end_group(member.process.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for member in self._alive():
            end_group(member.process.pid, signal.SIGCONT)

    def _send(self, number: int) -> None:
        for member in self._alive():
            member.process.send(number)

    def _kill(self) -> None:
        self.killed = True
        for member in self._alive():
            member.process.kill()

    def _shorten(self, deadline: float) -> None:
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _clean_up(self) -> None:
        """End every rank and its child processes, and read the rest of their output."""
        if self._alive():
            self._kill()
        until = time.monotonic() + _KILL_PATIENCE
        while self._alive() and time.monotonic() < until:
            self._collect()
            time.sleep(0.005)
        for member in self._alive():
            self._say(
                f"{member.label} (process {member.process.pid}) cannot be killed: it is blocked in the kernel"
            )
            member.code = -int(getattr(signal, "SIGKILL", signal.SIGTERM))
        if HAS_SESSIONS:
            _sweep({member.process.pid for member in self.members})
        if self.monitor is not None:
            _end_strays(str(self.monitor.folder))
        for member in self.members:
            member.output.finish(_DRAIN, self._stop_requested)
            self.guardian.forget(member.process.pid)

    def _stop_requested(self) -> bool:
        """Whether a stop signal has arrived; called after the ranks have ended, while their output is read."""
        event = self.signals.get(0.0)
        if event == getattr(signal, "SIGTSTP", None):
            self._suspend()
        elif event != EXITED and not self._is_request(event):
            self.stopped_by = self.stopped_by or event
        return self.stopped_by is not None

    def _say(self, message: str) -> None:
        _say(self.console, self.policy, message)

    def _outcome(self) -> Outcome:
        failed = [member for member in self.members if member.code]
        if self.stall is not None and self.stopped_by is None:
            return Outcome(STALLED, label="the run", how=self.stall, stalled=True)
        if not failed:
            return Outcome(0, stopped_by=self.stopped_by)
        first = self.first_failed or self._cause(failed)[0]
        assert first.code is not None
        asked_for = {PREEMPTED}
        if self.stopped_by is not None:
            asked_for |= {code for n in (self.stopped_by, signal.SIGTERM) for code in (-n, 128 + n)}
        interrupted = self.stopped_by == signal.SIGINT
        wanted = first.code in asked_for or (self.killed and self.stopped_by is not None)
        # Native threads that the interrupt leaves behind may abort the interpreter at its end.
        wanted = wanted or (interrupted and first.was_interrupted())
        stop_requested = self.stopped_by is not None and not interrupted
        others = [
            (member.label, member.error())
            for member in failed
            if member is not first and member.output.traceback_at is not None
        ]
        code = _shell_code(first.code)
        if wanted and stop_requested and self.policy.resumable:
            code = PREEMPTED
        elif wanted and interrupted:  # also where ranks were too slow and had to be killed
            code = _shell_code(-signal.SIGINT)
        return Outcome(
            code,
            failed=None if wanted else first.process.rank,
            label=first.label,
            how=_how(first),
            by_signal=first.code < 0,
            error="" if wanted else last_traceback(first.output.tail),
            others=() if wanted else tuple(summarize(others, first.error())),
            stopped_by=self.stopped_by,
        )


def _say(console: Console, policy: Policy, message: str) -> None:
    if policy.quiet:
        return
    _speak(console, f"accel: {message}")


def _speak(console: Console, text: str) -> None:
    # The reader of our output may have paused (a pager); signals and failures must not wait for it.
    speaker = threading.Thread(target=console.say, args=(text,), daemon=True)
    speaker.start()
    speaker.join(_SPEAKING)


def _sweep(groups: set[int]) -> None:
    """Wait until the process groups of ended ranks are empty, then kill the remaining processes."""
    until = time.monotonic() + _SWEEP_GRACE
    while groups := {group for group in groups if group_is_alive(group)}:
        if time.monotonic() > until:
            for group in groups:
                end_group(group, signal.SIGKILL)
            return
        time.sleep(0.01)


def _end_strays(folder: str) -> None:
    """End processes that ranks have started in groups and sessions of their own."""
    if not end_strays(folder, signal.SIGTERM, launcher=os.getpid()):
        return
    until = time.monotonic() + _SWEEP_GRACE
    while end_strays(folder, 0, launcher=os.getpid()):
        if time.monotonic() > until:
            end_strays(folder, signal.SIGKILL, launcher=os.getpid())
        time.sleep(0.01)
        if time.monotonic() > until + _SWEEP_GRACE:  # blocked in the kernel
            return


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _how(member: SupervisedProcess) -> str:
    code = member.code or 0
    if code == PREEMPTED:
        return f"preempted, exit code {PREEMPTED}"
    if code > 0:
        return f"exit code {code}"
    hint = "; the usual cause is running out of memory" if -code == getattr(signal, "SIGKILL", None) else ""
    return f"ended by {_signal_name(-code)}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
