"""The record of a run beside its log files: its command, its launcher, and how it ended.

``--log_dir`` has one file per machine, ``run_<machine>.json``. The launcher replaces it as a whole, once when the ranks
start and once when they have ended, so that a reader never sees half of it. A launcher that was killed leaves the first
one: its process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.constants import PREEMPTED
from accel_state.errors import LaunchError
from accel_state.host.process_identity import has_ended, process_identity
from accel_state.messages import first_line, without_secrets
from accel_state.whole_files import write_whole

if TYPE_CHECKING:
    from accel_state.launching.ranks.supervisor import Outcome

__all__ = ["Recorder", "RunRecord", "read_record", "recorded"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A launcher's record of a run on one machine.

    Attributes:
        state: ``running``, ``finished``, ``failed``, ``preempted``, ``stopped`` (by a signal to the launcher), or
            ``killed`` (a signal ended a rank, or the launcher disappeared).
        command: the words of a rank's command; secrets are hidden.
        folder: the working directory.
        host: name of the machine.
        launcher: ``process_identity()`` of the launcher.
        machine_rank, machines: this machine, and how many there are.
        ranks, world_size: ranks on this machine, and on all.
        started, ended: seconds since 1970; None: it has not ended.
        code: exit code; None: as above.
        rank: the rank that failed first; None: none did.
        how: how it ended, in words.
    """

    state: str
    command: tuple[str, ...]
    folder: str
    host: str
    launcher: dict[str, Any]
    machine_rank: int
    machines: int
    ranks: int
    world_size: int
    started: float
    ended: float | None = None
    code: int | None = None
    rank: int | None = None
    how: str = ""
    version: int = _VERSION


class Recorder:
    """Writes the record of a run.

    Args:
        path: the file.
        record: the record of the start.

    Raises:
        LaunchError: it cannot be written.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self._path = path
        self._record = record
        try:
            self._write()
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be written ({error.strerror}); pass another --log_dir"
            ) from error

    def end(self, outcome: Outcome) -> None:
        """Record how the run ended.

        Raises:
            OSError: it cannot be written; the earlier record stays.
        """
        self._end(_state(outcome), outcome.code, outcome.failed, outcome.how)

    def fail(self, error: BaseException) -> None:
        """Record that the launcher itself failed."""
        self._end("failed", None, None, first_line(error))

    def _end(self, state: str, code: int | None, rank: int | None, how: str) -> None:
        self._record = replace(self._record, state=state, ended=time.time(), code=code, rank=rank, how=how)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(asdict(self._record), indent=2) + "\n")


@contextlib.contextmanager
def recorded(
    folder: str | None,
    command: Sequence[str],
    *,
    ranks: int,
    world_size: int,
    machine_rank: int = 0,
    machines: int = 1,
) -> Iterator[Recorder | None]:
    """Record a run while the block starts and supervises it; an error of the block is recorded and raised again.

    Args:
        folder: the folder of the log files; None: nothing is recorded.
        command: the command of a rank.
        ranks: on this machine.
        world_size: on all machines.
        machine_rank: this machine.
        machines: how many there are.

    Raises:
        LaunchError: the record cannot be written.
    """
    if folder is None:
        yield None
        return
    recorder = Recorder(
        Path(folder) / f"run_{machine_rank}.json",
        RunRecord(
            "running",
            tuple(without_secrets(list(command))),
            os.getcwd(),
            platform.node(),
            process_identity(),
            machine_rank,
            machines,
            ranks,
            world_size,
            time.time(),
        ),
    )
    try:
        yield recorder
    except BaseException as error:
        with contextlib.suppress(OSError):  # the error of the block is the one to report
            recorder.fail(error)
        raise


def read_record(path: Path) -> RunRecord | None:
    """The record in a file; ``killed`` if its state is ``running`` and its launcher is gone.

    Returns:
        None if the file is none of these records.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        record = RunRecord(**{**data, "command": tuple(data["command"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if record.state == "running" and has_ended(record.launcher):
        return replace(record, state="killed", how="the launcher was killed")
    return record


def _state(outcome: Outcome) -> str:
    if outcome.code == 0:
        return "finished"
    if outcome.code == PREEMPTED:
        return "preempted"
    if outcome.stopped_by is not None and outcome.failed is None:
        return "stopped"
    return "killed" if outcome.by_signal else "failed"
