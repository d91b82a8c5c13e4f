"""One rank of the small world of ``accel doctor``; it reports to the coordinator through the store."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_cli.doctor.collectives import COLLECTIVES, check_collective
from accel_cli.doctor.links import Link, measure_link, rounds
from accel_state import __version__
from accel_state.messages import first_line

__all__ = ["RankJob", "main"]

_CLOCK_ROUNDS = 5
_COMPUTE = 512


@dataclasses.dataclass(frozen=True)
class RankJob:
    """The place and the settings of a rank.

    Attributes:
        rank, size, local_rank: its place.
        address, port: where the coordinator's store listens.
        timeout: seconds that it waits for others.
        cpu: use the CPU.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    timeout: float
    cpu: bool


def main(arguments: list[str]) -> int:
    """Take part in the world.

    Args:
        arguments: a ``RankJob`` as JSON.

    Returns:
        0; 1 if something failed, which the store records; 3 if the store does not answer.
    """
    job = RankJob(**json.loads(arguments[0]))
    wait = timedelta(seconds=job.timeout)
    try:
        store = dist.TCPStore(job.address, job.port, None, False, wait)  # type: ignore[attr-defined]
    except dist.DistError:
        return 3  # the doctor of this machine reports it, once for all its ranks
    results: dict[str, Any] = {"rank": job.rank, "collectives": {}, "links": []}
    step = ["joining"]

    def enter(name: str) -> None:
        step[0] = name
        store.set(f"at/{job.rank}", name)
        store.add("steps", 1)

    try:
        _take_part(job, store, wait, results, enter)
    except (RuntimeError, OSError) as error:
        results["error"] = f"{step[0]}: {first_line(error)[:200]}"
    try:
        store.set(f"result/{job.rank}", json.dumps(results))
        store.add("ended", 1)
        store.wait(["verdict"], wait)
    except dist.DistError:
        return 1  # the coordinator has ended, and has reported why
    if dist.is_initialized():
        dist.destroy_process_group()
    return int("error" in results)


def _take_part(job: RankJob, store: Any, wait: timedelta, results: dict[str, Any], enter: Any) -> None:
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": torch.__version__,
        "accel": __version__,
        "python": platform.python_version(),
    }
    store.set(f"arrived/{job.rank}", json.dumps(facts))
    store.add("arrived", 1)
    store.wait(["start"], wait + timedelta(seconds=10))
    _tell_time(job, store)
    device = _device(job)
    results["device"] = str(device)
    results["compute"] = _compute(device)
    enter("connecting all ranks")
    backend = dist.get_default_backend_for_device(device)
    results["backend"] = backend
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=group, rank=job.rank, world_size=job.size, timeout=wait)
    for name in COLLECTIVES:
        enter(name)
        seconds, problem = check_collective(name, device)
        results["collectives"][name] = {"seconds": seconds, "problem": problem}
    for number, pairs in enumerate(rounds(job.size)):
        enter(f"links, round {number + 1}")
        for pair in pairs:
            if job.rank in pair:
                link: Link = measure_link(pair, device)
                if job.rank == pair[0]:
                    results["links"].append(dataclasses.asdict(link))
    enter("the end")


def _tell_time(job: RankJob, store: Any) -> None:
    """Answer the coordinator's questions for the time of this machine."""
    if job.local_rank != 0:
        return
    for number in range(_CLOCK_ROUNDS):
        store.wait([f"clock/{job.rank}/{number}/ask"])
        store.set(f"clock/{job.rank}/{number}/answer", repr(time.time()))


def _device(job: RankJob) -> torch.device:
    if job.cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(job.local_rank)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, job.local_rank)


def _compute(device: torch.device) -> float:
    """Seconds of a product of matrices on this rank, the fastest of five: a rank alone, before it waits for others."""
    left = torch.ones(_COMPUTE, _COMPUTE, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        float((left @ left)[0, 0])
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
