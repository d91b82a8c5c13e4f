"""Planning which tensor goes to which file, without reading or writing."""

from __future__ import annotations

import heapq
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["PlannedTensor", "Shard", "convert_file_size_to_int", "divide", "plan_shards", "shard_file_names"]

K = TypeVar("K", bound=Hashable)

_UNITS = {
    "B": 1,
    **{f"{letter}B": 10 ** (3 * (i + 1)) for i, letter in enumerate("KMGT")},
    **{f"{letter}IB": 2 ** (10 * (i + 1)) for i, letter in enumerate("KMGT")},
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Turn a size such as ``"5GB"`` into bytes.

    ``KB``, ``MB``, ``GB`` and ``TB`` are powers of 1000, ``KiB`` … ``TiB`` of 1024; a lower-case ``b`` after
    a power of 1000 means bits. Integers pass.

    Raises:
        ValueError: the size is negative, or not a number with a unit.
    """
    if isinstance(size, int):
        if size < 0:
            raise ValueError(
                f"a size of {size} bytes is negative; give a size such as '5GB' or a number of bytes"
            )
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(
            f"{size!r} is not a size; give a number of bytes, or a string such as '5GB', '500MB' or '2GiB'"
        )
    number, unit = match.groups()
    total = int(float(number) * _UNITS[unit.upper()])
    bits = unit.endswith("b") and len(unit) == 2
    return total // 8 if bits else total


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to be placed: its name, its size in bytes, and the storage that it shares with others."""

    name: str
    nbytes: int
    storage: Hashable = None
    """Tensors with equal ``storage`` (not ``None``) go to one file and are counted once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: the names in it, in order, and their bytes."""

    names: tuple[str, ...]
    nbytes: int


def plan_shards(tensors: Sequence[PlannedTensor], max_shard_size: int) -> tuple[Shard, ...]:
    """Divide tensors into files no larger than a limit, in the order given.

    A tensor that alone exceeds the limit gets a file of its own. No tensors make one empty file.

    Raises:
        ValueError: the limit is not positive.
    """
    if max_shard_size <= 0:
        raise ValueError(f"max_shard_size is {max_shard_size} bytes; it must be positive, such as '10GB'")
    names: list[list[str]] = []
    sizes: list[int] = []
    current: int | None = None
    home: dict[Hashable, int] = {}
    for tensor in tensors:
        shared = home.get(tensor.storage) if tensor.storage is not None else None
        if shared is not None:
            names[shared].append(tensor.name)
            continue
        if tensor.nbytes > max_shard_size:
            target = len(names)
        elif current is not None and sizes[current] + tensor.nbytes <= max_shard_size:
            target = current
        else:
            current = target = len(names)
        if target == len(names):
            names.append([])
            sizes.append(0)
        names[target].append(tensor.name)
        sizes[target] += tensor.nbytes
        if tensor.storage is not None:
            home[tensor.storage] = target
    if not names:
        return (Shard((), 0),)
    return tuple(Shard(tuple(group), size) for group, size in zip(names, sizes, strict=True))


def shard_file_names(count: int, stem: str, extension: str) -> tuple[str, ...]:
    """File names of ``count`` shards: ``stem.ext``, or ``stem-00001-of-0000N.ext`` when there are several."""
    if count == 1:
        return (f"{stem}.{extension}",)
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.{extension}" for i in range(1, count + 1))


def divide(sizes: Mapping[K, int], loads: Sequence[int]) -> list[frozenset[K]]:
    """Divide named items among workers so that the largest load is small.

    The largest goes first, to the worker with the least (longest-processing-time rule: at most 4/3 of the optimum where
    all loads are zero; Graham 1969). The result depends on the arguments alone.

    Args:
        sizes: bytes by name; names must be comparable with each other.
        loads: bytes that each worker has already.
    """
    shares: list[list[K]] = [[] for _ in loads]
    heap = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    for _, name in sorted((-nbytes, name) for name, nbytes in sizes.items()):
        load, worker = heap[0]
        shares[worker].append(name)
        heapq.heapreplace(heap, (load + sizes[name], worker))
    return [frozenset(share) for share in shares]
