"""Saved weights into modules that torch loads, and into those that load by themselves. DTensors: tests-integration."""

import pytest
import torch
from torch import nn

from accel_ckpt import (
    CorruptCheckpointError,
    StateMismatchError,
    canonical_state_dict,
    open_training_state,
    save_training_state,
)
from accel_ckpt.loading.load_module import check_weights, load_weights_into


class Net(nn.Module):
    def __init__(self, seed=0, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.told = f"seed {seed}"

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


class Renaming(Net):
    """Loads names that its own state dict does not have."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for name in [name for name in state_dict if name.startswith(f"{prefix}old.")]:
            state_dict[name.replace("old.", "norm.")] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def saved(tmp_path, model, rename=None, **options):
    state = canonical_state_dict(model.state_dict(), model)
    state = {name.replace(*rename) if rename else name: value for name, value in state.items()}
    path = save_training_state(tmp_path / "c", models=[state], shared={}, per_rank={}, **options)
    return open_training_state(path)


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return all(
        torch.equal(value, theirs[n]) if isinstance(value, torch.Tensor) else value == theirs[n]
        for n, value in ours.items()
    )


@pytest.mark.parametrize("safe", [True, False])
def test_tensors_are_filled_in_place_and_extra_state_is_set(tmp_path, safe):
    weights = saved(tmp_path, Net(1), safe_serialization=safe).weights(0)
    model = Net(2)
    before = dict(model.named_parameters())
    check_weights(model, weights)
    assert not same(model, Net(1))
    load_weights_into(nn.parallel.DataParallel(model), weights)
    assert same(model, Net(1))
    assert model.told == "seed 1"
    assert model.head.weight is model.embed.weight
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_module_may_know_other_names(tmp_path):
    weights = saved(tmp_path, Net(1), rename=("norm.", "old.")).weights(0)
    with pytest.raises(StateMismatchError, match=r"not there: norm\.bias"):
        check_weights(Net(2), weights)
    model = Renaming(2)
    check_weights(model, weights)
    load_weights_into(model, weights)
    assert same(model, Net(1))


def test_lazy_modules_get_their_shape(tmp_path):
    weights = saved(tmp_path, nn.Linear(3, 2)).weights(0)
    model = nn.LazyLinear(2)
    load_weights_into(model, weights)
    assert model.weight.shape == (2, 3)


def test_half_of_the_names_if_not_strict(tmp_path):
    weights = saved(tmp_path, nn.Linear(3, 2)).weights(0)
    other = nn.Linear(3, 2, bias=False)
    with pytest.raises(StateMismatchError, match="not here: bias"):
        load_weights_into(other, weights)
    load_weights_into(other, weights, strict=False)
    assert torch.equal(other.weight, weights.read()["weight"])


@pytest.mark.parametrize("kind", [Net, Renaming])
def test_what_does_not_fit_and_what_is_damaged_changes_nothing(tmp_path, kind):
    checkpoint = saved(tmp_path, Net(1))
    with pytest.raises(
        StateMismatchError, match=r"do not fit the module \w+: .*embed.weight is \[5, 4\] there and \[5, 6\]"
    ):
        load_weights_into(kind(2, width=6), checkpoint.weights(0))
    path = checkpoint.directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    model = kind(2)
    for act in (check_weights, load_weights_into):
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors has the checksum"):
            act(model, checkpoint.weights(0))
    assert same(model, kind(2))
