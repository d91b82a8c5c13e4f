"""Memory of well-known accelerators, by the name that people use."""

from __future__ import annotations

import difflib

from accel_bigmodel.errors import EstimateError

__all__ = ["DEVICES", "device_memory"]

DEVICES: dict[str, int] = {
    "a10-24gb": 24,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "b200-180gb": 180,
    "gaudi2-96gb": 96,
    "gaudi3-128gb": 128,
    "h100-80gb": 80,
    "h200-141gb": 141,
    "l4-24gb": 24,
    "l40s-48gb": 48,
    "mi250x-64gb": 64,
    "mi300x-192gb": 192,
    "mi325x-256gb": 256,
    "mi355x-288gb": 288,
    "rtx3090-24gb": 24,
    "rtx4090-24gb": 24,
    "rtx5090-32gb": 32,
    "rtx6000ada-48gb": 48,
    "t4-16gb": 16,
    "tpu-v4-32gb": 32,
    "tpu-v5e-16gb": 16,
    "tpu-v5p-95gb": 95,
    "tpu-v6e-32gb": 32,
    "v100-16gb": 16,
    "v100-32gb": 32,
}
"""Gigabytes (10^9 bytes) that the makers' data sheets state; of the two dies of an MI250X one."""


def device_memory(name: str) -> int:
    """Bytes of memory of an accelerator.

    The figure is the one in the data sheet, in GB of 10^9 bytes. A driver reports a few percent more or less, and less
    with error correction in the same memory.

    Args:
        name: such as "h100-80gb"; upper case, spaces and underscores do not matter, and the size may be left out
            if the accelerator comes in one size.

    Raises:
        EstimateError: the accelerator is not known; the message has the nearest names.
    """
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    found = [key for key in DEVICES if key == wanted or key.rpartition("-")[0] == wanted]
    if len(found) == 1:
        return DEVICES[found[0]] * 10**9
    if found:
        raise EstimateError(f"device {name!r} comes in several sizes; name one of {', '.join(found)}")
    near = difflib.get_close_matches(wanted, DEVICES, n=3, cutoff=0.5)
    if not near:
        models = difflib.get_close_matches(wanted, {key.rpartition("-")[0] for key in DEVICES}, n=2)
        near = [key for key in DEVICES if key.rpartition("-")[0] in models]
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(DEVICES))}."
    raise EstimateError(f"device {name!r} is not in the table; {hint} Or give its memory")
