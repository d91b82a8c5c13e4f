"""The checks of ``accel doctor``: each judges facts about a machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_cli.machine import GATHERED, PACKAGES, Machine
from accel_state.clusters.alone import check_shell
from accel_state.clusters.schedulers import find_allocation
from accel_state.constants import OLDEST_TORCH
from accel_state.errors import ConfigError
from accel_state.installing import INSTALL

__all__ = ["CHECKS", "Finding", "examine_here"]

_GB = 10**9
_FIRST_DAY = 1760486400
"""2025-10-15, when torch 2.9 appeared: no right clock shows less where it is installed."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: its subject.
        status: ``ok``, ``warning``, or ``problem``.
        found: the facts.
        advice: the expected state and the next step; empty if it is ok.
    """

    topic: str
    status: str
    found: str
    advice: str = ""


def _versions(machine: Machine) -> Iterator[Finding]:
    series = {
        name: version.rsplit(".", 1)[0] for name, version in machine.versions.items() if name in PACKAGES
    }
    text = ", ".join(f"{name} {machine.versions[name]}" for name in PACKAGES if name in machine.versions)
    if len(set(series.values())) > 1:
        advice = f"their release series must be the same; {INSTALL}, installs all of one"
        yield Finding("packages", "problem", text, advice)
    else:
        yield Finding("packages", "ok", text)
    torch = machine.versions.get("torch", "")
    if torch and tuple(map(int, torch.split("+")[0].split(".")[:2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield Finding("torch", "problem", torch, f"{needed} or newer is needed: pip install --upgrade torch")
    else:
        yield Finding(
            "torch",
            "ok",
            f"{torch}, built for {machine.torch_build}",
        )


def _devices(machine: Machine) -> Iterator[Finding]:
    there, usable = machine.accelerator_files, machine.usable
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if there and not usable and machine.torch_build == "the CPU":
        yield Finding(
            "accelerators", "problem", f"{there} NVIDIA devices, but torch is built for the CPU",
            "install a build of torch for CUDA: https://pytorch.org/get-started",
        )  # fmt: skip
    elif there and not usable:
        reason = (
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
            if hidden is not None
            else f"driver {machine.driver or 'unknown'}"
        )
        yield Finding(
            "accelerators", "problem", f"{there} NVIDIA devices, and torch can use none ({reason})",
            f"the driver must support {machine.torch_build}; nvidia-smi shows the newest that it supports",
        )  # fmt: skip
    elif usable and usable < there:
        yield Finding("accelerators", "ok", f"{usable} of {there}, by CUDA_VISIBLE_DEVICES={hidden}")
    else:
        yield Finding("accelerators", "ok", f"{usable}" if usable else "none; processes compute on the CPU")


def _processors(machine: Machine) -> Iterator[Finding]:
    quota = machine.cpu_quota
    text = f"{machine.cpus} usable" + (
        f", {quota:g} by the limit of the container" if quota is not None else ""
    )
    threads = machine.environ.get("OMP_NUM_THREADS", "")
    if quota is not None and quota < machine.cpus:
        yield Finding(
            "CPUs", "warning", text,
            f"libraries start {machine.cpus} threads, which share {quota:g} CPUs: set "
            f"OMP_NUM_THREADS={max(1, int(quota))}, or pass --num_cpu_threads_per_process",
        )  # fmt: skip
    elif threads.isdecimal() and int(threads) > machine.cpus:
        yield Finding("CPUs", "warning", text, f"OMP_NUM_THREADS={threads} is more than that; unset it")
    else:
        yield Finding("CPUs", "ok", text)
    limit = machine.memory_limit
    found = f"{machine.memory / _GB:.1f} GB"
    if limit is not None and limit < machine.memory:
        found += f", {limit / _GB:.1f} GB by the limit of the container: a process that exceeds it is killed"
    yield Finding("memory", "ok", found)


def _limits(machine: Machine) -> Iterator[Finding]:
    shared, free = machine.shared_memory, machine.shared_free
    if shared is not None and free < _GB:
        found = f"/dev/shm has {shared / 10**6:.0f} MB, {free / 10**6:.0f} MB free"
        advice = "data loader workers pass batches through it: "
        if shared < _GB:
            advice += (
                "start the container with --shm-size=8g or --ipc=host, in Kubernetes mount an emptyDir with medium: "
                "Memory at /dev/shm, or use num_workers=0"
            )
        else:
            advice += "files of programs that have ended may fill it; remove those that no process has open"
        yield Finding("shared memory", "problem" if shared < _GB else "warning", found, advice)
    elif shared is not None:
        yield Finding("shared memory", "ok", f"/dev/shm has {shared / _GB:.1f} GB")
    files = machine.open_files
    if files is not None and 0 <= files < 4096:
        yield Finding(
            "open files", "warning", f"at most {files}",
            "workers and connections of many processes need more: ulimit -n 65536",
        )  # fmt: skip
    elif files is not None:
        yield Finding("open files", "ok", f"at most {files}" if files >= 0 else "no limit")


def _network(machine: Machine) -> Iterator[Finding]:
    name, addresses = machine.host, machine.addresses
    outside = [address for address in addresses if not address.startswith(("127.", "::1"))]
    if not addresses:
        yield Finding(
            "host name", "warning", f"{name} has no address",
            "a run over several machines finds them by their names, and each start waits for the name server: add it "
            "to /etc/hosts",
        )  # fmt: skip
    elif not outside:
        yield Finding(
            "host name", "warning", f"{name} is {', '.join(addresses)}",
            "other machines cannot reach that: for a run over several, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "to the interface of the network, or give the name its address in /etc/hosts",
        )  # fmt: skip
    else:
        yield Finding("host name", "ok", f"{name} is {', '.join(addresses)}")
    if machine.port_free:
        yield Finding("port 29500", "ok", "free")
    else:
        yield Finding(
            "port 29500", "warning", "in use",
            "accel launch chooses a free port on one machine; for several pass another --main_process_port",
        )  # fmt: skip


def _cluster(machine: Machine) -> Iterator[Finding]:
    try:
        found = find_allocation(machine.environ, machine.environ.get("ACCEL_CLUSTER") or "auto")
        if found is None and machine.environ.get("ACCEL_CLUSTER") != "none":
            check_shell(machine.environ)
    except ConfigError as error:
        yield Finding("cluster", "warning", str(error), "accel launch stops with this error")
    else:
        yield Finding("cluster", "ok", "none; one machine" if found is None else found.summary())


def _clock(machine: Machine) -> Iterator[Finding]:
    if not machine.clock:
        return
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(machine.clock))
    if machine.clock < _FIRST_DAY:
        yield Finding(
            "clock", "problem", shown,
            "it is years behind, so certificates are refused and checkpoints sort wrongly: timedatectl set-ntp true",
        )  # fmt: skip
    else:
        states = {True: ", synchronized", False: ", not synchronized by this kernel", None: ""}
        yield Finding("clock", "ok", f"{shown}{states[machine.clock_synchronized]}")


def _disk(machine: Machine) -> Iterator[Finding]:
    free = machine.disk_free
    speed = ""
    if machine.disk_write is not None and machine.disk_read is not None:
        speed = f", writes {machine.disk_write / 10**6:.0f} MB/s, reads {machine.disk_read / 10**6:.0f} MB/s"
    text = f"{machine.folder}: {free / _GB:.1f} GB free{speed}"
    if free < 5 * _GB:
        yield Finding(
            "disk", "problem", text, "a checkpoint of a model and its optimizer takes 12 bytes per parameter"
        )
    elif machine.disk_write is not None and machine.disk_write < 50 * 10**6:
        yield Finding(
            "disk", "warning", text,
            f"a checkpoint of 1 billion parameters takes {12 * _GB / machine.disk_write:.0f} s there; save "
            "asynchronously (async_save), or to a local disk",
        )  # fmt: skip
    else:
        yield Finding("disk", "ok", text)
    if machine.temporary_free < _GB:
        yield Finding(
            "temporary files",
            "warning",
            f"{machine.temporary_free / 10**6:.0f} MB free",
            "set TMPDIR to a larger folder",
        )


def _variables(machine: Machine) -> Iterator[Finding]:
    from accel_state.config.roots import complete_root
    from accel_state.config.schema import schema_of, variables_of
    from accel_state.config.unknown_variables import unknown_variables
    from accel_state.messages import HIDDEN, is_secret

    wrong = unknown_variables(machine.environ)
    for name, near in wrong.items():
        hint = f"did you mean {' or '.join(near)}?" if near else "nothing reads it; unset it"
        yield Finding(
            "variables", "warning", f"{name}={HIDDEN if is_secret(name) else machine.environ[name]}", hint
        )
    known = {name for bound in schema_of(complete_root()).options for name in variables_of(bound)}
    given = [name for name in sorted(machine.environ) if name in known and name.startswith("ACCELERATE_")]
    if not wrong:
        yield Finding("variables", "ok", ", ".join(given) or "none of this library is set")


CHECKS: tuple[tuple[Callable[[Machine], Iterator[Finding]], str], ...] = (
    (_versions, "loading torch"),
    (_devices, "counting devices"),
    (_processors, "reading the limits of this machine"),
    (_limits, "reading the limits of this machine"),
    (_clock, "reading the limits of this machine"),
    (_network, "asking the name server for this machine"),
    (_disk, "measuring the disk"),
    (_cluster, ""),
    (_variables, ""),
)
"""The checks in the order in which they are shown, each with the part of ``GATHERED`` that it needs; empty: none."""


def examine_here(folder: Path, environ: Mapping[str, str], tell: Callable[[str], None]) -> Iterator[Finding]:
    """Look at this machine, and yield each finding as soon as its facts are known.

    Args:
        folder: the folder for checkpoints; it must exist.
        environ: environment variables.
        tell: receives the next step.

    Raises:
        OSError: the folder cannot be written.
    """
    facts: dict[str, Any] = {"environ": environ}
    gathered: set[str] = set()
    for check, part in CHECKS:
        if part and part not in gathered:
            gathered.add(part)
            tell(part)
            facts |= GATHERED[part](folder)
        yield from check(Machine(**facts))
