"""Blocks of host memory from which a device copies weights at the full rate of its link."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence

import torch

from accel_bigmodel.streaming.slot_layout import SlotLayout, aligned

__all__ = ["HostBlocks", "Run"]

Run = tuple[torch.Tensor, int]
"""Consecutive bytes of a block, and their offset in a slot."""


class HostBlocks:
    """The blocks that a transfer has made. A block lives as long as a tensor is in it."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}  # by address

    def add(self, block: torch.Tensor) -> memoryview:
        """Register a block (1-D uint8) until nothing views the returned memory any more."""
        address = block.data_ptr()
        array = block.numpy()
        self._blocks[address] = block
        weakref.finalize(array, self._blocks.pop, address, None).atexit = False
        return array.data

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in a block."""
        return _block_at(tensor.data_ptr(), self._blocks, sorted(self._blocks)) is not None

    def runs(self, sources: Sequence[torch.Tensor | None], layout: SlotLayout) -> list[Run] | None:
        """The byte ranges to copy so that a slot holds the sources in its layout; ``None`` if a source is not in a
        block, or has other strides.

        The runs are views of the blocks, whose memory PyTorch keeps until copies are done; it does not do so for the
        tensors in them.
        """
        begins = sorted(self._blocks)
        # For each: the block, its first byte and the one after its last, and the first byte in the slot.
        spans: list[tuple[torch.Tensor, int, int, int]] = []
        for source, piece in zip(sources, layout.pieces, strict=True):
            if source is None or not piece.nbytes:
                continue
            address = source.data_ptr()
            block = _block_at(address, self._blocks, begins)
            if block is None or source.stride() != piece.stride:
                return None
            at = address - block.data_ptr()
            if spans:
                last, first, end, target = spans[-1]
                if last is block and at == aligned(end) and piece.begin == aligned(target + end - first):
                    spans[-1] = block, first, at + piece.nbytes, target
                    continue
            spans.append((block, at, at + piece.nbytes, piece.begin))
        return [(block[first:end], target) for block, first, end, target in spans]


def _block_at(address: int, blocks: dict[int, torch.Tensor], begins: list[int]) -> torch.Tensor | None:
    at = bisect_right(begins, address) - 1
    block = blocks.get(begins[at]) if at >= 0 else None
    return block if block is not None and address < begins[at] + block.nbytes else None
