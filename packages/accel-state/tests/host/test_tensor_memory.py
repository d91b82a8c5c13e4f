"""The bytes of living tensors, against their own sizes."""

import torch

from accel_state.host.tensor_memory import TensorMemory


def test_storages_count_once_while_they_live():
    with TensorMemory() as memory:
        tensor = torch.zeros(1000)
        view = tensor.view(10, 100)
        assert memory.live == 4000
        other = view + 1
        assert memory.live == 8000
        del other
        assert memory.live == 4000
        del tensor
        assert memory.live == 4000
        del view
    assert memory.live == 0
    assert memory.peak == 8000


def test_backward_is_seen():
    with TensorMemory() as memory:
        layer = torch.nn.Linear(100, 100)
        assert memory.live == 40400
        layer(torch.ones(2, 100)).sum().backward()
        assert 80800 <= memory.live < 90000


def test_a_storage_that_was_resized():
    with TensorMemory() as memory:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        other = torch.zeros(2000)
        assert memory.peak == 4 * other.numel(), "the first is gone"
