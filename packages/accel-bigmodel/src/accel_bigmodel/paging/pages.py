"""Which pages of mapped files hold the weights of a group, and which to keep in memory. Nothing is read here."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from accel_ckpt.format.memory import MappedFile, mapped_file_of

__all__ = ["PIECE", "Extent", "extents_of", "keep_resident"]

PIECE = 1 << 22
"""Bytes read at a time.

Measured with 1 to 16 MB: one thread that reads 4 MB at a time reaches the disk's rate, because the kernel reads ahead.
More threads, and advising the kernel (WILLNEED), were slower.
"""


class Extent:
    """Consecutive pages of one mapped file that the same groups use.

    Args:
        pages: their bytes, as 1-D uint8; begins at a page boundary.
        users: indices of the groups.
    """

    def __init__(self, pages: torch.Tensor, users: frozenset[int]) -> None:
        self.pages = pages
        self.users = users
        self.nbytes = pages.numel()
        self.count = -(-self.nbytes // PIECE)
        """Pieces."""
        self.resident = False
        """Whether it stays in memory after it was read."""
        self.have = 0
        """Pieces read since it was last evicted."""
        self.asked = 0
        """The most pieces read so far."""

    def piece(self, number: int) -> torch.Tensor:
        """One of the pieces."""
        return self.pages[number * PIECE : (number + 1) * PIECE]

    def pieces_in(self, room: int) -> int:
        """Number of pieces that fit in this many bytes."""
        return self.count if self.nbytes <= room else max(room, 0) // PIECE


def extents_of(groups: Sequence[Iterable[torch.Tensor]]) -> list[list[Extent]]:
    """The extents that each group uses; an extent that several use is one object.

    Args:
        groups: the tensors of each. Tensors that are not views of a mapped file are ignored.
    """
    ranges: dict[MappedFile, list[tuple[int, int, int]]] = {}
    for index, tensors in enumerate(groups):
        for tensor in tensors:
            mapping = mapped_file_of(tensor)
            if mapping is not None:
                begin, end = _pages_of(tensor, mapping)
                ranges.setdefault(mapping, []).append((begin, end, index))
    result: list[list[Extent]] = [[] for _ in groups]
    for mapping, found in ranges.items():
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        for begin, end, users in _cut(found):
            extent = Extent(content[begin:end], users)
            for index in users:
                result[index].append(extent)
    return result


def _pages_of(tensor: torch.Tensor, mapping: MappedFile) -> tuple[int, int]:
    """First byte, and last byte plus one, of the pages that hold a tensor, from the start of the mapping."""
    begin = tensor.data_ptr() - torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (last + 1) * tensor.element_size()
    page = mmap.PAGESIZE
    return begin // page * page, min(-(-end // page) * page, len(mapping))


def _cut(ranges: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Split overlapping ranges where the set of users changes: begin, end, users."""
    changes = sorted(
        (at, step, user) for begin, end, user in ranges for at, step in ((begin, 1), (end, -1)) if begin < end
    )
    using: Counter[int] = Counter()
    start, users = 0, frozenset[int]()
    for number, (at, step, user) in enumerate(changes):
        using[user] += step
        if number + 1 < len(changes) and changes[number + 1][0] == at:
            continue  # more changes at this offset
        now = frozenset(+using)
        if now != users:
            if users:
                yield start, at, users
            start, users = at, now


def keep_resident(groups: Sequence[Sequence[Extent]], budget: int) -> int:
    """Mark the extents that stay in memory: as many as fit beside two consecutive groups.

    Extents used by several groups come first. Other groups are chosen evenly over the model, so that reading overlaps
    with their computation; with a fixed order, any choice saves the same amount of reading.

    Returns:
        Bytes of the extents that stay.
    """
    extents = list(dict.fromkeys(extent for group in groups for extent in group))
    total = sum(extent.nbytes for extent in extents)
    sizes = [sum(extent.nbytes for extent in group) for group in groups]
    following = [*sizes[1:], *sizes[:1]] if len(sizes) > 1 else [0] * len(sizes)
    largest = max((size + next_one for size, next_one in zip(sizes, following, strict=True)), default=0)
    room = budget if total <= budget else budget - largest
    kept = 0
    for extent in sorted((e for e in extents if len(e.users) > 1), key=lambda e: e.nbytes):
        if kept + extent.nbytes <= room:
            extent.resident = True
            kept += extent.nbytes
    share = (room - kept) / max(1, total - kept)
    due = 0.0
    for group in groups:
        own = [extent for extent in group if len(extent.users) == 1]
        size = sum(extent.nbytes for extent in own)
        due += share * size
        if size <= due + 0.5 and kept + size <= room:
            due -= size
            kept += size
            for extent in own:
                extent.resident = True
    return kept
