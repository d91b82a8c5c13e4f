"""Accelerators and CPU cores of this host, detected without torch.

The launcher only needs counts, and must neither import torch nor allocate device memory. Device files and the vendors'
visibility variables give the counts in well under a millisecond.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_state.constants import DEVICE_COUNT
from accel_state.errors import ConfigError
from accel_state.host.system import read_cpu_list

__all__ = ["Accelerators", "find_accelerators", "peer_to_peer_works", "physical_cores", "usable_cpus"]


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators that processes of this launch can use.

    Attributes:
        kind: ``cuda``, ``rocm``, ``xpu``, ``npu``, ``hpu``, ``mlu``, ``musa``, ``sdaa``, ``neuron``, ``mps``,
            or ``none``.
        count: number of visible devices.
        present: number of devices, visible or not.
        visibility: the variable that restricts visible devices; ``None`` if there is none.
    """

    kind: str = "none"
    count: int = 0
    present: int = 0
    visibility: str | None = None


def find_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> Accelerators:
    """Count the accelerators of this host that ``environ`` leaves visible.

    Args:
        environ: the environment of the processes.
        root: root of the file system; other than ``/`` in tests only.

    Raises:
        ConfigError: ``ACCEL_DEVICE_COUNT`` is not an integer.
    """
    forced = environ.get(DEVICE_COUNT)
    if forced is not None:
        if not forced.isdecimal():
            raise ConfigError(
                f"environment variable {DEVICE_COUNT} is {forced!r}; expected an integer of at least 0"
            )
        return (
            _narrow("cuda", int(forced), "CUDA_VISIBLE_DEVICES", environ) if int(forced) else Accelerators()
        )
    for kind, variable, count in _PROBES:
        present = count(root)
        if present:
            return _narrow(kind, present, variable, environ)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return Accelerators("mps", 1, 1)
    return Accelerators()


def _narrow(kind: str, present: int, variable: str, environ: Mapping[str, str]) -> Accelerators:
    value = environ.get(variable)
    if value is None:
        return Accelerators(kind, present, present, variable)
    ids: list[str] = []
    for entry in value.split(","):
        # The CUDA runtime ignores everything from the first invalid entry on.
        name = entry.strip()
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= present):
            break
        ids.append(name)
    return Accelerators(kind, len(ids), present, variable)


def _count_names(root: Path, folder: str, pattern: str) -> int:
    try:
        names = os.listdir(root / folder)
    except OSError:
        return 0
    return sum(1 for name in names if re.fullmatch(pattern, name))


def _nvidia(root: Path) -> int:
    files = _count_names(root, "dev", r"nvidia\d+")
    known = _count_names(root, "proc/driver/nvidia/gpus", r".+")
    if files and known:
        return min(files, known)  # a container may show all entries of one and only its own of the other
    return files or known or _nvidia_smi(root)


def _nvidia_smi(root: Path) -> int:
    # Under WSL there are neither device files nor /proc entries, only /dev/dxg and nvidia-smi.
    if not (root / "dev/dxg").exists():
        return 0
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    return len(re.findall(r"^GPU \d+:", answer.stdout, re.MULTILINE)) if answer.returncode == 0 else 0


def _rocm(root: Path) -> int:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    count = 0
    for properties in sorted(nodes.glob("*/properties")) if nodes.exists() else ():
        match = re.search(r"^simd_count (\d+)$", properties.read_text(), re.MULTILINE)
        count += bool(match and int(match[1]))
    return count


def _xpu(root: Path) -> int:
    cards = root / "sys/class/drm"
    if not cards.exists():
        return 0
    vendors = (card / "device/vendor" for card in cards.iterdir() if re.fullmatch(r"renderD\d+", card.name))
    count = sum(1 for vendor in vendors if vendor.exists() and vendor.read_text().strip() == "0x8086")
    # An Intel display GPU without the compute runtime is not an accelerator.
    libraries = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/lib")
    has_runtime = any(_count_names(root, folder, r"libze_loader\.so.*") for folder in libraries)
    return count if has_runtime else 0


_PROBES: tuple[tuple[str, str, Callable[[Path], int]], ...] = (
    ("cuda", "CUDA_VISIBLE_DEVICES", _nvidia),
    ("rocm", "HIP_VISIBLE_DEVICES", _rocm),
    ("npu", "ASCEND_RT_VISIBLE_DEVICES", lambda root: _count_names(root, "dev", r"davinci\d+")),
    ("mlu", "MLU_VISIBLE_DEVICES", lambda root: _count_names(root, "dev", r"cambricon_dev\d+")),
    ("hpu", "HABANA_VISIBLE_MODULES", lambda root: _count_names(root, "dev/accel", r"accel\d+")),
    ("neuron", "NEURON_RT_VISIBLE_CORES", lambda root: _count_names(root, "dev", r"neuron\d+")),
    ("musa", "MUSA_VISIBLE_DEVICES", lambda root: _count_names(root, "dev", r"mtgpu\.?\d+")),
    ("sdaa", "SDAA_VISIBLE_DEVICES", lambda root: _count_names(root, "dev", r"tcaicard\d+")),
    ("xpu", "ZE_AFFINITY_MASK", _xpu),
)


def peer_to_peer_works(accelerators: Accelerators, root: Path = Path("/")) -> bool:
    """Whether peer-to-peer transfers between the accelerators work, as far as known.

    nvidia-smi is slow, so it only runs if the kernel's device information does not rule the problem out.
    """
    if accelerators.kind != "cuda" or accelerators.present < 2:
        return True
    models = [file.read_text(errors="replace") for file in root.glob("proc/driver/nvidia/gpus/*/information")]
    if models and not any("RTX 40" in model for model in models):
        return True
    from accel_state.host.nvidia import check_cuda_p2p_ib_support

    return check_cuda_p2p_ib_support()


def physical_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, at least 1; hyperthreads of one core count once."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1
    folder = root / "sys/devices/system/cpu"
    threads = (read_cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list") or {cpu} for cpu in allowed)
    return len(set(map(frozenset, threads)))


def usable_cpus() -> int:
    """CPUs that this process may run on; each hyperthread counts."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
