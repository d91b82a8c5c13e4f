"""Helpers of ``accelerate.test_utils``, besides its marks, for tests of Accelerate's clients."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from accel_cli.as_accelerate.extras.backend import device_count
from accel_state import PartialState, gather
from accel_state.environment import get
from accel_train.loop.state import AcceleratorState

# Programs


def get_launch_command(**kwargs: Any) -> list[str]:
    """The start of a command line that launches a script in which ``import accelerate`` is answered.

    Args:
        **kwargs: flags by name; True stands for the flag alone, False and None for none.
    """
    command = [sys.executable, "-m", "accel_cli", "launch", "--as_accelerate"]
    for name, value in kwargs.items():
        if isinstance(value, bool) or value is None:
            command += [f"--{name}"] * bool(value)
        else:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


@dataclass(frozen=True)
class _Output:
    """The output of a program, in lines."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _Output:
    """Run a program, and forward its output as it comes.

    Args:
        cmd: the program and its arguments.
        env: its environment; None: that of this process.
        stdin: as `subprocess.Popen` takes it.
        timeout: seconds after which it is killed.
        quiet: forward nothing.
        echo: print the command first.

    Raises:
        RuntimeError: it failed, or took longer; the message has its standard error.
    """
    words = [str(part) for part in cmd]
    line = " ".join(words)
    if echo:
        print("\nRunning:", line)
    process = subprocess.Popen(
        words, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out: list[str] = []
    err: list[str] = []
    copiers = [
        threading.Thread(target=_copy, args=(process.stdout, out, None if quiet else sys.stdout)),
        threading.Thread(target=_copy, args=(process.stderr, err, None if quiet else sys.stderr)),
    ]
    for copier in copiers:
        copier.start()
    try:
        code = process.wait(timeout)
        ended = f"failed with returncode {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        code, ended = process.wait(), f"was killed after {timeout} s"
    for copier in copiers:
        copier.join()
    if code:
        text = "\n".join(err)
        raise RuntimeError(f"'{line}' {ended}\n\nThe combined stderr from workers follows:\n{text}")
    return _Output(code, out, err)


def _copy(source: IO[str] | None, lines: list[str], target: IO[str] | None) -> None:
    assert source is not None, "a pipe"
    for line in source:
        lines.append(line.rstrip("\n"))
        if target is not None:
            target.write(line)


class SubprocessCallException(Exception):  # noqa: N818
    """A program failed; the message has its output."""


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a program; returns its output if ``return_stdout`` is set.

    Raises:
        SubprocessCallException: it failed.
    """
    words = [str(part) for part in command]
    try:
        printed = subprocess.check_output(words, stderr=subprocess.STDOUT, env=env, text=True)
    except subprocess.CalledProcessError as error:
        raise SubprocessCallException(
            f"`{' '.join(words)}` failed with exit code {error.returncode}:\n\n{error.output}"
        ) from error
    return printed if return_stdout else None


def pytest_xdist_worker_id() -> int:
    """The number of this worker of pytest-xdist; 0 without it."""
    return int((get("PYTEST_XDIST_WORKER", "gw0") or "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """A port that no other worker of pytest-xdist is given."""
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """A path inside the package that answers ``import accelerate``."""
    return Path(__file__).parents[1].joinpath("path", "accelerate", *components)


# Test cases


class TempDirTestCase(unittest.TestCase):
    """Has a folder, `tmpdir`, that is empty for each test, unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove it."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty it."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Forgets the state of the process after each test."""

    def tearDown(self) -> None:
        """Forget it."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)


class MockingTestCase(unittest.TestCase):
    """Ends its mocks after each test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one or several patchers, which end with the test."""
        self.mocks: Iterable[Any] = mocks if isinstance(mocks, tuple | list) else [mocks]
        for item in self.mocks:
            item.start()
            self.addCleanup(item.stop)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Expect an exception of this class, or of a subclass, whose message contains a text."""
    found: BaseException | None = None
    try:
        yield
    except BaseException as error:
        found = error
    if not isinstance(found, exception_class):
        what = "nothing was raised" if found is None else f"got {type(found).__name__}: {found}"
        raise AssertionError(f"expected {exception_class.__name__}, and {what}") from found
    if msg is not None and msg not in str(found):
        raise AssertionError(f"expected {msg!r} in {str(found)!r}") from found


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The output of a call."""
    with mock.patch("sys.stdout", new=io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Whether all ranks hold the same values; collective."""
    here = tensor[None].clone().to(PartialState().device)
    everywhere = gather(here)
    return all(torch.equal(here[0], other) for other in everywhere)


# A regression


class RegressionDataset:
    """`length` points of `y = a * x + b` with noise, as dictionaries of float32 arrays."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + random.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """`a * x + b`; the first call prints the types of a, b and x."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output
        self.first_batch = True

    def forward(self, x: Any = None) -> Any:
        """The values, twice if `double_output`."""
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        found = x * self.a + self.b
        return (found, found) if self.double_output else found
