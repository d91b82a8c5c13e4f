"""Memory budgets for weights: of accelerators, and of the host within its control groups."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping
from numbers import Real
from pathlib import Path
from typing import Any

from accel_bigmodel.errors import DeviceMapError
from accel_ckpt.saving.plan import convert_file_size_to_int
from accel_state.host.devices import accelerator_module, default_device, device_count

__all__ = ["available_host_memory", "get_max_memory"]

DeviceKey = int | str
"""A device in a budget or map: the index of an accelerator, ``"mps"``, ``"cpu"`` or ``"disk"``."""
Size = float | str
"""Bytes, ``math.inf`` for no limit, or text such as ``"5GB"``."""
Sizes = Mapping[Any, Size]
"""Sizes by ``DeviceKey``; declared as Any, because type checkers infer ``dict[str, str]`` for ``{"cpu": "5GB"}``."""

HOST_PLACES = ("cpu", "disk")
_PLACES = ("mps", *HOST_PLACES)
logger = logging.getLogger(__name__)


def get_max_memory(
    max_memory: Sizes | None = None,
    *,
    reserve: Size | Sizes | None = None,
) -> dict[DeviceKey, float]:
    """Compute the memory budget of each device: bytes for weights, accelerators first, then host and disk.

    The keys are indices of accelerators, ``"mps"``, ``"cpu"`` and ``"disk"``. Sizes given as text become bytes in the
    caller's ``max_memory`` too, because clients read them there afterwards (``from_pretrained`` of transformers
    compares them with the result).

    Args:
        max_memory: bytes, ``math.inf`` for no limit, or sizes such as ``"5GB"``, by device. By default the free memory
            of every accelerator, and for the host ``available_host_memory()``, unless accelerator and host share one
            memory.
        reserve: bytes to leave free for activations and the KV cache: on every accelerator with a budget (on the host,
            if there is none), or by device.

    Raises:
        DeviceMapError: a key is not a device, a size cannot be read or is negative, or a reserve is larger than the
            budget.
    """
    budgets = memory_budgets(max_memory, reserve=reserve)
    if isinstance(max_memory, MutableMapping):
        sizes: MutableMapping[Any, Size] = max_memory
        sizes.update(
            {
                device: size
                for device, size in _in_order(max_memory).items()
                if isinstance(max_memory[device], str)
            }
        )
    return budgets


def memory_budgets(
    max_memory: Sizes | None = None, *, reserve: Size | Sizes | None = None
) -> dict[DeviceKey, float]:
    """The budgets of ``get_max_memory``; the caller's ``max_memory`` stays as it is."""
    budgets = _free_memory() if max_memory is None else _in_order(max_memory)
    reserves = _reserves(reserve, budgets)
    for device, kept in reserves.items():
        if kept > budgets[device]:
            raise DeviceMapError(
                f"reserve must keep {kept} bytes free on {device!r}, which has only {budgets[device]}; lower the "
                "reserve, or give the device more in max_memory"
            )
        budgets[device] -= kept
    return budgets


def _in_order(max_memory: Sizes) -> dict[DeviceKey, float]:
    if not isinstance(max_memory, Mapping):
        raise DeviceMapError(
            f"max_memory is {max_memory!r}; give bytes or sizes by device, such as {{0: '10GB', 'cpu': '30GB'}}"
        )
    indices = sorted(key for key in max_memory if isinstance(key, int))
    unknown = [key for key in max_memory if key not in _PLACES and not (type(key) is int and key >= 0)]
    if unknown:
        raise DeviceMapError(
            f"max_memory names {', '.join(map(repr, unknown))}; devices are indices of accelerators (0 for cuda:0) "
            f"and {', '.join(map(repr, _PLACES))}"
        )
    count = _accelerators()
    missing = [index for index in indices if index >= count]
    if missing:
        logger.warning(
            "max_memory names the accelerators %s, but this machine has %d: the map is for another machine",
            ", ".join(map(str, missing)),
            count,
        )
    order: list[DeviceKey] = [*indices, *(place for place in _PLACES if place in max_memory)]
    return {device: size_in_bytes(max_memory[device], f"max_memory[{device!r}]") for device in order}


def size_in_bytes(size: Size, subject: str) -> float:
    """Convert a budget to bytes; infinity is no limit.

    Args:
        size: as a user gave it.
        subject: how the error begins.

    Raises:
        DeviceMapError: `size` is not a size.
    """
    return math.inf if size == math.inf else _bytes(size, subject)


def _reserves(reserve: Size | Sizes | None, budgets: Mapping[DeviceKey, float]) -> dict[DeviceKey, int]:
    if reserve is None:
        return {}
    if not isinstance(reserve, Mapping):
        # A budget of 0 excludes a device, so it needs no reserve.
        accelerators = [device for device in budgets if device not in HOST_PLACES and budgets[device] > 0]
        wanted = accelerators or [device for device in budgets if device == "cpu"]
        return {device: _bytes(reserve, "reserve") for device in wanted}
    unknown = [device for device in reserve if device not in budgets]
    if unknown:
        raise DeviceMapError(
            f"reserve names {', '.join(map(repr, unknown))}, which have no budget; the devices with one are "
            f"{', '.join(map(repr, budgets))}"
        )
    return {device: _bytes(size, f"reserve[{device!r}]") for device, size in reserve.items()}


def _bytes(size: Size, what: str) -> int:
    # Products such as 0.9 * free are floats, and sizes from arrays are NumPy numbers.
    given: Any = size
    if isinstance(given, Real) and math.isfinite(given):
        given = math.floor(given)
    try:
        return convert_file_size_to_int(given)
    except ValueError as error:
        raise DeviceMapError(f"{what}: {error}") from None


def _accelerators() -> int:
    kind = default_device().type
    return 0 if kind in ("cpu", "mps") else device_count(kind)


def _free_memory() -> dict[DeviceKey, float]:
    budgets: dict[DeviceKey, float] = {}
    shared = False
    kind = default_device().type
    for index in range(_accelerators()):
        backend = accelerator_module(kind)
        try:
            budgets[index] = int(backend.mem_get_info(index)[0])
        except RuntimeError as error:  # another process may use it exclusively
            logger.warning(
                "%s:%d is left out, because its free memory cannot be queried: %s", kind, index, error
            )
            continue
        shared |= kind == "cuda" and bool(
            getattr(backend.get_device_properties(index), "is_integrated", False)
        )
    if kind == "mps":
        budgets["mps"] = available_host_memory()
    elif not shared:
        budgets["cpu"] = available_host_memory()
    return budgets


def available_host_memory() -> int:
    """Return the bytes that can still be allocated in the host's memory without swapping.

    The minimum of the machine's available memory and of what the control groups of this process (versions 1 and 2,
    including all parents) have left below their limits. File pages that were not used recently count as available,
    because the kernel evicts them first.
    """
    import psutil  # on first use: it takes longer to import than this package

    return min([int(psutil.virtual_memory().available), *control_group_room()])


def control_group_room(root: Path = Path("/")) -> list[int]:
    """Bytes left below each memory limit of the control groups that hold this process.

    Args:
        root: root of the file system; tests use another one.
    """
    groups = root / "proc/self/cgroup"
    mounts = root / "proc/self/mountinfo"
    if not (groups.exists() and mounts.exists()):  # not Linux
        return []
    found = []
    for line in groups.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        version = 2 if controllers == "" else 1
        if version == 2 or "memory" in controllers.split(","):
            for folder in _folders(mounts.read_text(), version, group, root):
                found += _room_v2(folder) if version == 2 else _room_v1(folder)
    return found


def _folders(mounts: str, version: int, group: str, root: Path) -> Iterator[Path]:
    """The folder of a group where its hierarchy is mounted, then those of its parents."""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 1 and "memory" not in options.split(","):
            continue
        top, mount = left.split(" ")[3:5]
        base = root / mount.lstrip("/")
        # A container sees its own group as the root of the mount, and may be given a path from outside of it.
        inside = Path(group).relative_to(top) if Path(group).is_relative_to(top) else Path()
        folder = base / str(inside).lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(base))


def _room_v2(folder: Path) -> list[int]:
    # Above memory.high a process is throttled heavily, so that is a limit too.
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return _room(folder, limits, "memory.current", "inactive_file")


def _room_v1(folder: Path) -> list[int]:
    limits = [_number(folder / "memory.limit_in_bytes")]
    return _room(folder, limits, "memory.usage_in_bytes", "total_inactive_file")


def _room(folder: Path, limits: list[int | None], usage: str, droppable: str) -> list[int]:
    known = [limit for limit in limits if limit is not None]
    used = _number(folder / usage)
    if not known or used is None:
        return []
    statistics = folder / "memory.stat"
    rows = statistics.read_text().splitlines() if statistics.exists() else []
    free = sum(int(value) for name, value in (row.split() for row in rows) if name == droppable)
    return [max(0, min(known) - used + free)]


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or it contains ``max``."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
