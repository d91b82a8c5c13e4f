"""Blocks of host memory: which copies bring tensors in them to a slot."""

import gc

import torch

from accel_bigmodel.streaming.host_blocks import HostBlocks
from accel_bigmodel.streaming.slot_layout import SlotLayout


def test_runs_leave_out_what_is_left_out():
    blocks = HostBlocks()
    memory = blocks.add(torch.zeros(4096, dtype=torch.uint8))
    tensors = [torch.frombuffer(memory, dtype=torch.float32, count=100, offset=512 * n) for n in range(3)]
    layout = SlotLayout(tensors)
    assert [(run.nbytes, at) for run, at in blocks.runs(tensors, layout)] == [(1024 + 400, 0)]
    assert [(run.nbytes, at) for run, at in blocks.runs([tensors[0], None, tensors[2]], layout)] == [
        (400, 0),
        (400, 1024),
    ]
    assert [at for _, at in blocks.runs([tensors[2], tensors[0], tensors[1]], layout)] == [0, 512]
    assert blocks.runs([tensors[0], None, torch.zeros(100)], layout) is None
    assert blocks.runs([None] * 3, layout) == []


def test_a_block_is_held_as_long_as_a_tensor_views_it():
    blocks = HostBlocks()
    memory = blocks.add(torch.zeros(4096, dtype=torch.uint8))
    tensor = torch.frombuffer(memory, dtype=torch.float32, count=10)
    del memory
    gc.collect()
    assert blocks.holds(tensor)
    assert not blocks.holds(torch.zeros(10))
    del tensor
    gc.collect()
    assert len(blocks) == 0
