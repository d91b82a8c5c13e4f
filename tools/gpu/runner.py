"""Runs checks, each in a process of its own, within a budget of time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu.figures import Figure
from gpu.registry import ROOT, Check

OK, FAILED, NOT_RUN, MEASURED = "ok", "FAILED", "NOT RUN", "measured"

# With less than this left, no further check begins: it would only be killed.
_LEAST_SECONDS = 5.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 40


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of a check, or how the check ended."""

    check: str
    status: str
    figure: Figure | None = None
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """How to run.

    Attributes:
        device: "cpu" or "accelerator".
        full: the size.
        budget: seconds for everything.
        jobs: how many checks run at one time that are not alone.
        scratch: a folder for what the checks write.
        missing: why nothing can run that needs an accelerator; None if it can.
        least: seconds that must be left for a check to begin.
    """

    device: str
    full: bool
    budget: float
    jobs: int
    scratch: Path
    missing: str | None = None
    least: float = _LEAST_SECONDS


@dataclass
class _Job:
    check: Check
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    folder: Path
    began: float
    limit: float
    cut_short: bool
    """The limit is what was left of the budget, not the check's own."""


@dataclass
class Runner:
    """Runs checks.

    Args:
        plan: how.
        report: called with each row as it comes.
    """

    plan: Plan
    report: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    """The end of what failed checks printed."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._running: list[_Job] = []
        self._begun = 0

    def run(self, checks: Iterable[Check]) -> list[Row]:
        """Run them, those that may share the machine first.

        Returns:
            At least one row of each, in the order of `checks`, also after an interrupt from the keyboard.
        """
        everything = list(checks)
        alone = [check for check in everything if check.alone and self.plan.full]
        waiting = deque([*(check for check in everything if check not in alone), *alone])
        try:
            while waiting or self._running:
                while waiting and self._has_room(waiting[0], alone):
                    self._begin(waiting.popleft())
                self._collect()
                time.sleep(_POLL_SECONDS if self._running else 0)
        except KeyboardInterrupt:
            for job in self._running:
                self._row(Row(job.check.name, NOT_RUN, note="interrupted", seconds=self._spent(job)))
            for check in waiting:
                self._row(Row(check.name, NOT_RUN, note="interrupted before it began"))
        finally:
            while self._running:
                self._end(self._running.pop())
        order = {check.name: number for number, check in enumerate(everything)}
        self.rows.sort(key=lambda row: order[row.check])
        return self.rows

    def _has_room(self, check: Check, alone: Sequence[Check]) -> bool:
        if check in alone or any(job.check in alone for job in self._running):
            return not self._running
        return len(self._running) < self.plan.jobs

    def _begin(self, check: Check) -> None:
        reason = self._why_not(check)
        if reason is not None:
            self._row(Row(check.name, NOT_RUN, note=reason))
            return
        left = self.plan.budget - (time.monotonic() - self._began)
        if left < self.plan.least:
            self._row(
                Row(check.name, NOT_RUN, note=f"time: {self.plan.budget:.0f} s for everything are over")
            )
            return
        folder = self.plan.scratch / str(self._begun)
        self._begun += 1
        (folder / "work").mkdir(parents=True)
        log = open(folder / "log", "wb")  # noqa: SIM115 # closed by _end
        command = [  # -P: modules of the script's folder shall not hide packages of the same names
            sys.executable, "-P", str(Path(__file__).with_name("acceptance.py")), "--child", check.target,
            "--arguments", json.dumps(check.arguments), "--device", self.plan.device,
            "--scale", "full" if self.plan.full else "small", "--folder", str(folder),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder / "work",
            env=self._environment(folder), start_new_session=True,
        )  # fmt: skip
        limit = min(check.seconds, left)
        self._running.append(
            _Job(check, process, log, folder, time.monotonic(), limit, limit < check.seconds)
        )

    def _why_not(self, check: Check) -> str | None:
        if check.accelerator_only and self.plan.device == "cpu":
            return "needs an accelerator"
        if self.plan.missing is not None:
            return self.plan.missing
        absent = [name for name in check.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)} is not installed" if absent else None

    def _environment(self, folder: Path) -> dict[str, str]:
        """Without what would configure the checks from outside; with the repository's sources."""
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ACCELERATE_", "PYTEST_", "COV_"))
            and name
            not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        paths = [*source_paths(), *filter(None, [own.get("PYTHONPATH")])]
        own |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TMPDIR": str(folder / "work"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        if not self.plan.full:
            own["OMP_NUM_THREADS"] = "1"
        return own

    def _collect(self) -> None:
        """Take the rows of those that have ended, or have had their time."""
        for job in list(self._running):
            ended = job.process.poll() is not None
            if ended or self._spent(job) > job.limit:
                self._running.remove(job)
                self._end(job)
                self._read(job, killed=not ended)
                shutil.rmtree(job.folder, ignore_errors=True)

    def _spent(self, job: _Job) -> float:
        return time.monotonic() - job.began

    def _end(self, job: _Job) -> None:
        """End a process and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        job.log.close()

    def _read(self, job: _Job, *, killed: bool) -> None:
        """The rows of an answer."""
        name, spent = job.check.name, self._spent(job)
        figures, end = _answer(job.folder / "answer")
        for figure in figures:
            status = {True: OK, False: FAILED, None: MEASURED}[figure.passed]
            self._row(Row(name, status, figure, figure.note, spent))
        if end is not None and end["end"] == "not run":
            self._row(Row(name, NOT_RUN, note=end["reason"], seconds=spent))
        elif end is not None and end["end"] == "failed":
            self._row(Row(name, FAILED, note=end["reason"], seconds=spent))
        elif end is None and killed and job.cut_short:
            note = (
                f"time: stopped after {spent:.0f} s, the end of the {self.plan.budget:.0f} s for everything"
            )
            self._row(Row(name, NOT_RUN, note=note, seconds=spent))
        elif end is None and killed:
            self._row(
                Row(name, FAILED, note=f"still ran after {job.limit:g} s, its limit; killed", seconds=spent)
            )
        elif end is None:
            self._row(Row(name, FAILED, note=f"the process {_how(job.process.returncode)}", seconds=spent))
        elif not figures:
            self._row(Row(name, FAILED, note="it ended without a figure", seconds=spent))
        if any(row.check == name and row.status == FAILED for row in self.rows):
            lines = (job.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            self.logs[name] = "\n".join(lines[-_TAIL_LINES:])

    def _row(self, row: Row) -> None:
        self.rows.append(row)
        self.report(row)


def source_paths() -> list[str]:
    """Folders from which the tools and the packages are imported, installed or not."""
    return [str(ROOT / "tools"), *(str(path) for path in sorted((ROOT / "packages").glob("*/src")))]


def _answer(path: Path) -> tuple[list[Figure], dict[str, Any] | None]:
    figures: list[Figure] = []
    end = None
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # killed while it wrote
        found = json.loads(line)
        if "end" in found:
            end = found
        else:
            figures.append(Figure(**found))
    return figures, end


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with code {returncode} and no answer"
