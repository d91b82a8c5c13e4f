"""What is no low-bit state passes; the states themselves are in `tests-integration/engines/test_optimizers.py`."""

import pytest
import torch

from accel_ckpt.training.low_bit_states import pack_low_bit, unpack_low_bit


class OptimState8bit(torch.Tensor):
    """Has the name of torchao's, and another home."""


def test_other_states_are_left_alone():
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "nested": {"torchao": "x"}}
    packed = pack_low_bit(state)
    assert all(packed[key] is value for key, value in state.items())
    assert unpack_low_bit(packed) is packed
    assert unpack_low_bit(3) == 3
    other = torch.ones(2).as_subclass(OptimState8bit)
    assert pack_low_bit({"a": other})["a"] is other


@pytest.mark.parametrize("name", ["os.system", "OptimState16bit"])
def test_a_file_chooses_among_known_classes_only(name):
    saved = {"exp_avg": {"torchao": name, "attributes": [], "tensors": {}}}
    assert unpack_low_bit(saved) is saved
