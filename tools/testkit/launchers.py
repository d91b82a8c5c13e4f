"""The launcher as a process of its own, and what it leaves running."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil

__all__ = ["Launcher"]


class Launcher:
    """Starts the launcher on scripts, and finds what it left running.

    Args:
        folder: where scripts are written and run.
        driver: the program that launches; it takes the flags of ``accel launch``.
    """

    def __init__(self, folder: Path, driver: Path):
        self.folder = folder
        self.driver = driver
        self.marker = uuid.uuid4().hex
        self.environ = {
            **os.environ,
            "ACCEL_TEST_MARKER": self.marker,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def script(self, body: str) -> str:
        path = self.folder / f"script_{uuid.uuid4().hex[:6]}.py"
        path.write_text(
            "import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n" + textwrap.dedent(body)
        )
        return str(path)

    def start(self, *words: str, **options) -> subprocess.Popen:
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        } | options
        return subprocess.Popen(
            [sys.executable, str(self.driver), "--cpu", *words],
            env=self.environ,
            cwd=self.folder,
            text=True,
            **options,
        )

    def run(self, *words: str, timeout: float = 30) -> subprocess.CompletedProcess:
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def leftovers(self, patience: float = 3.0) -> list[str]:
        until = time.monotonic() + patience
        while (found := self._marked()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _marked(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ACCEL_TEST_MARKER") == self.marker and process.status() != "zombie":
                    found.append(f"{process.pid} {process.cmdline()}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found
