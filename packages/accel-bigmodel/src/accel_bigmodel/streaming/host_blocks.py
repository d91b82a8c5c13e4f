"""Host memory from which a device fetches weights at the rate of its link: blocks, with one tensor after the other."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import available_host_memory
from accel_bigmodel.streaming.slots import Layout, address_of, aligned
from accel_ckpt.memory import mapped_file_of

if TYPE_CHECKING:
    from accel_bigmodel.streaming.members import Member
    from accel_bigmodel.streaming.transfer import Transfer

__all__ = ["HostBlocks", "Run", "gather"]

logger = logging.getLogger(__name__)

# Bytes of a block. A power of two, to which PyTorch rounds page-locked memory up. What gathering takes beside the
# weights at any moment is one block.
_BLOCK = 1 << 30

# Of the host memory that is free, for one more block: page-locked memory is never swapped out.
_FREE_SHARE = 0.8

Run = tuple[torch.Tensor, int]
"""Bytes of a block, and the byte of a slot where they go."""


class HostBlocks:
    """The blocks that a transfer has given. Each lives as long as a tensor lies in it."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}  # by address

    def add(self, block: torch.Tensor) -> memoryview:
        """Know a block (1-D uint8) from now on, until nothing views what this returns any more."""
        address = block.data_ptr()
        array = block.numpy()
        self._blocks[address] = block
        weakref.finalize(array, self._blocks.pop, address, None).atexit = False
        return array.data

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a block."""
        return _block_at(tensor.data_ptr(), self._blocks, sorted(self._blocks)) is not None

    def runs(self, sources: Sequence[torch.Tensor | None], layout: Layout) -> list[Run] | None:
        """What to copy so that a slot has the sources as the layout says; ``None`` if one is in no block, or not so.

        The runs view the blocks themselves, of which PyTorch knows until when copies need them, unlike the tensors in
        them.
        """
        begins = sorted(self._blocks)
        # Of each: the block, the first byte in it and the one behind the last, the first byte in the slot.
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


def gather(model: nn.Module, members: Sequence[Member], transfer: Transfer) -> int:
    """Let the weights of groups lie one after the other in blocks of host memory, block after block.

    Parameters keep their identity and values, and each has a storage of its own, of just its bytes: who saves or shares
    one takes nothing else along. Groups stay as they are that have a tensor which shares its memory with others, and
    so does everything from where there is no memory for another block.

    Args:
        model: the groups are of.
        members: the groups.
        transfer: gives the blocks.

    Returns:
        Bytes of the weights that are in blocks.
    """
    sharing = Counter(address_of(tensor) for tensor in [*model.parameters(), *model.buffers()])
    done: dict[int, int] = {}
    todo: dict[int, torch.Tensor] = {}
    for member in members:
        tensors = {id(item.tensor): item.tensor for item in member.items if item.tensor.nbytes}
        if all(_is_alone(tensor, sharing) for tensor in tensors.values()):
            for key, tensor in tensors.items():
                if transfer.host_blocks.holds(tensor):
                    done[key] = tensor.nbytes
                else:
                    todo[key] = tensor
    left = sum(aligned(tensor.nbytes) for tensor in todo.values())
    block = memoryview(b"")
    used = 0
    for key, tensor in todo.items():
        need = aligned(tensor.nbytes)
        if used + need > len(block):
            found = _new_block(transfer, max(need, min(left, _BLOCK)), left)
            if found is None:
                break
            block, used = found, 0
        tensor.data = _moved(tensor.data, block, used)
        used, left = used + need, left - need
        done[key] = tensor.nbytes
    return sum(done.values())


def _is_alone(tensor: torch.Tensor, sharing: Counter[int | None]) -> bool:
    """Whether nothing else of the model is in a tensor's memory. Views of a mapped file are of its different parts."""
    if mapped_file_of(tensor) is not None:
        return True
    return tensor.untyped_storage().nbytes() == tensor.nbytes and sharing[address_of(tensor)] == 1


def _new_block(transfer: Transfer, nbytes: int, left: int) -> memoryview | None:
    free = available_host_memory()
    try:
        if nbytes > _FREE_SHARE * free:
            raise RuntimeError(f"{free:,} bytes of host memory are free")
        return transfer.host_block(nbytes)
    except RuntimeError as error:
        logger.warning(
            "%s bytes of weights that wait in host memory stay in memory that is not page-locked, so that each forward "
            "packs them on their way to %s, which is slower: %s", f"{left:,}", transfer.device, error,
        )  # fmt: skip
        return None


def _moved(tensor: torch.Tensor, block: memoryview, begin: int) -> torch.Tensor:
    own = torch.frombuffer(block, dtype=torch.uint8, count=tensor.nbytes, offset=begin)
    (new,) = Layout([tensor]).views(own)
    with torch.inference_mode():  # which may write tensors of either kind
        return new.copy_(tensor)
