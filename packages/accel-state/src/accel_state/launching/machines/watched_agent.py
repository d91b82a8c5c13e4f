"""torch's elastic agent, which also watches its ranks with the other machines, and knows why they end.

It overrides what torch's agents have to define: how ranks start, how they are looked at and how they end.
"""

from __future__ import annotations

import argparse
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from accel_state import environment
from accel_state.communication.signed_store import prefixed, signed
from accel_state.constants import PREEMPTED, RUN_FOLDER, STORE_SECRET
from accel_state.launching.machines.failures import Failure, FailureCause, first_failure, read_errors
from accel_state.launching.machines.machine_watch import End, MachineWatch
from accel_state.launching.watching.monitor import Limits, Monitor
from accel_state.messages import say

__all__ = ["RunEndedError", "WatchedAgent"]

_GRACE = 5
"""Seconds between SIGTERM and the kill of ranks that hang, or whose run has failed on another machine."""


class RunEndedError(Exception):
    """The ranks of this machine were ended because of the run as a whole."""

    def __init__(self, end: End) -> None:
        super().__init__(end.why)
        self.end = end


class WatchedAgent(LocalElasticAgent):
    """The agent of one machine.

    Args:
        own: the agent's own flags.
        **kwargs: those of torch's agent.

    Attributes:
        started: ranks have been started, so that all machines had found each other.
    """

    def __init__(self, own: argparse.Namespace, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.started = self._preempted = False
        self._own = own
        self._watch: MachineWatch | None = None
        self._monitor: Monitor | None = None
        self._failed: dict[int, int] = {}
        self._errors: dict[int, tuple[int, str]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        own, ranks = self._own, [worker.global_rank for worker in worker_group.workers]
        limits = Limits(own.start_timeout, own.step_timeout, own.checkpoint_timeout)
        if limits or own.straggler_report:
            self._monitor = Monitor(
                range(ranks[0], ranks[-1] + 1), limits, timed=True, folded=not own.all_frames
            )
            self._monitor.begin()
            environment.assign(**{RUN_FOLDER: str(self._monitor.folder)})
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self.started = True
        spec = worker_group.spec
        backend = spec.rdzv_handler.get_backend()
        if backend not in ("static", "c10d"):  # the stores of others are no stores of torch
            return ids
        group: Any = worker_group  # torch declares what it fills in later as None
        self._watch = MachineWatch(
            signed(prefixed(group.store.clone(), "accel/machines"), environment.get(STORE_SECRET)),
            # With c10d each attempt has a store of its own, and a machine that joins later counts from 0.
            spec.max_restarts - self._remaining_restarts if backend == "static" else 0,
            group.group_rank,
            group.group_world_size,
            lambda: [rank for rank, code in self._codes().items() if code is None],
            self._monitor,
            folded=not own.all_frames,
        )
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before torch's agent ends the other ranks: only those that have ended by now have failed by themselves.
        self._failed = {rank: code for rank, code in self._codes().items() if code}
        self._errors = read_errors(self._error_files()) if self._failed else {}
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and self._watch is not None:
            end = self._watch.end()
            if end is not None:
                self._shutdown(signal.SIGTERM, _GRACE)
                if not (end.restarts and self._remaining_restarts):
                    raise RunEndedError(end)
                result = RunResult(state=WorkerState.UNHEALTHY)
        elif result.state is WorkerState.FAILED and not self._failed:  # they failed in between
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            # Those that torch's agent has ended meanwhile are listed, too.
            self._failed = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
            self._errors = read_errors(self._error_files())
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.close()  # meanwhile this machine waits for others, which is no hang
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for the other machines, unless the run has ended in another way."""
        if self._watch is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        self._watch.finish()
        until = time.monotonic() + self._exit_barrier_timeout
        while not self._watch.run_is_over and time.monotonic() < until:
            end = self._watch.end()
            if end is not None:
                raise RunEndedError(end)
            time.sleep(0.05)
        machine: int | None = self._worker_group.group_rank
        if self._own.straggler_report and machine == 0 and not self._watch.is_lost:
            untold = "--straggler_report: no rank has made an optimizer step through Accelerator.prepare()"
            say(f"accel: {self._watch.phases or untold}")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        self._preempted = PREEMPTED in self._codes().values()

    def settle(self) -> End:
        """How this machine ends after a failure of its ranks: by itself, or because another one failed first."""
        failure = first_failure(self._failed, self._errors, program=self._own.program)
        assert failure is not None, "a rank has failed"
        if self._watch is None:
            return End(failure.code, f"rank {failure.rank} failed first, with exit code {failure.code}")
        return self._watch.settle(failure)

    def interrupted(self, number: int) -> int:
        """Tell the other machines that signal ``number`` has ended this one; return the exit code."""
        if self._preempted:
            return PREEMPTED
        failure = Failure(self._worker_group.workers[0].global_rank, 128 + number, FailureCause.OWN)
        return failure.code if self._watch is None else self._watch.settle(failure).code

    def close(self) -> None:
        """End the exchange with the other machines, and remove the folder of the ranks."""
        if self._watch is not None:
            self._watch.close()
        if self._monitor is not None:
            self._monitor.close()

    def _codes(self) -> dict[int, int | None]:
        """The exit code of each rank; None: it runs."""
        processes = getattr(self._pcontext, "subprocess_handlers", {})
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {ranks[local]: handler.proc.poll() for local, handler in processes.items()}

    def _error_files(self) -> dict[int, str]:
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {ranks[local]: file for local, file in getattr(self._pcontext, "error_files", {}).items()}
