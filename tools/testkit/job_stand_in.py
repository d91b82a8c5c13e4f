"""Executes a job as its engine would: each container is a process on a host of its own, and the engine's rules decide.

The image is this Python environment, with ``accel`` on PATH. A host is a network namespace with an address of its own,
so a container that is replaced has another address than before, as a pod has. Needs root.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from testkit.hosts import Host, Network

__all__ = ["Container", "Decision", "Ended", "Engine", "StandIn"]

PATIENCE = 180.0


@dataclass(frozen=True)
class Container:
    """What an engine starts on one machine.

    Attributes:
        argv: its command.
        environ: its variables, beside those of the image.
        hostname: its host name.
        names: the names under which other containers find it.
        grace: seconds between SIGTERM and SIGKILL.
        folder: its current folder; None: that of the image.
        mounts: commands that mount its volumes; ``{claims}`` stands for the folder of the volumes.
        shared_memory: size of /dev/shm in bytes, or with a unit of ``mount``.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    hostname: str
    names: Sequence[str] = ()
    grace: float = 30.0
    folder: str | None = None
    mounts: Sequence[Sequence[str]] = ()
    shared_memory: str = "64m"


@dataclass(frozen=True)
class Ended:
    """The end of a container.

    Attributes:
        number: of its machine.
        code: exit code; 128 + n for signal n.
        disrupted: the engine took the machine away, or lost it.
    """

    number: int
    code: int
    disrupted: bool = False


@dataclass(frozen=True)
class Decision:
    """What an engine does when a container has ended.

    Attributes:
        again: machines whose container starts again; those that still run are stopped first.
        end: how the job has ended; empty if it goes on. Containers that still run are stopped.
        why: the engine's reason.
    """

    again: frozenset[int] = frozenset()
    end: Literal["", "done", "failed"] = ""
    why: str = ""


class Engine(Protocol):
    """An engine that has read a job.

    Attributes:
        counted: failures that have been counted against the retries of the job.
        deadline: seconds until the engine ends the job; None: no limit.
    """

    counted: int
    deadline: float | None

    def containers(self) -> Sequence[Container]:
        """One for each machine."""

    def after_exit(self, ended: Ended) -> Decision:
        """What follows from the end of a container."""

    def after_deadline(self) -> Decision:
        """What follows when the time of the job is over."""


@dataclass
class _Running:
    host: Host
    process: subprocess.Popen[str]
    container: Container
    disrupted: bool = False


@dataclass
class StandIn:
    """Runs a job.

    Attributes:
        engine: the engine that has read it.
        network: where its machines are.
        folder: for the logs, the volumes and the image's ``accel``.
        starts: how often each container was started.
        decision: the last decision.
    """

    engine: Engine
    network: Network[Host]
    folder: Path
    starts: dict[int, int] = field(default_factory=dict)
    decision: Decision = field(default_factory=Decision)
    _running: dict[int, _Running] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _began: float = 0.0

    def start(self) -> None:
        """Start all containers."""
        image = self.folder / "image"
        image.mkdir(parents=True)
        (self.folder / "claims").mkdir()
        tool = image / "accel"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m accel_cli "$@"\n')
        tool.chmod(0o755)
        self._began = time.monotonic()
        for number in range(len(self.engine.containers())):
            self._start(number)

    def log(self, number: int) -> str:
        """What the containers of a machine have written."""
        path = self.folder / f"{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, number: int, text: str) -> None:
        """Run the job until a container has written a text."""
        until = time.monotonic() + PATIENCE
        while text not in self.log(number):
            assert self.step(), f"the job has ended ({self.decision}) before {text!r}:\n{self.told()}"
            assert time.monotonic() < until, f"{text!r} did not come:\n{self.told()}"

    def run(self) -> Decision:
        """Run the job to its end."""
        until = time.monotonic() + PATIENCE
        while self.step():
            assert time.monotonic() < until, f"the job goes on:\n{self.told()}"
        return self.decision

    def preempt(self, number: int) -> None:
        """Take a machine away: its container gets SIGTERM and, after its grace period, SIGKILL."""
        running = self._running[number]
        running.disrupted = True
        self._stop([running])

    def lose(self, number: int) -> None:
        """Lose a machine, with all that runs there."""
        running = self._running[number]
        running.disrupted = True
        running.host.die()

    def step(self) -> bool:
        """Look at the containers once, and do what the engine decides; return whether the job goes on."""
        time.sleep(0.1)
        if self.engine.deadline is not None and time.monotonic() - self._began > self.engine.deadline:
            self._do(self.engine.after_deadline())
        for number, running in list(self._running.items()):
            code = running.process.poll()
            if code is None or self.decision.end or self._running.get(number) is not running:
                continue
            del self._running[number]
            code = 128 - code if code < 0 else code
            self._note(number, f"ended with exit code {code}{', disrupted' if running.disrupted else ''}")
            self._do(self.engine.after_exit(Ended(number, code, running.disrupted)))
        return not self.decision.end

    def told(self) -> str:
        """The logs, for messages."""
        return "\n".join(f"--- machine {number}\n{self.log(number)}" for number in self.starts)

    def _do(self, decision: Decision) -> None:
        self.decision = decision
        stopped = (
            self._running
            if decision.end
            else {n: self._running[n] for n in decision.again & {*self._running}}
        )
        self._stop(list(stopped.values()))
        for number in list(stopped):
            code = self._running.pop(number).process.returncode
            self._note(number, f"stopped, with exit code {128 - code if code < 0 else code}: {decision.why}")
        for number in sorted(decision.again):
            self._start(number)

    def _stop(self, those: list[_Running]) -> None:
        for running in those:
            running.process.send_signal(signal.SIGTERM)
        for running in those:
            try:
                running.process.wait(running.container.grace)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()

    def _start(self, number: int) -> None:
        container = self.engine.containers()[number]
        host = self.network.add()
        self._names |= dict.fromkeys(container.names, host.address)
        resolver = self.folder / f"{number}.hosts"
        before = [
            ["mount", "--bind", str(resolver), "/etc/hosts"],
            ["mount", "-t", "tmpfs", "-o", f"size={container.shared_memory}", "tmpfs", "/dev/shm"],
            *([word.format(claims=self.folder / "claims") for word in line] for line in container.mounts),
        ]
        image = {
            "PATH": f"{self.folder / 'image'}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        self.starts[number] = self.starts.get(number, 0) + 1
        self._note(number, f"start {self.starts[number]}")
        resolver.touch()
        with (self.folder / f"{number}.log").open("a") as stream:
            process = host.start(
                container.argv,
                {**image, **container.environ},
                stream.fileno(),
                hostname=container.hostname,
                before=before,
                folder=Path(container.folder or self.folder),
            )
        self._running[number] = _Running(host, process, container)
        self._tell_names()

    def _tell_names(self) -> None:
        """Tell the containers the addresses of all; a host name alone is known to its own container."""
        known = "".join(f"{address} {name}\n" for name, address in self._names.items())
        for number, running in self._running.items():
            own = f"127.0.0.1 localhost\n{running.host.address} {running.container.hostname}\n"
            # In place, because the container has mounted this file.
            (self.folder / f"{number}.hosts").write_text(own + known)

    def _note(self, number: int, text: str) -> None:
        with (self.folder / f"{number}.log").open("a") as stream:
            stream.write(f"stand-in: {text}\n")
