"""Folders of offloaded weights."""

import copy
import json
import os
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    PrefixedDataset,
    add_hook_to_module,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
]


def values(dtype, shape=(3, 5)):
    count = int(np.prod(shape))
    return (torch.arange(count) % 7).reshape(shape).to(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# single weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (1,)], ids=str)
def test_a_weight_comes_back_bit_for_bit(tmp_path, dtype, shape):
    weight, index = values(dtype, shape), {}
    assert offload_weight(weight, "block.weight", tmp_path, index) is index
    assert os.listdir(tmp_path) == ["block.weight.dat"]
    assert index == {"block.weight": {"dtype": str(dtype)[6:], "shape": list(shape)}}
    found = load_offloaded_weight(tmp_path / "block.weight.dat", index["block.weight"])
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    assert torch.equal(bits(found), bits(weight))


def test_the_file_is_what_numpy_maps(tmp_path):
    weight = values(torch.float32).t()
    offload_weight(weight, "weight", tmp_path)
    mapped = np.memmap(tmp_path / "weight.dat", dtype="float32", shape=(5, 3), mode="r")
    assert np.array_equal(mapped, weight.numpy())


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_a_weight_without_elements(tmp_path, shape):
    index = offload_weight(torch.empty(shape), "weight", tmp_path, {})
    assert load_offloaded_weight(tmp_path / "weight.dat", index["weight"]).shape == shape
    assert np.memmap(tmp_path / "weight.dat", dtype="float32", shape=shape, mode="r").shape == shape


def test_without_an_index_only_the_file_is_written(tmp_path):
    assert offload_weight(torch.ones(2), "weight", tmp_path) is None


def test_writing_to_a_loaded_weight_does_not_reach_the_file(tmp_path):
    index = offload_weight(torch.ones(4), "weight", tmp_path, {})
    found = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
    found.zero_()
    assert (tmp_path / "weight.dat").read_bytes() == torch.ones(4).numpy().tobytes()


def test_replacing_a_file_does_not_change_what_was_loaded(tmp_path):
    index = offload_weight(torch.ones(4), "weight", tmp_path, {})
    found = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
    offload_weight(torch.zeros(4), "weight", tmp_path)
    assert found.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_file_of_another_size_is_refused(tmp_path, size):
    (tmp_path / "weight.dat").write_bytes(bytes(size))
    with pytest.raises(
        CorruptCheckpointError, match=rf"has {size} bytes.*\[2\], as in its index, takes 8.*another model"
    ):
        load_offloaded_weight(tmp_path / "weight.dat", {"dtype": "float32", "shape": [2]})


@pytest.mark.parametrize(
    "info",
    [
        {"shape": [2]},
        {"dtype": "float32"},
        {"dtype": "load", "shape": [2]},
        {"dtype": "qint8", "shape": [2]},
        {"dtype": 3, "shape": [2]},
        {"dtype": "float32", "shape": [-2]},
        {"dtype": "float32", "shape": [2.0]},
        {"dtype": "float32", "shape": [True]},
        {"dtype": "float32", "shape": 2},
        {"dtype": "float32", "shape": [1 << 70]},
    ],
    ids=str,
)
def test_descriptions_that_are_none_are_refused(tmp_path, info):
    (tmp_path / "weight.dat").write_bytes(bytes(8))
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        load_offloaded_weight(tmp_path / "weight.dat", info)


def test_files_that_are_none_are_refused(tmp_path):
    info = {"dtype": "float32", "shape": [2]}
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        load_offloaded_weight(tmp_path / "weight.dat", info)
    (tmp_path / "folder.dat").mkdir()
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        load_offloaded_weight(tmp_path / "folder.dat", info)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_are_refused_without_waiting_for_them(tmp_path):
    os.mkfifo(tmp_path / "weight.dat")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        load_offloaded_weight(tmp_path / "weight.dat", {"dtype": "float32", "shape": [2]})


@pytest.mark.parametrize("name", ["../weight", "/weight", "a/../../weight"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        offload_weight(torch.ones(1), name, folder)
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        offload_state_dict(folder, {"fine": torch.ones(1), name: torch.ones(1)})
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        OffloadedWeightsLoader(save_folder=folder, index={name: {"dtype": "float32", "shape": [1]}})[name]
    (folder / "index.json").write_text(json.dumps({name: {"dtype": "float32", "shape": [1]}}))
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        OffloadedWeightsLoader(save_folder=folder)
    assert os.listdir(tmp_path) == ["folder"]


def test_links_that_leave_the_folder_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(4))
    (folder / "weight.dat").symlink_to(tmp_path / "secret")
    loader = OffloadedWeightsLoader(save_folder=folder, index={"weight": {"dtype": "float32", "shape": [1]}})
    with pytest.raises(UnsafeCheckpointError, match="a link to"):
        loader["weight"]


# the index


def test_index_entries_are_added(tmp_path):
    save_offload_index(None, tmp_path)
    save_offload_index({}, tmp_path)
    assert os.listdir(tmp_path) == []
    save_offload_index(
        {"a": {"dtype": "float32", "shape": [1]}, "b": {"dtype": "int8", "shape": []}}, tmp_path
    )
    save_offload_index({"b": {"dtype": "bool", "shape": []}}, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == {
        "a": {"dtype": "float32", "shape": [1]},
        "b": {"dtype": "bool", "shape": []},
    }


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', '{"a": {}, "a": {}}', "{"])
def test_an_index_that_is_none_is_refused_and_stays(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CorruptCheckpointError):
        save_offload_index({"b": {"dtype": "bool", "shape": []}}, tmp_path)
    with pytest.raises(CorruptCheckpointError):
        OffloadedWeightsLoader(save_folder=tmp_path)
    assert (tmp_path / "index.json").read_text() == content


def test_a_state_dict_with_a_tensor_without_values_writes_nothing(tmp_path):
    with pytest.raises(UnsupportedValueError, match="'b' is on the meta device"):
        offload_state_dict(tmp_path / "new", {"a": torch.ones(1), "b": torch.ones(1, device="meta")})
    assert os.listdir(tmp_path) == []


# the loader


def test_the_loader_reads_a_folder(tmp_path):
    state_dict = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    offload_state_dict(tmp_path / "new", state_dict)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(state_dict)
    assert len(loader) == len(state_dict)
    assert all(torch.equal(loader[name], state_dict[name]) for name in state_dict)
    assert "0.weight" in loader
    assert "other" not in loader
    with pytest.raises(KeyError, match="other"):
        loader["other"]


def test_memory_comes_before_the_folder(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    loader = OffloadedWeightsLoader({"c": torch.ones(1), "a": torch.ones(1)}, tmp_path)
    assert {name: value.item() for name, value in loader.items()} == {"c": 1, "a": 1, "b": 0}
    assert list(loader) == ["c", "a", "b"]


def test_a_loader_needs_a_source(tmp_path):
    with pytest.raises(ValueError, match=r"pass state_dict.*save_folder.*or index"):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"in a file a\.dat.*no save_folder"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": []}})["a"]
    assert len(OffloadedWeightsLoader({})) == 0


@pytest.mark.parametrize("device", [None, "meta"])
def test_safetensors_entries(tmp_path, device):
    save_file({"inner": torch.arange(3.0), "b": torch.ones(2)}, tmp_path / "weights.safetensors")
    file = str(tmp_path / "weights.safetensors")
    index = {
        "a": {"safetensors_file": file, "weight_name": "inner", "dtype": "bfloat16"},
        "b": {"safetensors_file": file},
    }
    loader = OffloadedWeightsLoader(index=index, device=device)
    assert loader["a"].dtype == torch.bfloat16
    if device is None:
        assert loader["a"].tolist() == [0, 1, 2]
        assert loader["b"].data_ptr() == loader["b"].data_ptr()  # mapped once
    else:
        assert loader["b"].is_meta


def test_a_safetensors_file_of_another_model_is_refused(tmp_path):
    save_file({"other": torch.ones(1)}, tmp_path / "weights.safetensors")
    loader = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(tmp_path / "weights.safetensors")}})
    with pytest.raises(StateMismatchError, match=r"weights\.safetensors has no tensor 'a'"):
        loader["a"]


@pytest.mark.parametrize("how", ["relative", "absolute"])
def test_the_index_of_a_folder_names_files_in_it_only(tmp_path, how):
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (folder, tmp_path):
        save_file({"a": torch.ones(1)}, place / "weights.safetensors")
    inside = "weights.safetensors" if how == "relative" else str(folder / "weights.safetensors")
    outside = "../weights.safetensors" if how == "relative" else str(tmp_path / "weights.safetensors")
    (folder / "index.json").write_text(json.dumps({"a": {"safetensors_file": inside}}))
    assert OffloadedWeightsLoader(save_folder=folder)["a"].item() == 1
    (folder / "index.json").write_text(json.dumps({"a": {"safetensors_file": outside}}))
    with pytest.raises(UnsafeCheckpointError):
        OffloadedWeightsLoader(save_folder=folder)
    (folder / "index.json").write_text(json.dumps({"a": {"safetensors_file": 3}}))
    with pytest.raises(CorruptCheckpointError, match="the file 3, which is not a name"):
        OffloadedWeightsLoader(save_folder=folder)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_loader_map_the_files_themselves(tmp_path, copied):
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    loader = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(tmp_path / "weights.safetensors")}})
    loader["a"].zero_()
    assert copied(loader)["a"].item() == 1


def test_the_index_of_another_model_is_noticed_where_its_values_are_used(tmp_path):
    offload_state_dict(tmp_path, nn.Linear(3, 4).state_dict())
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    module = nn.Linear(4, 3)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with pytest.raises(StateMismatchError, match="weights of another model"):
        module(torch.ones(1, 4))
    with pytest.raises(StateMismatchError, match="no values for running"):
        add_hook_to_module(
            nn.BatchNorm1d(4),
            AlignDevicesHook("cpu", offload=True, weights_map=weights, offload_buffers=True),
        )


# loading into a model


def test_weights_are_loaded_and_ties_kept(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied().to("meta")
    other[1].weight = other[0].weight
    offload_state_dict(tmp_path, model.state_dict())
    load_offloaded_weights(other, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert other[0].weight is other[1].weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    own = other[0].weight
    load_offloaded_weights(other, None, tmp_path)
    load_offloaded_weights(other, {}, tmp_path)
    assert other[0].weight is own


def test_a_tie_of_which_one_name_is_there(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    offload_state_dict(tmp_path, {"1.weight": torch.eye(2)})
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.detach(), torch.eye(2))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"other": torch.ones(2)}, "the model has no 'other'"),
        ({"bias": torch.ones(3)}, r"'bias' has the shape \(3,\), in the model \(2,\)"),
        (
            {"bias": torch.ones(2, dtype=torch.int64)},
            "'bias' has the dtype torch.int64, in the model torch.float32",
        ),
    ],
)
def test_weights_of_another_model_change_nothing(tmp_path, entry, message):
    model = nn.Linear(2, 2)
    before = dict(model.named_parameters())
    offload_state_dict(tmp_path, {"weight": torch.zeros(2, 2), **entry})
    with pytest.raises(StateMismatchError, match=f"another model: {message}"):
        load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_int8_weights_take_their_scales_along(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    weights = {"weight": torch.ones(2, 2, dtype=torch.int8), "SCB": torch.ones(2)}
    offload_state_dict(tmp_path, weights)
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert model.weight.dtype == torch.int8
    assert torch.equal(model.weight.SCB, torch.ones(2))


# views of mappings


def test_a_prefixed_dataset_is_the_part_of_a_mapping():
    part = PrefixedDataset({"a.w": 1, "a.b": 2, "ab.w": 3}, "a.")
    assert dict(part) == {"w": 1, "b": 2}
    assert len(part) == 2
    assert "w" in part
    assert "a.w" not in part
    with pytest.raises(KeyError, match=r"a\.x"):
        part["x"]


def test_a_prefixed_dataset_does_not_load_to_look():
    class Loads(OffloadedWeightsLoader):
        __contains__ = Mapping.__contains__

        def __getitem__(self, key):
            raise AssertionError("loaded")

    part = PrefixedDataset(Loads({"a.w": 1}), "a.")
    assert "w" in part
    assert "x" not in part


def test_submodules_of_a_state_dict():
    state_dict = {"h.1.w": 1, "h.10.w": 2, "h.1": 3, "x": 4}
    assert extract_submodules_state_dict(state_dict, ["h.1"]) == {"h.1.w": 1, "h.1": 3}
    assert extract_submodules_state_dict(state_dict, ["x", "h.10"]) == {"x": 4, "h.10.w": 2}
    assert extract_submodules_state_dict(state_dict, []) == {}
