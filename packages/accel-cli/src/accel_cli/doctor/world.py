"""The small world of ``accel doctor``: starts this machine's ranks, waits for all of them, and judges their results.

The doctor of machine 0 hosts the store and is no rank itself, so that it can name any rank that dies, stops or never
arrives. The ranks of a world start as those of ``accel launch`` do.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

from accel_cli.doctor.checks import Finding
from accel_cli.doctor.rank import RankJob
from accel_cli.doctor.verdict import judge
from accel_state.clusters.base import is_loopback
from accel_state.communication.signed_store import loopback_store
from accel_state.config.launch import LaunchConfig
from accel_state.errors import LaunchError
from accel_state.launching.plan import World, plan_rank
from accel_state.launching.ports import reserve_port
from accel_state.launching.ranks.processes import CommandProcess, start_command

__all__ = ["RankPlace", "examine_world"]

_POLL = 0.05
_GRACE = 4.0
"""Seconds that ranks get to report a failure after the first of them did, and after a collective's own time-out."""
_CLOCK_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where this doctor's ranks are.

    Attributes:
        world: number and distribution of the ranks.
        first: rank of the first that this doctor starts.
        count: how many it starts.
        address, port: where the doctor of machine 0 listens; port 0: any.
    """

    world: World
    first: int
    count: int
    address: str
    port: int


def examine_world(
    config: LaunchConfig,
    place: RankPlace,
    environ: Mapping[str, str],
    timeout: float,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Finding], dict[str, Any]]:
    """Run the world.

    Args:
        config: the resolved configuration.
        place: where this doctor's ranks are.
        environ: the environment that ranks inherit.
        timeout: seconds that ranks wait for others.
        tell: receives progress messages.

    Returns:
        Findings, and everything that was measured, for JSON. Only the doctor of machine 0 has measurements.

    Raises:
        PortError: the port is in use.
        LaunchError: a rank could not be started.
    """
    store, port = _host(place, timeout) if place.first == 0 else (None, place.port)
    started: list[CommandProcess] = []
    ranks = f"{place.count} rank{'s' if place.count > 1 else ''}"
    tell(f"starting {ranks}; they load torch, and then wait up to {timeout:g} s for all {place.world.size}")
    try:
        for local in range(place.count):
            # One by one: if a start fails, those before it are ended.
            started.append(_start(config, place, port, local, environ, timeout))  # noqa: PERF401
        if store is None:
            return _follow(started, place), {}
        return _Coordinator(store, place, {process.rank: process for process in started}, timeout, tell).run()
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        _let_end(started)


def _host(place: RankPlace, timeout: float) -> tuple[Any, int]:
    import torch.distributed as dist

    wait = timedelta(seconds=timeout)
    with reserve_port(place.port) as port:
        own = None
        if place.world.machines == 1 and is_loopback(place.address):
            own = loopback_store(place.address, port, None, wait)
        store = own or dist.TCPStore(  # type: ignore[attr-defined]
            place.address, port, None, True, wait, wait_for_workers=False
        )
        return store, port


def _start(
    config: LaunchConfig, place: RankPlace, port: int, local: int, environ: Mapping[str, str], timeout: float
) -> CommandProcess:
    rank = place.first + local
    job = RankJob(
        rank, place.world.size, rank % place.world.local_size, place.address, port, timeout, place.world.cpu
    )
    words = json.dumps(dataclasses.asdict(job))
    spec = plan_rank(
        config, (sys.executable, "-m", "accel_cli.doctor.rank", words), place.world, rank, environ
    )
    variables = {"OMP_NUM_THREADS": "1"} | spec.environment(environ)
    try:
        return start_command(
            rank, spec.argv, variables, capture=False, reads_input=False, on_parent_death=signal.SIGKILL
        )
    except OSError as error:
        raise LaunchError(f"{spec.argv[0]} could not be started: {error}") from error


def _follow(started: list[CommandProcess], place: RankPlace) -> list[Finding]:
    """Findings of a doctor on another machine, whose ranks report to machine 0."""
    while any(process.poll() is None for process in started):
        time.sleep(_POLL)
    codes = {process.rank: process.poll() for process in started}
    where = f"{place.address}:{place.port}"
    if 3 in codes.values():
        return [
            Finding(
                "world", "problem", f"machine 0 did not answer at {where}",
                "start accel doctor with --machine_rank 0 there; check --main_process_ip, --main_process_port and the "
                "firewall",
            )
        ]  # fmt: skip
    failed = [rank for rank, code in codes.items() if code]
    if failed:
        text = f"failed on rank {', '.join(map(str, failed))} of this machine"
        return [Finding("world", "problem", text, f"the doctor of machine 0 ({place.address}) says why")]
    text = f"ranks {min(codes)} to {max(codes)} took part; machine 0 ({place.address}) has the report"
    return [Finding("world", "ok", text)]


@dataclasses.dataclass
class _Coordinator:
    """Waits for the ranks, and collects their reports."""

    store: Any
    place: RankPlace
    local: Mapping[int, CommandProcess]
    timeout: float
    tell: Callable[[str], None]

    @property
    def size(self) -> int:
        return self.place.world.size

    def run(self) -> tuple[list[Finding], dict[str, Any]]:
        """Findings and measurements."""
        arrived = self._meet()
        missing = [rank for rank in range(self.size) if rank not in arrived]
        if missing:
            return [self._missing(missing, arrived)], {"arrived": arrived, "missing": missing}
        self.tell("all ranks have arrived; checking their clocks, collectives and links")
        self.store.set("start", "")
        clocks = self._clocks()
        # Also after a rank that does not report its time: the others report that after their own timeout.
        silent = self._wait_for_results()
        results = self._read("result")
        findings = judge(arrived, results, clocks or {})
        for rank in silent:
            findings.insert(0, self._lost(rank, arrived))
        self.store.set("verdict", "")
        if not silent:
            _let_end(self.local.values())
        measured = {
            "ranks": arrived,
            "clock_offsets": clocks or {},
            "results": results,
            "silent": silent,
        }
        return findings, measured

    def _meet(self) -> dict[int, dict[str, Any]]:
        until = time.monotonic() + self.timeout
        while self.store.add("arrived", 0) < self.size and time.monotonic() < until:
            if self._dead():
                time.sleep(1)  # others that were quick enough are not blamed
                break
            time.sleep(_POLL)
        return self._read("arrived")

    def _clocks(self) -> dict[str, float] | None:
        """Seconds by which each machine's clock is ahead of machine 0's; None: a rank did not answer."""
        import torch.distributed as dist

        found: dict[str, float] = {}
        for rank in range(0, self.size, self.place.world.local_size):
            best = float("inf")
            for number in range(_CLOCK_ROUNDS):
                key = f"clock/{rank}/{number}"
                began = time.time()
                self.store.set(f"{key}/ask", "")
                try:
                    answer = float(self.store.get(f"{key}/answer"))
                except dist.DistError:
                    return None
                took = time.time() - began
                if took < best:
                    best, found[str(rank)] = took, answer - began - took / 2
        return found

    def _wait_for_results(self) -> list[int]:
        """Wait until all ranks have ended; returns those that do not answer any more."""
        moved, seen = time.monotonic(), -1
        while (ended := self.store.add("ended", 0)) < self.size:
            steps = self.store.add("steps", 0) + ended
            if steps != seen:
                moved, seen = time.monotonic(), steps
            patience = _GRACE if self._dead() else self.timeout + _GRACE
            if time.monotonic() - moved > patience:
                break
            time.sleep(_POLL)
        return sorted(self._silent("result"))

    def _silent(self, kind: str) -> set[int]:
        return set(range(self.size)) - self._read(kind).keys()

    def _dead(self) -> list[int]:
        return [rank for rank, process in self.local.items() if process.poll() not in (None, 0, 1)]

    def _read(self, kind: str) -> dict[int, dict[str, Any]]:
        keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
        return {
            rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])
        }

    def _missing(self, missing: list[int], arrived: Mapping[int, Mapping[str, Any]]) -> Finding:
        local = self.place.world.local_size
        machines = sorted({rank // local for rank in missing})
        whole = [m for m in machines if all(rank in missing for rank in range(m * local, (m + 1) * local))]
        own = [f"rank {rank} {state}" for rank in missing if (state := self._state(rank))]
        text = f"rank {', '.join(map(str, missing))} of {self.size} did not arrive within {self.timeout:g} s"
        if self.place.world.machines > 1 and whole:
            text += f": machine {', '.join(map(str, whole))} of {self.place.world.machines} is missing"
        hosts = sorted({str(facts["host"]) for facts in arrived.values()})
        text += f" ({'; '.join(own)})" if own else ""
        advice = f"arrived: {', '.join(hosts) or 'nobody'}. Start accel doctor on each machine with its "
        advice += (
            f"--machine_rank, and check that {self.place.address} can be reached from there (route, firewall)"
        )
        return Finding("world", "problem", text, advice if not own else "the error of that rank is above")

    def _lost(self, rank: int, arrived: Mapping[int, Mapping[str, Any]]) -> Finding:
        key = f"at/{rank}"
        step = self.store.get(key).decode() if self.store.check([key]) else "the start"
        state = self._state(rank) or "does not answer"
        return Finding(
            "world", "problem", f"rank {rank} on {arrived[rank]['host']} {state}, last seen at: {step}",
            f"look at process {arrived[rank]['pid']} there, at the machine's log (dmesg), and at its network",
        )  # fmt: skip

    def _state(self, rank: int) -> str:
        """The state of a rank of this machine that has ended or stopped; empty if it runs, or is on another machine."""
        import psutil

        process = self.local.get(rank)
        if process is None:
            return ""
        code = process.poll()
        if code is not None:
            return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            return "is stopped (SIGSTOP)"
        return ""


def _let_end(started: Collection[CommandProcess]) -> None:
    """Wait until the ranks have ended, for a few seconds."""
    until = time.monotonic() + 5
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        time.sleep(_POLL)
