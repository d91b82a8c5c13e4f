"""The process that forks the runs of a proof (`accel_cli.proof.child`), seen from the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from accel_state.errors import LaunchError

__all__ = ["RunServer"]


class RunServer:
    """That process, seen from the proof; a context, at whose end it is gone with all that it has forked.

    Args:
        environ: what it inherits.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        argv = (sys.executable, "-m", "accel_cli.proof.child")
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )

    def run(self, words: Sequence[str], ranks: int, environ: Mapping[str, str], output: Path) -> int:
        """Run the script once.

        Args:
            words: KIND, NAME and arguments of the script; KIND is ``script`` or ``module``.
            ranks: how many.
            environ: their environment.
            output: file for both of their output streams.

        Returns:
            The exit code, negative for a signal.

        Raises:
            LaunchError: the process has ended.
        """
        task = {"words": words, "ranks": ranks, "environment": dict(environ), "output": str(output)}
        sent, answers = self._process.stdin, self._process.stdout
        assert sent is not None, "opened above"
        assert answers is not None, "opened above"
        sent.write(json.dumps(task) + "\n")
        sent.flush()
        answer = answers.readline()
        if not answer:
            raise LaunchError(f"the process that runs the script ended with code {self._process.wait()}")
        return int(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # ranks notice
        self._process.communicate()
