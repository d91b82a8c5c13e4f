"""Facts about this machine: for the questions of ``accel config``, the checks of ``accel doctor``, and ``accel env``.

Each reads the facts that it needs; what ``accel config`` reads loads no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_state.config.strategies import installed_strategies
from accel_state.errors import DeviceError
from accel_state.host.nvidia import describe_gpus
from accel_state.host.versions import installed_version
from accel_state.launching.hardware import Accelerators, find_accelerators, physical_cores, usable_cpus
from accel_state.launching.ports import is_port_in_use

__all__ = [
    "ENGINES", "GATHERED", "PACKAGES", "Machine", "describe", "describe_accelerators", "detect", "facts_of_devices",
    "facts_of_system", "measure_disk", "package_versions", "versions_of",
]  # fmt: skip

PACKAGES = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli")
"""The packages of this project."""

ENGINES: Mapping[str, tuple[str, ...]] = {
    "DeepSpeed": ("deepspeed",),
    **{
        each.title: tuple(package.name for package in each.packages)
        for each in installed_strategies()
        if each.packages
    },
    "TransformerEngine": ("transformer-engine", "transformer_engine"),
    "torchao": ("torchao",),
    "torch_xla": ("torch_xla",),
    "SageMaker SDK": ("sagemaker",),
}
"""Optional engines, and the distributions that they come from."""

_KINDS = {
    "cuda": "NVIDIA GPU",
    "rocm": "AMD GPU",
    "xpu": "Intel GPU",
    "npu": "Ascend NPU",
    "hpu": "Gaudi HPU",
}
"""Kinds of accelerators, as people call them."""


_SHARED = Path("/dev/shm")

_PROBE = 64 * 2**20
"""Bytes that are written to measure a disk: enough to leave the caches of a drive, and fast on a slow one."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine; facts that nobody has read have their defaults.

    Attributes:
        environ: environment variables.
        host: name of this machine.
        versions: installed packages, libraries and engines.
        cores: physical CPU cores that processes may use.
        numa_nodes: memory nodes of the CPU.
        accelerators: kind and number of its accelerators.
        devices: name and memory in bytes of each accelerator, as far as a tool reports them.
        unknown: why names are unknown; empty if they are known.
        torch_build: what torch was built for: a version of CUDA or ROCm, or the CPU.
        usable: number of accelerators that torch can use.
        accelerator_files: number of devices that the system shows, such as /dev/nvidia0.
        driver: version of NVIDIA's driver; empty: none.
        shared_memory: bytes of /dev/shm; None: it does not exist.
        shared_free: free bytes there.
        open_files: largest number of open files; None: not known.
        cpus: CPUs that this process may use.
        cpu_quota: CPUs that a container may use; None: no limit.
        memory, memory_limit: bytes of the machine, and of the container (None: no limit).
        addresses: addresses of the machine's name; empty: it has none.
        port_free: whether port 29500 is free.
        folder: where checkpoints go.
        disk_free: free bytes there.
        disk_write, disk_read: bytes per second; None: not measured.
        temporary_free: free bytes in the folder of temporary files.
        clock: seconds since 1970 that the clock shows; 0: not read.
        clock_synchronized: whether the kernel considers its clock synchronized; None: not known.
    """

    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host: str = "localhost"
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: int = 1
    numa_nodes: int = 1
    accelerators: Accelerators = dataclasses.field(default_factory=Accelerators)
    devices: tuple[tuple[str, int], ...] = ()
    unknown: str = ""
    torch_build: str = "the CPU"
    usable: int = 0
    accelerator_files: int = 0
    driver: str = ""
    shared_memory: int | None = None
    shared_free: int = 0
    open_files: int | None = None
    cpus: int = 1
    cpu_quota: float | None = None
    memory: int = 0
    memory_limit: int | None = None
    addresses: tuple[str, ...] = ()
    port_free: bool = True
    folder: str = "."
    disk_free: int = 0
    disk_write: float | None = None
    disk_read: float | None = None
    temporary_free: int = 0
    clock: float = 0.0
    clock_synchronized: bool | None = None


def package_versions() -> dict[str, str]:
    """Version of each of ``PACKAGES`` that is installed, or on the path."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            found[name] = str(importlib.import_module(f"{name.replace('-', '_')}.__about__").__version__)
    return found


def versions_of(distributions: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Version of each library that is installed.

    Args:
        distributions: name to the distributions that it comes from.
    """
    found = {name: installed_version(*places) for name, places in distributions.items()}
    return {name: str(version) for name, version in found.items() if version is not None}


# accel config


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Look at this machine.

    Args:
        environ: the environment of the processes that will run.
        root: root of the file system; other than ``/`` in tests only.

    Raises:
        ConfigError: a variable that counts devices has an invalid value.
    """
    accelerators = find_accelerators(environ, root)
    devices: tuple[tuple[str, int], ...] = ()
    unknown = ""
    if accelerators.kind == "cuda":
        try:
            devices = tuple(describe_gpus())
        except DeviceError as error:
            unknown = f"names unknown: {str(error).partition(';')[0]}"
    return Machine(
        environ=environ,
        host=platform.node() or "localhost",
        versions=versions_of({"torch": ("torch",), **ENGINES}),
        cores=physical_cores(root),
        numa_nodes=_numa_nodes(root),
        accelerators=accelerators,
        devices=devices,
        unknown=unknown,
    )


def describe(machine: Machine) -> list[str]:
    """The machine in two lines: hardware, and engines."""
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    nodes = f"{machine.numa_nodes} NUMA nodes" if machine.numa_nodes > 1 else "1 NUMA node"
    installed = [f"{name} {found}" for name, found in machine.versions.items()]
    missing = [name for name in ENGINES if name not in machine.versions]
    return [
        f"{machine.host}: {cores}, {nodes}, {describe_accelerators(machine)}",
        ", ".join(installed) + (f"; not installed: {', '.join(missing)}" if missing else ""),
    ]


def describe_accelerators(machine: Machine) -> str:
    """Number, name and memory of the accelerators, such as ``2 x NVIDIA H100 (80 GB each)``."""
    found = machine.accelerators
    if not found.present:
        return "no accelerator"
    names = dict.fromkeys(machine.devices)
    if names:
        text = ", ".join(
            f"{machine.devices.count(device)} x {device[0]}"
            + _memory(device[1], machine.devices.count(device))
            for device in names
        )
    else:
        text = f"{found.present} {_KINDS.get(found.kind, found.kind + ' device')}{'s' if found.present > 1 else ''}"
        text += f" ({machine.unknown})" if machine.unknown else ""
    hidden = found.count < found.present
    return f"{text}, of which {found.visibility} leaves {found.count} visible" if hidden else text


def _memory(size: int, devices: int) -> str:
    each = " each" if devices > 1 else ""
    return f" ({size / 1e9:.0f} GB{each})" if size else ""


def _numa_nodes(root: Path) -> int:
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


# accel env


def facts_of_system() -> dict[str, str]:
    """Platform, Python, CPU and memory, as text."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "accel": shutil.which("accel") or "not on PATH",
        "processor cores": f"{psutil.cpu_count(logical=False)} ({psutil.cpu_count()} threads)",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free",
    }


def facts_of_devices() -> dict[str, str]:
    """What torch was built for, and the accelerators that it can use, as text."""
    import torch

    found = {"torch built for": _build(torch.version), "accelerators": "none"}
    count = _usable()
    device = torch.accelerator.current_accelerator() if count else None
    if device is not None:
        found["accelerators"] = f"{count} x {device.type}"
        for index in range(count if device.type == "cuda" else 0):
            facts = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{facts.name}, {facts.total_memory / 1e9:.1f} GB"
    return found


def _build(version: Any) -> str:
    if version.cuda is not None:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if getattr(version, "hip", None) is not None else "the CPU"


def _usable() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


# accel doctor


def _software(folder: Path) -> dict[str, Any]:
    import torch

    return {
        "versions": package_versions() | versions_of({"torch": ("torch",)}),
        "torch_build": _build(torch.version),
    }


def _devices(folder: Path) -> dict[str, Any]:
    return {
        "usable": _usable(),
        "accelerator_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "driver": _driver(),
    }


def _system(folder: Path) -> dict[str, Any]:
    import psutil

    quota, memory = _limit("cpu.max"), _limit("memory.max")
    shared = shutil.disk_usage(_SHARED) if _SHARED.exists() else None
    return {
        "shared_memory": None if shared is None else shared.total,
        "shared_free": 0 if shared is None else shared.free,
        "open_files": _open_files(),
        "cpus": usable_cpus(),
        "cpu_quota": None if quota is None else quota[0] / quota[1],
        "memory": psutil.virtual_memory().total,
        "memory_limit": None if memory is None else memory[0],
        "clock": time.time(),
        "clock_synchronized": _clock_synchronized(),
    }


def _network(folder: Path) -> dict[str, Any]:
    host = socket.gethostname()
    return {"host": host, "addresses": _addresses(host), "port_free": not is_port_in_use(29500)}


def _disk(folder: Path) -> dict[str, Any]:
    write, read = measure_disk(folder)
    return {
        "folder": str(folder),
        "disk_free": shutil.disk_usage(folder).free,
        "disk_write": write,
        "disk_read": read,
        "temporary_free": shutil.disk_usage(tempfile.gettempdir()).free,
    }


GATHERED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "loading torch": _software,
    "counting devices": _devices,
    "reading the limits of this machine": _system,
    "asking the name server for this machine": _network,
    "measuring the disk": _disk,
}
"""Step → the fields of ``Machine`` that it finds.

The first imports torch, the last writes and removes a file of 64 MB.
"""


def measure_disk(folder: Path, nbytes: int = _PROBE) -> tuple[float, float]:
    """Bytes per second of writing, flushed to the disk, and of reading a file in a folder.

    Raises:
        OSError: the folder cannot be written.
    """
    data = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".accel-doctor-") as file:
        began = time.perf_counter()
        for _ in range(max(1, nbytes // len(data))):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
        began = time.perf_counter()
        file.seek(0)
        while file.read(2**20):
            pass
        read = time.perf_counter() - began
    return nbytes / max(written, 1e-9), nbytes / max(read, 1e-9)


def _clock_synchronized() -> bool | None:
    """Whether something synchronizes the clock; if not, ``adjtimex`` returns 5, TIME_ERROR (man 2 adjtimex)."""
    if sys.platform != "linux":
        return None
    import ctypes

    answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256))  # modes 0: only reads
    return None if answer < 0 else bool(answer != 5)


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return ""
    words = path.read_text(encoding="utf-8").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _limit(name: str) -> tuple[int, ...] | None:
    """The numbers of a limit of this container; None: no limit."""
    path = Path("/sys/fs/cgroup", name)
    words = path.read_text(encoding="ascii").split() if path.exists() else ["max"]
    return None if words[0] == "max" else tuple(map(int, words))


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
