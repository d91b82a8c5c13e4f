"""Canonical names do not depend on what a model is wrapped in."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accel_ckpt import NameCollisionError, canonical_name, canonical_names, canonical_state_dict
from accel_ckpt.errors import UninitializedTensorError
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.tensors import check_nothing_on_meta


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)  # a child that is really called so
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


PLAIN = set(Net().state_dict())


class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.module = net


def test_t33_keys_are_identical_eager_and_compiled():
    model = Net()
    assert set(canonical_state_dict(torch.compile(model).state_dict(), torch.compile(model))) == PLAIN
    assert set(canonical_state_dict(torch.compile(model).state_dict())) == PLAIN
    model.body[0] = torch.compile(model.body[0])  # regional
    assert any("_orig_mod" in name for name in model.state_dict())
    assert set(canonical_state_dict(model.state_dict(), model)) == PLAIN


def test_t33_wrappers_in_any_order():
    model = torch.compile(nn.DataParallel(torch.compile(Net())))
    assert set(canonical_state_dict(model.state_dict(), model)) == PLAIN
    wrapped = Net()
    wrapped.body[0] = checkpoint_wrapper(wrapped.body[0])
    assert set(canonical_state_dict(wrapped.state_dict(), wrapped)) == PLAIN


def test_a_child_called_module_is_not_a_wrapper():
    model = Wrapper(nn.Linear(1, 1))
    assert set(canonical_state_dict(model.state_dict(), model)) == {"module.weight", "module.bias"}
    assert set(canonical_state_dict(model.state_dict())) == {"module.weight", "module.bias"}


def test_names_alone():
    assert canonical_name("module._orig_mod.layer.weight") == "layer.weight"
    assert canonical_name("_orig_mod.module.layer._fsdp_wrapped_module.weight") == "layer.weight"
    assert canonical_name("layer._checkpoint_wrapped_module.bias") == "layer.bias"
    assert canonical_name("encoder.module.weight") == "encoder.module.weight"
    assert canonical_name("module") == "module"


def test_prefixes():
    assert canonical_names(torch.compile(nn.Sequential(nn.ReLU()))) == {
        "": "",
        "_orig_mod.": "",
        "_orig_mod.0.": "0.",
    }


def test_names_that_are_no_module_s_keep_their_rest():
    model = torch.compile(nn.Sequential(nn.Linear(1, 1)))
    assert canonical_state_dict({"_orig_mod.0._extra_state": 1, "loose": 2}, model) == {
        "0._extra_state": 1,
        "loose": 2,
    }


def test_two_names_that_become_one_are_an_error():
    with pytest.raises(NameCollisionError, match=r"'_orig_mod\.w' and 'w' both"):
        canonical_state_dict({"_orig_mod.w": 1, "w": 2})


def test_messages_name_the_first_of_many():
    many = [f"layers.{number}.weight" for number in range(1000)]
    assert listed(many[:2]) == "layers.0.weight, layers.1.weight"
    assert listed(many[:12]).endswith("layers.11.weight")
    assert listed(many).endswith("layers.11.weight and 988 more")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    with pytest.raises(UninitializedTensorError, match=r"5\.bias and 28 more; load their checkpoint first"):
        check_nothing_on_meta(model)
