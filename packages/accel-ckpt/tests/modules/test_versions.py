"""The version in which a module saved its state dict reaches it again, in whatever file it was.

The oracle is torch: ``module.load_state_dict(torch.load(…))``, whose files keep the versions.
"""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

from accel_ckpt import (
    BackgroundSaver,
    CorruptCheckpointError,
    load_checkpoint_in_model,
    load_weights_into,
    merge_fsdp_weights,
    open_training_state,
    save_model,
    save_training_state,
)
from accel_ckpt.format.writer import write_safetensors
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.modules.versions import versions_metadata, versions_of, with_versions
from accel_ckpt.saving.save_gathered import save_gathered_model


class Method(nn.Linear):
    """Saved halves of its weights when it was of version 1."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        _double_old(state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Hooked(nn.Linear):
    """The same, by a hook."""

    _version = 2

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(Hooked.hook)

    @staticmethod
    def hook(module, state_dict, prefix, local_metadata, *others):
        _double_old(state_dict, prefix, local_metadata)


def _double_old(state_dict, prefix, local_metadata):
    if local_metadata.get("version") is None or local_metadata["version"] < 2:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2


def model(kind, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind(4, 4), nn.BatchNorm1d(4)))


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


KINDS = pytest.mark.parametrize("kind", [Method, Hooked])


@KINDS
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", 80])
@pytest.mark.parametrize("meta", [True, False])
def test_weights_come_back_as_they_were(tmp_path, kind, safe, limit, meta):
    saved = model(kind)
    save_model(saved, tmp_path, limit, safe)
    with torch.device("meta" if meta else "cpu"):
        other = model(kind, seed=1)
    load_checkpoint_in_model(other, tmp_path)
    same(weights(other), weights(saved))


@KINDS
def test_state_dicts_and_divided_models_keep_them(tmp_path, kind):
    saved = model(kind)
    save_model(saved.state_dict(), tmp_path / "dict")
    save_gathered_model(NamedModel(saved).state_dict(), tmp_path / "gathered")
    save_gathered_model(NamedModel(saved).state_dict(), tmp_path / "pickled", safe_serialization=False)
    for folder in ("dict", "gathered", "pickled"):
        other = model(kind, seed=1)
        load_checkpoint_in_model(other, tmp_path / folder)
        same(weights(other), weights(saved))


@KINDS
def test_files_of_torch_save_are_as_torch_writes_and_reads_them(tmp_path, kind):
    saved = model(kind)
    save_model(saved, tmp_path, safe_serialization=False)
    by_torch = model(kind, seed=1)
    by_torch.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    same(weights(by_torch), weights(saved))

    torch.save({"model": saved.state_dict(), "epoch": 3}, tmp_path / "torch.bin")
    here = model(kind, seed=1)
    load_checkpoint_in_model(here, tmp_path / "torch.bin")
    same(weights(here), weights(saved))


@KINDS
@pytest.mark.parametrize("safe", [True, False])
def test_an_older_form_is_translated(tmp_path, kind, safe):
    old = weights(model(kind))
    current = {**old, "1.0.weight": old["1.0.weight"] * 2}
    save_model(with_versions(old, {"1.0": 1}), tmp_path / "old", safe_serialization=safe)
    other = model(kind, seed=1)
    load_checkpoint_in_model(other, tmp_path / "old")
    same(weights(other), current)  # version 1, and none at all, are the old form


@KINDS
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_training_states(tmp_path, kind, safe, background):
    saved = model(kind)
    content = {"models": [NamedModel(saved).state_dict()], "shared": {}, "per_rank": {}}
    if background:
        BackgroundSaver().save(tmp_path / "s", **content, safe_serialization=safe).result()
    else:
        save_training_state(tmp_path / "s", **content, safe_serialization=safe)
    checkpoint = open_training_state(tmp_path / "s")
    for load in (
        lambda module: load_weights_into(module, checkpoint.weights(0)),
        lambda module: module.load_state_dict(checkpoint.mapped_model(0)),
        lambda module: load_checkpoint_in_model(module, tmp_path / "s"),
    ):
        other = model(kind, seed=1)
        load(other)
        same(weights(other), weights(saved))


@KINDS
@pytest.mark.parametrize("safe", [True, False])
def test_merged_weights(tmp_path, kind, safe):
    saved = model(kind)
    save_training_state(tmp_path / "s", models=[NamedModel(saved).state_dict()], shared={}, per_rank={})
    merge_fsdp_weights(tmp_path / "s", tmp_path / "merged", safe_serialization=safe)
    other = model(kind, seed=1)
    load_checkpoint_in_model(other, tmp_path / "merged")
    same(weights(other), weights(saved))


def test_a_model_whose_own_method_loads_it(tmp_path):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Method(4, 4)

        def load_state_dict(self, state_dict, *options, **more):
            return super().load_state_dict(state_dict, *options, **more)

    torch.manual_seed(0)
    saved = Root()
    save_model(saved, tmp_path)
    other = Root()
    load_checkpoint_in_model(other, tmp_path)
    same(weights(other), weights(saved))


def test_ordinary_models_have_files_without_versions(tmp_path):
    ordinary = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert versions_of(NamedModel(ordinary).state_dict()) == {}
    save_model(ordinary, tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize(
    "said", ["", "[1]", '{"1.0": "x"}', '{"1.0": -1}', '{"1.0": {"version": 2}}', "{" * 5000]
)
def test_versions_that_are_none_are_refused(tmp_path, said):
    (key,) = versions_metadata({"1.0": 2})
    write_safetensors(tmp_path / "x.safetensors", weights(model(Method)), {"format": "pt", key: said})
    with pytest.raises(CorruptCheckpointError, match=f"{key} in the header of"):
        load_checkpoint_in_model(model(Method), tmp_path / "x.safetensors")


@pytest.mark.parametrize("metadata", [5, [], {"1.0": 5}, {"1.0": {"version": "2"}}, {3: {"version": 2}}])
def test_what_a_pickle_says_instead_of_versions_counts_as_none(metadata):
    state = OrderedDict(a=1)
    state._metadata = metadata
    assert versions_of(state) == {}
