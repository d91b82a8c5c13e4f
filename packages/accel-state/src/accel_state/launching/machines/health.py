"""The health probe of a machine: can it replace one that failed?

Run as a module, in a process that ends before ranks start, so that it leaves no context on the devices.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_state.messages import say

__all__ = ["find_device_faults", "find_faults", "main"]

_SHARED = Path("/dev/shm")
_ROOM = 64 * 2**20
"""Free bytes without which data loaders and temporary files soon fail."""
_SIZE = 256


def find_faults(processes: int, cpu: bool) -> Iterator[str]:
    """Find the faults of this machine; a sentence for each.

    Args:
        processes: ranks that it must be able to run.
        cpu: they compute on the CPU.
    """
    for folder in (Path(tempfile.gettempdir()), _SHARED):
        if folder.is_dir() and shutil.disk_usage(folder).free < _ROOM:
            yield f"{folder} has less than {_ROOM // 2**20} MB left; remove files there"
    import torch

    if cpu:
        yield from find_device_faults("cpu")
        return
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is None or count < processes:
        yield f"{processes} processes need {processes} accelerators, but {count} can be used; look at the driver"
        return
    for index in range(processes):
        yield from find_device_faults(f"{kind.type}:{index}")


def find_device_faults(device: str | int) -> Iterator[str]:
    """Find the faults of one device, by multiplying two matrices whose product is known.

    Args:
        device: its name, or its index among this machine's accelerators.
    """
    import torch

    if isinstance(device, int):
        kind = torch.accelerator.current_accelerator(check_available=True)
        device = f"{'cpu' if kind is None else kind.type}:{device}"

    try:
        product = torch.full((_SIZE, _SIZE), 2.0, device=device) @ torch.full(
            (_SIZE, _SIZE), 0.5, device=device
        )
        right = bool((product == float(_SIZE)).all())
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without this kind of device
        yield f"{device} cannot compute: {error}"
        return
    if not right:
        yield f"{device} computes wrongly: a product of two matrices is not the expected one"


def main(arguments: Sequence[str]) -> int:
    """Print the faults of this machine; the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(prog="accel_state.launching.machines.health")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    faults = list(find_faults(given.processes, given.cpu))
    for fault in faults:
        say(f"accel: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
