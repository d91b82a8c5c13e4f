"""The CPU cores of each rank, from Linux's description of the machine. Loads no torch.

The modes and their meaning are those of torch (torch/numa/binding.py), which binds only ranks with a GPU; ranks on the
CPU are spread evenly over the NUMA nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_state.errors import ConfigError
from accel_state.host.system import read_cpu_list

__all__ = ["CpuTopology", "cores_of_ranks", "gpu_nodes", "read_cpu_topology"]


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """Logical CPUs that this process may use.

    Attributes:
        nodes: CPUs of each NUMA node, by its number.
        sockets: socket of each CPU.
        cores: the CPUs (hyperthreads) of each physical core, by its first CPU.
        caches: the CPUs of each last-level cache, by its first CPU.
    """

    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    sockets: Mapping[int, int] = field(default_factory=dict)
    cores: Mapping[int, frozenset[int]] = field(default_factory=dict)
    caches: Mapping[int, frozenset[int]] = field(default_factory=dict)


def cores_of_ranks(
    mode: str, ranks: int, topology: CpuTopology, near: Sequence[int] = ()
) -> tuple[frozenset[int], ...]:
    """The CPUs of each rank.

    Args:
        mode: ``node``: all CPUs of the rank's NUMA node. ``socket``: all of the socket with that node. ``exclusive``:
            the node's physical cores divided among its ranks. ``core-complex``: the CPUs of one last-level cache of the
            node, a different one for each of its ranks while there are enough.
        ranks: number of ranks of this machine.
        topology: the CPUs.
        near: NUMA node of each rank's device; empty: the ranks are spread over the nodes.

    Raises:
        ConfigError: the system does not describe its CPUs, or has fewer cores than ranks that need their own.
    """
    numbers = sorted(number for number, cpus in topology.nodes.items() if cpus)
    if not numbers:
        raise ConfigError(
            f"--numa_binding {mode}: this system does not list its CPUs (/sys/devices/system/node); leave it out"
        )
    placed = [
        near[rank] if rank < len(near) else numbers[rank * len(numbers) // ranks] for rank in range(ranks)
    ]
    placed = [node if node in numbers else numbers[0] for node in placed]
    found = []
    for rank, node in enumerate(placed):
        same = [other for other, place in enumerate(placed) if place == node]
        found.append(_cores(mode, topology, node, same.index(rank), len(same)))
    return tuple(found)


def _cores(mode: str, topology: CpuTopology, node: int, index: int, count: int) -> frozenset[int]:
    cpus = topology.nodes[node]
    if mode == "node":
        return cpus
    if mode == "socket":
        sockets = {topology.sockets[cpu] for cpu in cpus}
        everywhere = frozenset().union(*topology.nodes.values())
        return frozenset(cpu for cpu in everywhere if topology.sockets[cpu] in sockets)
    if mode == "core-complex":
        caches = [group & cpus for first, group in sorted(topology.caches.items()) if group & cpus]
        caches.sort(key=len, reverse=True)  # stable: the largest first
        return caches[index % len(caches)] if caches else cpus
    cores = [group & cpus for first, group in sorted(topology.cores.items()) if group & cpus]
    if len(cores) < count:
        raise ConfigError(
            f"--numa_binding exclusive: NUMA node {node} has {len(cores)} cores for {count} ranks; start fewer, or "
            "pass --numa_binding node"
        )
    share, rest = divmod(len(cores), count)
    begin = index * share + min(index, rest)
    return frozenset().union(*cores[begin : begin + share + (index < rest)])


def read_cpu_topology(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> CpuTopology:
    """The CPUs as Linux lists them under ``/sys``.

    Args:
        root: root of the file system; other than ``/`` in tests only.
        allowed: the CPUs that may be used; None: those that this process may use.
    """
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    system = root / "sys/devices/system"
    nodes = {
        int(folder.name[4:]): read_cpu_list(folder / "cpulist") & allowed
        for folder in (system / "node").glob("node[0-9]*")
    } or ({0: allowed} if (system / "cpu").is_dir() and allowed else {})
    sockets, cores, caches = {}, {}, {}
    for cpu in sorted(allowed):
        folder = system / f"cpu/cpu{cpu}"
        package = folder / "topology/physical_package_id"
        sockets[cpu] = int(package.read_text()) if package.is_file() else 0
        threads = read_cpu_list(folder / "topology/thread_siblings_list") & allowed or frozenset({cpu})
        cores[min(threads)] = threads
        levels = sorted((folder / "cache").glob("index[0-9]*"), key=lambda level: int(level.name[5:]))
        shared = read_cpu_list(levels[-1] / "shared_cpu_list") & allowed if levels else frozenset()
        if shared:
            caches[min(shared)] = shared
    return CpuTopology(nodes, sockets, cores, caches)


def gpu_nodes(count: int, visible: str | None, root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA node of each visible NVIDIA GPU, in the order of their PCI addresses; empty if the system does not list
    them.

    Args:
        count: number of visible GPUs.
        visible: the text of CUDA_VISIBLE_DEVICES, if it is set.
        root: root of the file system; other than ``/`` in tests only.
    """
    addresses = sorted(folder.name.lower() for folder in (root / "proc/driver/nvidia/gpus").glob("*"))
    found = []
    for address in addresses:
        place = root / "sys/bus/pci/devices" / address / "numa_node"
        if not place.is_file():
            return ()
        found.append(max(0, int(place.read_text())))  # -1: the machine has one node
    if visible is not None:
        indices = [part.strip() for part in visible.split(",")]
        if not all(part.isdecimal() and int(part) < len(found) for part in indices):
            return ()
        found = [found[int(part)] for part in indices]
    return tuple(found[:count])
