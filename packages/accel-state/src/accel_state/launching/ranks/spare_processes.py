"""Spare processes of one machine: interpreters that have loaded torch and replace ranks at a restart."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_state.launching.plan import ProcessSpec
from accel_state.launching.ranks.processes import CommandProcess, start_command
from accel_state.launching.target import Target

__all__ = ["SparePool"]

_PROBE = 20.0
"""Seconds in which a spare must have shown that its device computes."""


@dataclass(slots=True)
class _Spare:
    process: CommandProcess
    control: socket.socket
    ready: bool = False

    def answer(self, seconds: float) -> str | None:
        """The fault that it reports, empty for none; None: nothing yet.

        Raises:
            EOFError: it has ended.
        """
        if not select.select([self.control], [], [], seconds)[0]:
            return None
        text = b""
        while not text.endswith(b"\n"):
            part = self.control.recv(1 << 16)
            if not part:
                raise EOFError("it has ended")
            text += part
        return str(json.loads(text)["fault"])

    def end(self) -> None:
        self.control.close()
        self.process.kill()
        for _, pipe in self.process.pipes:
            pipe.close()
        until = time.monotonic() + 5.0
        while self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)


class SparePool:
    """Spare processes, warmed up while the ranks run.

    Args:
        size: how many are kept.
        python: their interpreter.
        target: the script or module that they will run.
        cpu: ranks compute on the CPU.
    """

    def __init__(self, size: int, python: str, target: Target, *, cpu: bool) -> None:
        self._size = size
        self._python = python
        self._target = target
        self._cpu = cpu
        self._spares: list[_Spare] = []
        self.faults: list[str] = []
        """Faults of spares that were not used."""

    def fill(self, environ: Mapping[str, str]) -> None:
        """Start the missing spares; they warm up in the background, for seconds.

        Args:
            environ: the environment of ranks; what differs between ranks is given to a spare when it is taken.
        """
        while len(self._spares) < self._size:
            ours, theirs = socket.socketpair()
            with theirs:
                kind = "cpu" if self._cpu else "device"
                number = theirs.fileno()
                argv = (
                    self._python,
                    "-m",
                    "accel_state.launching.ranks.worker",
                    "--spare",
                    str(number),
                    kind,
                )
                process = start_command(
                    -1,
                    argv,
                    environ,
                    capture=True,
                    reads_input=True,
                    on_parent_death=signal.SIGKILL,
                    keep_open=(number,),
                )
            self._spares.append(_Spare(process, ours))

    def take(
        self, specs: Sequence[ProcessSpec], environments: Sequence[Mapping[str, str]]
    ) -> dict[int, CommandProcess]:
        """Take healthy, warmed-up spares for the ranks of a restart, as far as they suffice.

        Args:
            specs: the ranks.
            environments: their complete environments.

        Returns:
            the processes by rank; the other ranks need new ones.
        """
        self._look()
        chosen: list[tuple[ProcessSpec, _Spare]] = []
        ready = [spare for spare in self._spares if spare.ready]
        for index, (spec, environ, spare) in enumerate(zip(specs, environments, ready, strict=False)):
            task = {
                "environment": dict(environ),
                "target": [self._target.kind, self._target.name, *self._target.args],
                "cpus": sorted(spec.cpus),
                "reads_input": index == 0,
            }
            self._spares.remove(spare)
            with contextlib.suppress(OSError):  # it has ended; its answer has the reason
                spare.control.sendall(json.dumps(task).encode() + b"\n")
            chosen.append((spec, spare))
        taken = {}
        until = time.monotonic() + _PROBE
        for spec, spare in chosen:
            if self._is_healthy(spare, max(0.0, until - time.monotonic())):
                spare.control.close()
                spare.process.rank = spec.rank
                taken[spec.rank] = spare.process
            else:
                spare.end()
        return taken

    def close(self) -> None:
        """End the spares."""
        while self._spares:
            self._spares.pop().end()

    def _look(self) -> None:
        """Note which spares have become ready, and end those with a fault."""
        for spare in list(self._spares):
            try:
                fault = None if spare.ready else spare.answer(0.0)
            except EOFError as error:
                fault = str(error)
            if fault:
                self.faults.append(fault)
                self._spares.remove(spare)
                spare.end()
            elif fault is not None:
                spare.ready = True

    def _is_healthy(self, spare: _Spare, seconds: float) -> bool:
        try:
            fault = spare.answer(seconds)
        except (EOFError, OSError) as error:
            fault = str(error)
        if fault is None:
            fault = f"its device did not answer within {_PROBE:g} s"
        if fault:
            self.faults.append(fault)
        return not fault
