"""Packing the weights of groups one after another into blocks of host memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import available_host_memory
from accel_bigmodel.streaming.slot_layout import SlotLayout, address_of, aligned
from accel_bigmodel.streaming.streamed_groups import StreamedGroup
from accel_bigmodel.streaming.types import Transfer
from accel_ckpt.format.memory import mapped_file_of

__all__ = ["pack_into_blocks"]

logger = logging.getLogger(__name__)

# Bytes of a block. A power of two, to which PyTorch rounds page-locked memory up. Packing needs the memory of one block
# besides the weights.
_BLOCK = 1 << 30

# Share of the free host memory that a new block may take: page-locked memory is never swapped out.
_FREE_SHARE = 0.8


def pack_into_blocks(model: nn.Module, groups: Sequence[StreamedGroup], transfer: Transfer) -> int:
    """Move the weights of groups into blocks of host memory, one after another.

    Parameters keep their identity and values, and each has its own storage of exactly its bytes, so that saving or
    sharing one includes nothing else. A group with a tensor that shares memory with others is left unchanged, and so is
    everything after the point where no memory is left for another block.

    Args:
        model: contains the groups.
        groups: those to pack.
        transfer: makes the blocks.

    Returns:
        Bytes of the weights that are in blocks.
    """
    sharing = Counter(address_of(tensor) for tensor in [*model.parameters(), *model.buffers()])
    done: dict[int, int] = {}
    todo: dict[int, torch.Tensor] = {}
    for group in groups:
        tensors = {id(item.tensor): item.tensor for item in group.items if item.tensor.nbytes}
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
    """Whether a tensor shares its memory with no other of the model. Views of a mapped file are of distinct parts."""
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
            "%s bytes of offloaded weights stay in host memory that is not page-locked, so that each forward "
            "has to stage them on their way to %s, which is slower: %s", f"{left:,}", transfer.device, error,
        )  # fmt: skip
        return None


def _moved(tensor: torch.Tensor, block: memoryview, begin: int) -> torch.Tensor:
    own = torch.frombuffer(block, dtype=torch.uint8, count=tensor.nbytes, offset=begin)
    (new,) = SlotLayout([tensor]).views(own)
    with torch.inference_mode():  # may write inference tensors and others
        return new.copy_(tensor)
