"""Facts about this machine, gathered once; the checks judge them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
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

__all__ = ["GATHERED", "Machine", "measure_disk"]

_PACKAGES = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli")
_LIBRARIES = (*_PACKAGES, "torch", "numpy", "safetensors", "transformers", "peft", "deepspeed", "accelerate")
_PROBE = 64 * 2**20
"""Bytes that are written to measure a disk: enough to leave the caches of a drive, and fast on a slow one."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts that the checks read.

    Attributes:
        python: version, as numbers.
        versions: installed libraries.
        torch_cuda: version of CUDA that torch was built for; empty: none.
        accelerators: number that torch can use.
        accelerator_files: number of devices that the system shows, such as /dev/nvidia0.
        driver: version of NVIDIA's driver; empty: none.
        shared_memory: bytes of /dev/shm; None: it does not exist.
        open_files: largest number of open files; None: not known.
        cpus: CPUs that this process may use.
        cpu_quota: CPUs that a container may use; None: no limit.
        memory, memory_limit: bytes of the machine, and of the container (None: no limit).
        host: name of this machine.
        addresses: addresses of that name; empty: it has none.
        port_free: whether port 29500 is free.
        folder: where checkpoints go.
        disk_free: free bytes there.
        disk_write, disk_read: bytes per second; None: not measured.
        temporary_free: free bytes in the folder of temporary files.
        clock: seconds since 1970 that the clock shows; 0: not read.
        clock_synchronized: whether the kernel considers its clock synchronized; None: not known.
        environ: environment variables.
    """

    python: tuple[int, ...]
    versions: Mapping[str, str]
    torch_cuda: str = ""
    accelerators: int = 0
    accelerator_files: int = 0
    driver: str = ""
    shared_memory: int | None = None
    open_files: int | None = None
    cpus: int = 1
    cpu_quota: float | None = None
    memory: int = 0
    memory_limit: int | None = None
    host: str = ""
    addresses: tuple[str, ...] = ()
    port_free: bool = True
    folder: str = "."
    disk_free: int = 0
    disk_write: float | None = None
    disk_read: float | None = None
    temporary_free: int = 0
    clock: float = 0.0
    clock_synchronized: bool | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _software(folder: Path) -> dict[str, Any]:
    import torch

    return {
        "python": tuple(map(int, platform.python_version_tuple()[:2])),
        "versions": _versions(),
        "torch_cuda": torch.version.cuda or "",
    }


def _devices(folder: Path) -> dict[str, Any]:
    import torch

    return {
        "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        "accelerator_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "driver": _driver(),
    }


def _system(folder: Path) -> dict[str, Any]:
    import psutil

    return {
        "shared_memory": _total(Path("/dev/shm")),
        "open_files": _open_files(),
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "cpu_quota": _cpu_quota(),
        "memory": psutil.virtual_memory().total,
        "memory_limit": _memory_limit(),
        "clock": time.time(),
        "clock_synchronized": _clock_synchronized(),
    }


def _network(folder: Path) -> dict[str, Any]:
    host = socket.gethostname()
    return {"host": host, "addresses": _addresses(host), "port_free": _is_free(29500)}


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


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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


def _total(path: Path) -> int | None:
    return shutil.disk_usage(path).total if path.exists() else None


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _cpu_quota() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    words = path.read_text(encoding="ascii").split() if path.exists() else ["max"]
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _memory_limit() -> int | None:
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text(encoding="ascii").strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
