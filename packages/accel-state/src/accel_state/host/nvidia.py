"""Queries to ``nvidia-smi``. Loads no torch and initialises no device."""

from __future__ import annotations

import shutil
import subprocess

from packaging.version import parse

from accel_state.errors import DeviceError

__all__ = ["check_cuda_p2p_ib_support", "describe_gpus", "get_driver_version", "get_gpu_info"]

# The first driver with which consumer GPUs of the RTX 40 series refuse peer-to-peer transfers instead of losing data.
_FIXED_DRIVER = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """Names of this machine's NVIDIA GPUs, and their number.

    Raises:
        DeviceError: ``nvidia-smi`` is missing or fails.
    """
    names = _query("name")
    return names, len(names)


def describe_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each NVIDIA GPU of this machine, in the order of ``nvidia-smi``.

    Memory that ``nvidia-smi`` does not report (devices that share the host's memory) is 0.

    Raises:
        DeviceError: ``nvidia-smi`` is missing or fails.
    """
    found = []
    for line in _query("name,memory.total"):
        name, _, memory = line.rpartition(",")
        number = memory.split()[0]  # such as "81559 MiB", or "[N/A]"
        found.append((name.strip(), int(number) * 2**20 if number.isdecimal() else 0))
    return found


def get_driver_version() -> str:
    """Version of the NVIDIA driver.

    Raises:
        DeviceError: ``nvidia-smi`` is missing or fails, or there is no GPU.
    """
    versions = _query("driver_version")
    if not versions:
        raise DeviceError("nvidia-smi lists no GPU, so the driver version is unknown")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether peer-to-peer transfers between the GPUs of this machine work.

    They fail between several RTX 40 series GPUs with a driver older than 550.40.07; such machines need
    NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1. True on a machine without ``nvidia-smi``.
    """
    if shutil.which("nvidia-smi") is None:
        return True
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    return parse(get_driver_version()) >= parse(_FIXED_DRIVER)


def _query(field: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise DeviceError(
            "nvidia-smi is not on the PATH; install the NVIDIA driver, or add its folder to PATH"
        )
    try:
        done = subprocess.run(
            [command, f"--query-gpu={field}", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise DeviceError(f"nvidia-smi --query-gpu={field} failed: {error}") from error
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
