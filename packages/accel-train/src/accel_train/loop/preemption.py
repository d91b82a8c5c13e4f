"""Stopping early, on all ranks at the same step, when a scheduler sends a signal."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from accel_state import environment
from accel_state.host.signal_listener import listen
from accel_state.operations import collectives
from accel_state.world.process import PartialState
from accel_state.world.stop_consensus import Boundaries, StopConsensus
from accel_train.errors import ArgumentTypeError, OptionError

if TYPE_CHECKING:
    from accel_train.loop.accumulation import Accumulator
from accel_train.loop.observers import StepCount

__all__ = ["Preemption", "PreemptionConfig", "start"]

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreemptionConfig:
    """The signals that tell training to stop.

    Attributes:
        signals: names of signals, such as `("SIGTERM", "SIGUSR2")`; None: SIGTERM, and under Slurm SIGUSR1 too, which
            `sbatch --signal=USR1@120` sends before the time is up.

    Raises:
        OptionError: this system does not know a name, or no program can receive the signal.
    """

    signals: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        signals: object = self.signals
        if signals is None:
            return
        if not isinstance(signals, tuple | list) or not signals:
            raise OptionError(
                f"PreemptionConfig(signals=…) takes a tuple of names, such as ('SIGTERM',), got {signals!r}."
            )
        for name in signals:
            if name in _UNCATCHABLE or name not in signal.Signals.__members__:
                raise OptionError(
                    f"PreemptionConfig(signals=…) holds {name!r}; it takes names of signals that a program of this "
                    "system can receive, such as 'SIGTERM'."
                )

    def numbers(self, slurm: bool) -> frozenset[signal.Signals]:
        """The signals; `slurm` tells whether Slurm runs the job."""
        default = ("SIGTERM", "SIGUSR1") if slurm else ("SIGTERM",)
        return frozenset(signal.Signals[name] for name in self.signals or default)


class Preemption:
    """Listens for the stop signals of one `Accelerator`; see `accelerator.preemption`.

    Args:
        process: this process and its world.
        config: what to listen for.

    Raises:
        StateError: this is not the main thread.
    """

    def __init__(self, process: PartialState, config: PreemptionConfig) -> None:
        slurm = process.topology.launcher == "slurm" or environment.get("SLURM_JOB_ID") is not None
        size = process.num_processes if process.rehearsal is None else 1
        self._rank = process.process_index
        self.signals = config.numbers(slurm)
        self.boundaries = Boundaries()
        self._consensus = StopConsensus(
            self.boundaries, rank=self._rank, size=size, on_failure=self._give_way
        )
        self._received = 0
        self._seen = self._heeded = False
        self._listener = listen(self.signals, self._receive)
        try:
            self._consensus.start(process.connect("accel/stop") if size > 1 else None)
        except BaseException:
            self._listener.close()
            raise
        atexit.register(self.close)

    @property
    def should_stop(self) -> bool:
        """See `Accelerator.should_stop`."""
        return self._consensus.pending and self._is_due()

    @property
    def reason(self) -> str | None:
        """Name of the stop signal and of the rank that received it; None if there was none."""
        verdict = self._consensus.decision
        return verdict.reason if verdict is not None and verdict.stop_after is not None else None

    def boundary(self) -> None:
        """Mark a point at which training may stop; all ranks must call it equally often.

        Each step of a prepared optimizer is such a point, so training loops need no call. A loop without an optimizer
        (generation, a long evaluation) calls it at the end of each round.
        """
        self.boundaries.passed += 1

    def level(self) -> None:
        """Raise the count of all ranks to the highest one, after some took fewer steps; a collective."""
        passed = torch.tensor(self.boundaries.passed)
        self.boundaries.passed = int(collectives.reduce(passed, reduction="max").item())

    def protect_workers(self, loader: DataLoader[Any]) -> None:
        """Keep a loader's workers running when Slurm sends the signal to every process of the job.

        If they died, the loader would fail before the ranks have saved. Only their rank ends them.
        """
        loader.worker_init_fn = _Protected(self.signals, loader.worker_init_fn)

    def finish(self) -> None:
        """Record that the script ends because of the signal; from now on the signals are ignored.

        A repeated signal must not change the exit code while the process ends.
        """
        self._heeded = True
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Stop listening: signals have their previous effect again."""
        atexit.unregister(self.close)
        self._listener.close()
        self._consensus.close()
        if self._seen and not self._heeded and self._rank == 0:
            self._heeded = True
            _logger.warning(
                "accel: training received a stop signal (%s) and ends without accelerator.exit_preempted(). Unless it "
                "exits with code 75, the launcher treats the run as finished.",
                self.reason,
            )

    def _is_due(self) -> bool:
        due = self._consensus.should_stop()
        self._seen = self._seen or due
        return due

    def _receive(self, number: int) -> None:
        self._received = number
        self._consensus.request(f"{signal.Signals(number).name} on rank {self._rank}")

    def _give_way(self) -> None:
        self._listener.redeliver(self._received)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In another process it is None: that one listens for itself."""
        return type(None), ()


@dataclass(frozen=True)
class _Protected:
    """What a worker does first."""

    signals: frozenset[signal.Signals]
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # Torch ends workers by SIGTERM, so that of the rank has to count. Only sigwaitinfo tells who sent a signal;
        # macOS has none, nor Slurm.
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
            threading.Thread(
                target=self._obey, args=(os.getppid(),), name="accel-signals", daemon=True
            ).start()
        if self.then is not None:
            self.then(worker)

    def _obey(self, parent: int) -> None:
        while signal.sigwaitinfo(self.signals).si_pid != parent:
            pass
        os._exit(0)


def start(
    wanted: bool | PreemptionConfig, process: PartialState, accumulator: Accumulator, owner: object
) -> Preemption | None:
    """Start listening for signals as `Accelerator(preemption=…)` asks; None if it does not.

    Args:
        wanted: whether to listen, and for which signals.
        process: this process and its world.
        accumulator: its optimizer steps are counted.
        owner: listening ends when this object is garbage-collected.

    Raises:
        ArgumentTypeError: `wanted` is neither a truth value nor a configuration.
        StateError: this is not the main thread.
    """
    if not isinstance(wanted, bool | PreemptionConfig):
        raise ArgumentTypeError(
            f"Accelerator(preemption=…) takes True, False or a PreemptionConfig, got {wanted!r}."
        )
    if wanted is False:
        return None
    preemption = Preemption(process, PreemptionConfig() if wanted is True else wanted)
    accumulator.observers.append(StepCount(preemption.boundaries))
    # At the end of the process `close` runs by itself, where a program that failed can be told from one that ended.
    weakref.finalize(owner, preemption.close).atexit = False
    return preemption
