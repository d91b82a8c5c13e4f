"""Distributed checkpoints of torch, written by torch and read without running anything from them."""

import collections
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadReport,
    StateMismatchError,
    UnsafeCheckpointError,
    load_checkpoint_in_model,
)
from accel_ckpt.foreign.dcp import DcpFolder, is_dcp_folder
from accel_state.errors import NotAvailableError

STATE = {
    "model": {
        "layers.0.weight": torch.arange(12.0).reshape(3, 4),
        "step": torch.tensor(7),
        "half": torch.ones(2).bfloat16(),
    },
    "plain": {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "names": ["a", "b"],
        "none": None,
        "deep": [{"x": 1}, {"x": 2}],
    },
}


@pytest.fixture
def folder(tmp_path):
    return write(STATE, tmp_path / "dcp")


def write(state, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))
    return path


def test_tensors_and_values_come_back(folder):
    content = DcpFolder(folder)
    assert is_dcp_folder(folder)
    assert content.top_keys() == ["model", "plain"]
    model = content.tree("model")
    assert model.keys() == STATE["model"].keys()
    for name, value in STATE["model"].items():
        assert torch.equal(model[name], value)
        assert model[name].dtype == value.dtype
    assert content.tree("plain") == STATE["plain"]


def test_one_file_per_tensor(tmp_path):
    folder = write(STATE, tmp_path / "dcp", single_file_per_rank=False, thread_count=2)
    assert torch.equal(DcpFolder(folder).tree("model")["step"], torch.tensor(7))


@pytest.mark.parametrize("nested", [True, False])
def test_it_loads_into_a_model(tmp_path, nested):
    model, again = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    state = model.state_dict()
    folder = write({"model": state} if nested else state, tmp_path / "dcp")
    assert load_checkpoint_in_model(again, folder) == LoadReport()
    assert torch.equal(again.weight, model.weight)
    again.register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(StateMismatchError, match="is not in the checkpoint: extra"):
        load_checkpoint_in_model(again, folder)


def test_several_keys_without_a_model(tmp_path):
    folder = write({"a": {"x": torch.ones(1)}, "b": {"y": torch.ones(1)}}, tmp_path / "dcp")
    with pytest.raises(CheckpointNotFoundError, match="holds a, b and no model under the key 'model'"):
        load_checkpoint_in_model(torch.nn.Linear(1, 1), folder)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_metadata_that_would_run_code(folder, capsys):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata was not read: it refers to builtins\.print"):
        DcpFolder(folder)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "call",
    [
        (os.path.join, ("a", "b")),
        (collections.Counter, ()),
        (getattr, ("a", "upper")),
        (torch.load, ("x",)),
        (eval, ("1",)),
    ],
    ids=["path", "class", "getattr", "torch.load", "eval"],
)
def test_metadata_may_name_nothing_else(folder, call):
    class Call:
        def __reduce__(self):
            return call

    (folder / ".metadata").write_bytes(pickle.dumps(Call()))
    with pytest.raises(UnsafeCheckpointError, match="it refers to"):
        DcpFolder(folder)


def test_values_that_would_run_code(tmp_path, capsys):
    folder = write({"model": {"x": Evil(), "w": torch.ones(1)}}, tmp_path / "dcp")
    capsys.readouterr()
    with pytest.raises(UnsafeCheckpointError, match=r"the value 'model\.x' in .*__0_0\.distcp was not read"):
        DcpFolder(folder).tree("model")
    assert "executed" not in capsys.readouterr().out


def test_a_file_that_is_cut_or_gone(folder):
    data = folder / "__0_0.distcp"
    raw = data.read_bytes()
    data.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is missing or too short"):
        DcpFolder(folder)
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is missing or too short"):
        DcpFolder(folder)


def test_damaged_bytes(folder):
    data = folder / "__0_0.distcp"
    data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match=r"__0_0\.distcp"):
        DcpFolder(folder).tree("model")


@pytest.mark.parametrize("raw", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps([])])
def test_metadata_that_is_none(folder, raw):
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        DcpFolder(folder)


def test_metadata_that_is_cut_anywhere(folder):
    path = folder / ".metadata"
    raw = path.read_bytes()
    for length in range(0, len(raw), 97):
        path.write_bytes(raw[:length])
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
            DcpFolder(folder)


def change(folder, edit):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../elsewhere.distcp", "/etc/hostname"])
def test_a_file_outside_the_folder(folder, name):
    def edit(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change(folder, edit)
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        DcpFolder(folder)


def test_a_piece_of_another_rank_is_missing(folder):
    def edit(metadata):
        about = metadata.state_dict_metadata["model.layers.0.weight"]
        about.size = torch.Size([6, 4])

    change(folder, edit)
    with pytest.raises(
        CorruptCheckpointError, match=r"does not hold the whole tensor 'model.layers.0.weight'"
    ):
        DcpFolder(folder)


def test_compression_is_named(folder):
    def edit(metadata):
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]

    change(folder, edit)
    with pytest.raises(NotAvailableError, match=r"compressed \(stream.zstd/1\)"):
        DcpFolder(folder)


def test_no_metadata(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"no \.metadata file"):
        DcpFolder(tmp_path)
