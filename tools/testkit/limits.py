"""Run something in a fresh process under a hard limit of memory, which the kernel's control groups enforce.

The limit holds for what the process takes and for the page cache that it fills, as in a container. Never RLIMIT_AS,
which counts addresses: a mapped file takes as many as it has bytes, and no memory.

    result = limits.run([sys.executable, "script.py"], limit=300 << 20)
    limits.call(function, argument, limit=300 << 20)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Joins the control group and becomes the command, so that all the command's memory is counted.
_JOIN = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write("0")
os.execvp(sys.argv[2], sys.argv[2:])
"""

# What `call` runs: a function, its arguments, and where to put the answer.
_ANSWER = """
import pickle, sys, traceback
try:
    with open(sys.argv[1], "rb") as file:
        path = pickle.load(file)
        sys.path[:] = path
        import cloudpickle
        function, args, kwargs = cloudpickle.load(file)
    answer = True, function(*args, **kwargs)
except BaseException:
    answer = False, traceback.format_exc()
with open(sys.argv[2], "wb") as file:
    cloudpickle.dump(answer, file)
"""


class LimitUnavailableError(RuntimeError):
    """No control group can be made here; the message says why, for every place that was tried."""


class LimitedCallError(AssertionError):
    """What ran under the limit failed, or was killed; the message says which, with its traceback or output."""


@dataclass(frozen=True)
class Result:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str
    peak: int
    """Bytes, the page cache that the command filled included."""
    killed: bool
    """Whether the kernel killed a process because the limit was reached."""
    value: Any = None
    """What the function of :func:`call` returned."""


class MemoryGroup:
    """A control group with a limit of memory, of either version.

    Args:
        folder: of the group, which exists.
        limit: bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.first_version = (folder / "memory.limit_in_bytes").exists()
        if self.first_version:
            self._set("memory.limit_in_bytes", limit)
            self._set("memory.memsw.limit_in_bytes", limit)
        else:
            self._set("memory.max", limit)
            self._set("memory.swap.max", 0)

    def _set(self, name: str, value: int) -> None:
        if (self.folder / name).exists():  # the files about swap are not everywhere
            (self.folder / name).write_text(str(value))

    @property
    def peak(self) -> int:
        """Bytes that the group used at most."""
        name = "memory.max_usage_in_bytes" if self.first_version else "memory.peak"
        return int((self.folder / name).read_text())

    @property
    def usage(self) -> int:
        """Bytes that the group uses now."""
        name = "memory.usage_in_bytes" if self.first_version else "memory.current"
        return int((self.folder / name).read_text())

    @property
    def kills(self) -> int:
        """Processes that were killed for want of memory."""
        name = "memory.oom_control" if self.first_version else "memory.events"
        fields = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        """Kill what still runs in the group, and remove it."""
        for _ in range(100):
            for process in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), 9)
            try:
                self.folder.rmdir()
            except OSError:  # a killed process takes its time
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"the control group {self.folder} cannot be removed; processes in it do not end")


def _parents() -> Iterator[Path]:
    """Groups that may have children with limits: this process's own and those above it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in _mounts("memory" if controllers else None):
            if controllers and "memory" not in controllers.split(","):
                continue
            own = mount / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_dir():
                    yield folder
                if folder == mount:
                    break


def _mounts(controller: str | None) -> Iterator[Path]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2" and controller is None:
            yield Path(folder)
        if kind == "cgroup" and controller is not None and controller in options.split(","):
            yield Path(folder)


def _make(parent: Path, limit: int) -> MemoryGroup:
    control = parent / "cgroup.subtree_control"
    if control.exists() and "memory" not in control.read_text().split():
        raise OSError("does not pass the memory controller on to its children")
    folder = Path(tempfile.mkdtemp(prefix="accel-limit-", dir=parent))
    try:
        return MemoryGroup(folder, limit)
    except BaseException:
        folder.rmdir()
        raise


@contextlib.contextmanager
def group(limit: int) -> Iterator[MemoryGroup]:
    """A new control group with a limit of so many bytes, gone afterwards.

    Raises:
        LimitUnavailableError: none can be made.
    """
    if not sys.platform.startswith("linux"):
        raise LimitUnavailableError(f"there are no control groups on {sys.platform}")
    tried = []
    found = None
    for parent in _parents():
        try:
            found = _make(parent, limit)
        except OSError as error:
            tried.append(f"{parent}: {error}")
        else:
            break
    if found is None:
        raise LimitUnavailableError(
            "no control group for memory can be made here: "
            + ("; ".join(tried) or "there is no such hierarchy")
        )
    try:
        yield found
    finally:
        found.remove()


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    limit: int,
    environ: dict[str, str] | None = None,
    timeout: float | None = None,
) -> Result:
    """Run a command in a control group of its own.

    Args:
        command: program and arguments.
        limit: bytes of memory and page cache.
        environ: added to this process's environment.
        timeout: seconds.

    Raises:
        LimitUnavailableError: no control group can be made.
    """
    with group(limit) as limited:
        # Isolated and without site: the interpreter that joins the group takes little memory itself.
        join = [sys.executable, "-I", "-S", "-c", _JOIN, str(limited.folder / "cgroup.procs")]
        done = subprocess.run(
            [*join, *map(os.fspath, command)],
            capture_output=True,
            text=True,
            env={**os.environ, **(environ or {})},
            timeout=timeout,
        )
        return Result(done.returncode, done.stdout, done.stderr, limited.peak, limited.kills > 0)


def call(
    function: Callable[..., Any], *args: Any, limit: int, timeout: float | None = None, **kwargs: Any
) -> Result:
    """Call a function in a fresh interpreter, in a control group of its own; its answer is the result's ``value``.

    Raises:
        LimitUnavailableError: no control group can be made.
        LimitedCallError: the function raised, or its process was killed.
    """
    import pickle

    import cloudpickle

    module = sys.modules[function.__module__]
    with contextlib.suppress(ValueError):
        cloudpickle.register_pickle_by_value(module)
    with tempfile.TemporaryDirectory(prefix="accel-limit-") as folder:
        asked, answered = Path(folder) / "call", Path(folder) / "answer"
        with open(asked, "wb") as file:
            pickle.dump(sys.path, file)
            cloudpickle.dump((function, args, kwargs), file)
        command = [sys.executable, "-c", _ANSWER, asked, answered]
        result = run(command, limit=limit, timeout=timeout)
        if not answered.exists():
            why = (
                "it was killed because it reached the limit"
                if result.killed
                else "it ended without an answer"
            )
            raise LimitedCallError(
                f"{why} (exit code {result.returncode}, {limit} bytes allowed)\n{result.stderr}"
            )
        with open(answered, "rb") as file:
            succeeded, value = pickle.load(file)
    if not succeeded:
        raise LimitedCallError(value)
    return Result(result.returncode, result.stdout, result.stderr, result.peak, result.killed, value)


def why_not() -> str | None:
    """Why there can be no limit here; ``None`` if there can. For skips, which must say it."""
    try:
        with group(1 << 30):
            return None
    except LimitUnavailableError as error:
        return str(error)
