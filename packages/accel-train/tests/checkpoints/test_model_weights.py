"""The saved weights of one model, as strategies load them."""

import pytest
import torch

import accel_ckpt
from accel_ckpt import CorruptCheckpointError, Part
from accel_train import Accelerator
from accel_train.checkpoints.model_weights import CheckpointModel, WholeModel
from testkit.nets import Net


def weights():
    torch.manual_seed(0)
    return Net().state_dict()


@pytest.fixture(params=["checkpoint", "whole"])
def saved(request, tmp_path):
    """The second of two models, from a checkpoint of ours or read whole."""
    if request.param == "whole":
        return WholeModel(weights())
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 2), second := Net())
    second.load_state_dict(weights())
    folder = accelerator.save_state(tmp_path / "state")
    return CheckpointModel(accel_ckpt.open_training_state(folder), 1)


def test_shapes_and_dtypes_are_known_without_reading(saved):
    about = {name: (tuple(entry.shape), entry.dtype) for name, entry in saved.about.items()}
    assert about == {name: (tuple(value.shape), value.dtype) for name, value in weights().items()}


def test_the_whole_state_dict_is_read_once(saved):
    whole = saved.whole()
    assert whole.keys() == weights().keys()
    assert all(torch.equal(whole[name], value) for name, value in weights().items())
    assert saved.whole() is whole


def test_targets_are_filled_in_place_with_what_this_rank_holds(saved):
    expected = weights()
    targets = {
        "head.weight": torch.zeros(2, 4),
        "body.0.weight": Part(torch.zeros(2, 3), (1, 0), (4, 3)),
        "body.1.num_batches_tracked": torch.tensor(9),
    }
    saved.check(targets)
    assert not targets["head.weight"].any(), "checking fills nothing"
    saved.fill(targets)
    assert torch.equal(targets["head.weight"], expected["head.weight"])
    assert torch.equal(targets["body.0.weight"].tensor, expected["body.0.weight"][1:3])
    assert targets["body.1.num_batches_tracked"].item() == 0


def test_nothing_to_fill_is_nothing_to_do(saved):
    saved.check({})
    saved.fill({})


@pytest.mark.parametrize("use", ["check", "whole"])
def test_a_damaged_file_is_named_before_anything_is_filled(tmp_path, use):
    accelerator = Accelerator()
    accelerator.prepare(Net())
    folder = accelerator.save_state(tmp_path / "state")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    saved = CheckpointModel(accel_ckpt.open_training_state(folder), 0)
    targets = {name: torch.zeros_like(value) for name, value in weights().items()}
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        saved.check(targets) if use == "check" else saved.whole()
    assert not any(target.any() for target in targets.values())
