"""The process that has loaded torch and forks the runs of a proof: loading it takes longer than most runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accel_state import environment
from accel_state.errors import LaunchError

__all__ = ["RunServer", "main"]


class RunServer:
    """That process, seen from the proof; a context, at whose end it is gone with all that it has forked.

    Args:
        environ: what it inherits.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        argv = (sys.executable, "-m", "accel_cli.proof.server")
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )

    def run(self, words: Sequence[str], ranks: int, environ: Mapping[str, str], output: Path) -> int:
        """Run `accel_cli.proof.child` once.

        Args:
            words: its arguments.
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


def main() -> None:
    """Fork one process for each line of standard input, and write its exit code."""
    from accel_cli.proof.child import main as run_script
    from accel_state.launching.notebook import notebook_launcher
    from accel_train import Accelerator  # noqa: F401 - scripts need it

    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if not child:
            _become(task)
            notebook_launcher(run_script, (task["words"],), num_processes=task["ranks"])
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(task: Mapping[str, Any]) -> None:
    """Take streams, environment and path of a run."""
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT, 0o666)
    for descriptor, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, stream)
    environment.replace(task["environment"])
    more = [
        part for part in task["environment"].get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path
    ]
    sys.path[1:1] = more


if __name__ == "__main__":
    main()
