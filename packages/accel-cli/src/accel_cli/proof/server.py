"""The process that forks the runs of a proof (`accel_cli.proof.child`), seen from the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from accel_state.errors import LaunchError

__all__ = ["RunServer", "run_server"]

# Takes KIND, NAME and arguments of a script, where KIND is ``script`` or ``module``; how many ranks; their environment;
# and a file for both of their output streams. Returns the exit code, negative for a signal.
RunServer = Callable[[Sequence[str], int, Mapping[str, str], Path], int]


@contextmanager
def run_server(environ: Mapping[str, str]) -> Iterator[RunServer]:
    """Start that process, and give what runs a script once; at the end it is gone with all that it has forked.

    Args:
        environ: what it inherits.

    Raises:
        LaunchError: the process has ended before.
    """
    process = subprocess.Popen(
        (sys.executable, "-m", "accel_cli.proof.child"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environ, "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
    )
    sent, answers = process.stdin, process.stdout
    assert sent is not None, "opened above"
    assert answers is not None, "opened above"

    def run(words: Sequence[str], ranks: int, environment: Mapping[str, str], output: Path) -> int:
        task = {"words": words, "ranks": ranks, "environment": dict(environment), "output": str(output)}
        sent.write(json.dumps(task) + "\n")
        sent.flush()
        answer = answers.readline()
        if not answer:
            raise LaunchError(f"the process that runs the script ended with code {process.wait()}")
        return int(answer)

    try:
        yield run
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # ranks notice
        process.communicate()
