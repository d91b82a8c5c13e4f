"""Properties of this machine. Loads no torch, except in functions about devices."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel_state import environment
from accel_state.clusters.topology import Topology, detect
from accel_state.errors import ConfigError

__all__ = [
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_os_kernel",
    "get_cpu_distributed_information",
    "get_free_port",
    "override_numa_affinity",
    "read_cpu_list",
    "set_numa_affinity",
]

_logger = logging.getLogger(__name__)

# Below this Linux release, processes that share memory between GPUs can hang.
_MIN_KERNEL = (5, 5, 0)
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def get_free_port() -> int:
    """A currently free TCP port, chosen by the operating system."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn, on the main process, about a Linux kernel older than 5.5.0; other systems are not checked."""
    release = platform.uname().release
    if platform.uname().system != "Linux":
        return
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if match is None:
        return
    kernel = (int(match[1]), int(match[2]), int(match[3] or 0))
    if kernel < _MIN_KERNEL and detect(environment.snapshot()).rank == 0:
        _logger.warning(
            f"the Linux kernel here is {release}; before 5.5.0 processes of a training run can hang. Update it, or "
            "look there first if this run stops without an error"
        )


def get_cpu_distributed_information() -> Topology:
    """The topology of this process from its launcher's variables, without creating a process group."""
    return detect(environment.snapshot())


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of ``library_names`` that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def check_cuda_fp8_capability() -> bool:
    """Whether the current CUDA device computes in 8-bit floating point: compute capability 8.9 or later."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores near its GPU, which Linux lists for its PCI device.

    Does nothing without a CUDA device, or if the system does not list the cores.

    Args:
        local_process_index: rank of this process on its node, which is the index of its GPU.
        verbose: print the cores; by default in debug mode (ACCELERATE_DEBUG_MODE).

    Raises:
        ConfigError: there is no GPU of that index.
    """
    import torch

    if not torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return
    if local_process_index >= torch.cuda.device_count():
        raise ConfigError(
            f"local process {local_process_index} has no GPU, because there are {torch.cuda.device_count()}; start at "
            "most one process per GPU, or disable the CPU affinity"
        )
    properties: Any = torch.cuda.get_device_properties(local_process_index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = read_cpu_list(_PCI_DEVICES / address / "local_cpulist") & os.sched_getaffinity(0)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    if environment.parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        print(
            f"process {local_process_index} of this node is bound to CPU cores {sorted(cores)}, near GPU "
            f"{address}"
        )


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """As ``override_numa_affinity``, but only once per process."""
    override_numa_affinity(local_process_index, verbose)


def read_cpu_list(path: Path) -> frozenset[int]:
    """The CPUs in a file in Linux's list format (``0-3,8`` is 0, 1, 2, 3, 8); none if it does not exist."""
    cpus: set[int] = set()
    for part in path.read_text().strip().split(",") if path.is_file() else ():
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part):
            cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)
