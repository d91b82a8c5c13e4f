"""save_model's files are those that other libraries write and read."""

import errno
import io
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from accel_ckpt import (
    CheckpointSaveError,
    UnsupportedValueError,
    load,
    load_checkpoint_in_model,
    load_state_dict,
    save,
    save_model,
    save_training_state,
)
from accel_ckpt.disk import Disk
from testkit.memory import mapped_weights


class Tied(nn.Module):
    """Embedding and head share their weight, as in transformers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def net():
    return nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 10))


def listing(folder):
    return sorted(os.listdir(folder))


def test_one_file(tmp_path):
    model = net()
    assert save_model(model, tmp_path / "new" / "folder") == ("model.safetensors",)
    path = tmp_path / "new" / "folder" / "model.safetensors"
    found = safetensors.torch.load_file(path)
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in model.state_dict().items()}
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_bin(tmp_path):
    model = net()
    save_model(model, tmp_path, safe_serialization=False)
    assert listing(tmp_path) == ["pytorch_model.bin"]
    again = net()
    again.load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("safe", [True, False])
def test_shards_and_index(tmp_path, safe):
    model = net()
    save_model(model, tmp_path, max_shard_size="500B", safe_serialization=safe)
    stem, extension = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    text = (tmp_path / f"{stem}.{extension}.index.json").read_text()
    content = json.loads(text)
    assert text == json.dumps(content, indent=2, sort_keys=True) + "\n"
    assert list(content) == ["metadata", "weight_map"]
    state_dict = model.state_dict()
    total = sum(t.numel() * t.element_size() for t in state_dict.values())
    assert content["metadata"] == {"total_size": total}
    files = sorted(set(content["weight_map"].values()))
    assert files == [f"{stem}-{i:05d}-of-{len(files):05d}.{extension}" for i in range(1, len(files) + 1)]
    assert listing(tmp_path) == sorted([*files, f"{stem}.{extension}.index.json"])
    for name, file in content["weight_map"].items():
        oracle = safetensors.torch.load_file if safe else lambda p: torch.load(p, weights_only=True)
        assert torch.equal(oracle(tmp_path / file)[name], state_dict[name])


@pytest.mark.parametrize("safe", [True, False])
def test_t32_tied_weights(tmp_path, safe):
    model = Tied()
    save_model(model, tmp_path, safe_serialization=safe)
    if safe:
        found = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert set(found) == {"embed.weight", "body.weight", "body.bias"}  # the first name
        again = Tied()
        missing, unexpected = safetensors.torch.load_model(again, tmp_path / "model.safetensors")
        assert not missing
        assert not unexpected
        loaded = load_state_dict(tmp_path / "model.safetensors")
    else:
        loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert set(loaded) == set(model.state_dict())


def test_t32_tied_weights_stay_in_one_bin_shard(tmp_path):
    save_model(Tied(), tmp_path, max_shard_size=100, safe_serialization=False)
    weight_map = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert weight_map["head.weight"] == weight_map["embed.weight"]
    assert len(set(weight_map.values())) > 1


def test_views_are_saved_without_the_rest_of_their_storage(tmp_path):
    big = torch.zeros(100_000)
    for safe in (True, False):
        save_model({"a": big[:5], "b": big[5:10]}, tmp_path, safe_serialization=safe)
        assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 4000


STALE = [
    "model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model-00001-of-00003.bin",
    "pytorch_model.bin.index.json",
]  # fmt: skip
KEPT = [
    "config.json",
    "tokenizer.json",
    "model_1.safetensors",
    "adapter_model.safetensors",
    "model-final.safetensors",
]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["1MB", "500B"])
def test_t8_the_folder_holds_exactly_the_last_save(tmp_path, safe, size):
    for name in (*STALE, *KEPT):
        (tmp_path / name).write_text("old")
    written = save_model(net(), tmp_path, max_shard_size=size, safe_serialization=safe)
    assert listing(tmp_path) == sorted([*written, *KEPT])
    assert all((tmp_path / name).read_text() == "old" for name in KEPT)


def test_t8_sharded_then_whole_then_sharded(tmp_path):
    for size in ("500B", "1GB", "900B", "1GB"):
        model = net()
        written = save_model(model, tmp_path, max_shard_size=size)
        assert listing(tmp_path) == sorted(written)
        found = {}
        for path in tmp_path.glob("*.safetensors"):
            found |= safetensors.torch.load_file(path)
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_mapped_checkpoint_stays_valid_when_it_is_saved_over(tmp_path):
    first, second = net(), net()
    save_model(first, tmp_path)
    mapped = mapped_weights(tmp_path / "model.safetensors")
    save_model(second, tmp_path)
    assert torch.equal(mapped["0.weight"], first[0].weight)
    mapped["0.weight"].zero_()
    assert torch.equal(load_state_dict(tmp_path / "model.safetensors")["0.weight"], second[0].weight)


def test_saving_over_the_file_that_the_model_is_mapped_from(tmp_path):
    save_model(net(), tmp_path)
    mapped = mapped_weights(tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in mapped.items()}
    save_model(mapped, tmp_path)
    found = load_state_dict(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_t33_names_do_not_carry_wrappers(tmp_path):
    save_model(torch.compile(nn.DataParallel(net())), tmp_path)
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == set(net().state_dict())


def test_a_failure_midway_keeps_the_old_weights(tmp_path):
    class Full(Disk):
        left = 3

        def write(self, descriptor, data):
            self.left -= 1
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(descriptor, data)

    first = net()
    written = save_model(first, tmp_path, max_shard_size="500B")
    told = (
        r"No space left.* \(writing model-0000\d-of-0000\d\.safetensors\); what was there before is unchanged"
    )
    with pytest.raises(CheckpointSaveError, match=told):
        save_model(net(), tmp_path, max_shard_size="500B", disk=Full())
    assert listing(tmp_path) == sorted(written)
    found = net()
    load_checkpoint_in_model(found, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), first.parameters(), strict=True))


def test_what_a_killed_save_left_is_removed(tmp_path):
    names = [".model.safetensors.part-0123456789ab", ".model-00001-of-00002.safetensors.part-0123456789ab"]
    others = [".config.json.part-0123456789ab", ".model.safetensors.part-x"]
    for name in (*names, *others):
        (tmp_path / name).write_text("half")
    save_model(net(), tmp_path)
    assert set(names) < set(listing(tmp_path))  # they may belong to a save that is still writing
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    save_model(net(), tmp_path)
    assert listing(tmp_path) == sorted([*others, "model.safetensors"])


def test_bad_targets_and_values(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointSaveError, match=r"file is a file; weights go to a folder"):
        save_model(net(), tmp_path / "file")
    state = save_training_state(tmp_path / "c", models=[], shared={}, per_rank={})
    with pytest.raises(CheckpointSaveError, match="is a training state"):
        save_model(net(), state)
    with torch.device("meta"):
        empty = net()
    with pytest.raises(UnsupportedValueError, match=r"'0\.weight' is on the meta device"):
        save_model(empty, tmp_path / "m")
    with pytest.raises(UnsupportedValueError, match="'x' is a int, and weights are tensors"):
        save_model({"x": 1}, tmp_path / "m")
    with pytest.raises(ValueError, match="'10XB' is not a size"):
        save_model(net(), tmp_path / "m", max_shard_size="10XB")
    assert not (tmp_path / "m").exists()


# save and load


def test_save_and_load_objects(tmp_path):
    save({"a": torch.ones(2), "n": np.arange(3), "f": np.float64(0.5)}, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", map_location="cpu")
    assert found["n"].tolist() == [0, 1, 2]
    assert found["f"] == 0.5
    buffer = io.BytesIO()
    save([1, torch.zeros(1)], buffer)
    buffer.seek(0)
    assert load(buffer)[0] == 1


def test_what_a_killed_save_of_an_object_left_is_removed(tmp_path):
    left = tmp_path / f".o.pt.saving-{'0' * 12}@{socket.gethostname()}"
    other = tmp_path / f".p.pt.saving-{'0' * 12}@{socket.gethostname()}"
    for folder in (left, other):
        folder.mkdir()
        (folder / "o.pt").write_text("half")
    save({"a": 1}, tmp_path / "o.pt")
    assert listing(tmp_path) == [other.name, "o.pt"]


def test_a_full_disk_keeps_an_object(tmp_path, monkeypatch):
    def full(self, descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    save({"a": 1}, tmp_path / "o.pt")
    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(CheckpointSaveError, match=r"o\.pt failed: .*No space left.* before is unchanged"):
        save({"a": 2}, tmp_path / "o.pt")
    assert listing(tmp_path) == ["o.pt"]
    assert load(tmp_path / "o.pt") == {"a": 1}


def test_save_as_safetensors(tmp_path):
    tied = torch.ones(2)
    save({"a": tied, "b": tied}, tmp_path / "x", safe_serialization=True)
    assert set(safetensors.torch.load_file(tmp_path / "x")) == {"a"}
    buffer = io.BytesIO()
    save({"a": tied}, buffer, safe_serialization=True)
    assert torch.equal(safetensors.torch.load(buffer.getvalue())["a"], tied)


@pytest.mark.parametrize("value", [[1], {"a": 1}, torch.ones(1)])
def test_only_tensors_by_name_go_to_safetensors(tmp_path, value):
    with pytest.raises(UnsupportedValueError, match="pass a dictionary of tensors"):
        save(value, tmp_path / "x", safe_serialization=True)
    assert listing(tmp_path) == []


class Evil:
    def __reduce__(self):
        return (os.getcwd, ())


def test_t25_load_runs_no_code_unless_told(tmp_path):
    save({"x": Evil()}, tmp_path / "x.pt")
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(Exception, match="Weights only load failed"):
        load(tmp_path / "x.pt")
    assert set(torch.serialization.get_safe_globals()) == before
    assert load(tmp_path / "x.pt", weights_only=False) == {"x": os.getcwd()}


def test_load_reads_empty_arrays(tmp_path):
    torch.save({"none": np.zeros(0, dtype=np.float32), "some": np.arange(2)}, tmp_path / "x.bin")
    found = load(tmp_path / "x.bin")
    assert found["none"].shape == (0,)
    assert found["some"].tolist() == [0, 1]


@pytest.mark.parametrize("safe", [True, False])
def test_values_of_conjugate_views(tmp_path, safe):
    base = torch.tensor([1 + 2j, 3 - 4j])
    weights = {"a": base, "b": base.conj(), "c": base.imag, "d": base.conj().imag}
    [file] = save_model(weights, tmp_path, safe_serialization=safe)
    found = torch.load(tmp_path / file) if not safe else safetensors.torch.load_file(tmp_path / file)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [1 + 2j, 3 - 4j], "b": [1 - 2j, 3 + 4j], "c": [2, -4], "d": [-2, 4]
    }  # fmt: skip


def test_a_conjugate_view_saved_to_an_open_file():
    buffer = io.BytesIO()
    save({"b": torch.tensor([1 + 2j]).conj()}, buffer, safe_serialization=True)
    assert safetensors.torch.load(buffer.getvalue())["b"].tolist() == [1 - 2j]


@pytest.mark.parametrize("names", [["pt"], ["a", "format"], ["format", "a"], ["a", "DCP_SHARDING_INFO"]])
def test_names_that_mean_something_in_a_header(tmp_path, names):
    shared = torch.arange(3.0)
    save_model(dict.fromkeys(names, shared), tmp_path)
    found = load_state_dict(tmp_path / "model.safetensors")
    assert sorted(found) == sorted(names)
    assert all(torch.equal(tensor, shared) for tensor in found.values())


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_a_header_cannot_hold(tmp_path, name):
    weights = {name: torch.ones(2)}
    with pytest.raises(UnsupportedValueError, match="has a name that"):
        save_model(weights, tmp_path)
    with pytest.raises(UnsupportedValueError, match="has a name that"):
        save(weights, io.BytesIO(), safe_serialization=True)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("safe", [True, False])
def test_a_lazy_model_is_refused(tmp_path, safe):
    with pytest.raises(UnsupportedValueError, match=r"'0\.weight' is lazy"):
        save_model(nn.Sequential(nn.LazyLinear(2)), tmp_path, safe_serialization=safe)


def test_a_bin_of_one_storage_with_two_dtypes(tmp_path):
    floats = torch.arange(4.0)
    weights = {"f": floats, "i": floats.view(torch.int32)}
    save_model(weights, tmp_path, safe_serialization=False)
    found = torch.load(tmp_path / "pytorch_model.bin")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_bin_holds_no_subclass_that_could_not_be_read(tmp_path):
    class Marked(torch.Tensor):
        pass

    save_model({"w": torch.ones(2).as_subclass(Marked)}, tmp_path, safe_serialization=False)
    assert type(load_state_dict(tmp_path / "pytorch_model.bin")["w"]) is torch.Tensor


def test_a_bin_of_sparse_tensors(tmp_path):
    save_model({"w": torch.eye(2).to_sparse()}, tmp_path, safe_serialization=False)
    assert torch.equal(load_state_dict(tmp_path / "pytorch_model.bin")["w"].to_dense(), torch.eye(2))


class Keeps(Disk):
    """Cannot remove files."""

    def unlink(self, path):
        raise PermissionError(1, "Operation not permitted", str(path))


def test_an_old_file_that_cannot_be_removed_is_named_and_stays(tmp_path):
    model = net()
    save_model(model, tmp_path, safe_serialization=False)
    with pytest.warns(UserWarning, match="pytorch_model.bin is of an earlier save and could not be removed"):
        assert save_model(model, tmp_path, disk=Keeps()) == ("model.safetensors",)
    assert (tmp_path / "pytorch_model.bin").is_file()


def test_an_old_file_that_readers_would_prefer_is_an_error(tmp_path):
    model = net()
    save_model(model, tmp_path)
    with pytest.raises(CheckpointSaveError, match=r"readers choose the old model\.safetensors"):
        save_model(model, tmp_path, safe_serialization=False, disk=Keeps())
    assert (tmp_path / "pytorch_model.bin").is_file()


class _Extra(nn.Linear):
    def __init__(self, state):
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("state", "safe", "told"),
    [
        ({"scale": 1.0}, True, "safe_serialization=False"),
        (Path("x"), False, "only by running code"),
        (Path("x"), True, "safetensors files hold only tensors"),
    ],
)
def test_extra_state_that_a_format_cannot_hold(tmp_path, state, safe, told):
    with pytest.raises(UnsupportedValueError, match=rf"'_extra_state'.*{told}"):
        save_model(_Extra(state), tmp_path / "x", safe_serialization=safe)
    assert not (tmp_path / "x").exists()
