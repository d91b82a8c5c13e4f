"""Opened weights: what is known before anything is read, values, and weights that rank 0 sends to others."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileChangedError,
    Part,
    open_weights,
    save_training_state,
)
from accel_ckpt.coordination.ranks import SingleProcess, WorldCoordinator
from accel_ckpt.loading.weights import BroadcastWeights, fingerprint_of
from testkit import worlds

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2, dtype=torch.int64)}


def shards(folder, *contents, weight_map):
    for number, content in enumerate(contents):
        save_file(content, folder / f"part{number}.safetensors")
    named = {name: f"part{number}.safetensors" for name, number in weight_map.items()}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": named}))
    return path


def divided(folder):
    a = WEIGHTS["a"]
    parts = [Part(a[:1], (0, 0), (4, 3)), Part(a[1:], (1, 0), (4, 3))]
    return save_training_state(folder, models=[{"a": parts, "b": WEIGHTS["b"]}], shared={}, per_rank={})


@pytest.mark.parametrize(
    ("layout", "mapped"), [("safetensors", True), ("bin", False), ("index", True), ("pieces", False)]
)
def test_every_layout_gives_the_values_that_were_written(tmp_path, layout, mapped):
    if layout == "pieces":
        path = divided(tmp_path / "c")
    elif layout == "bin":
        torch.save(WEIGHTS, path := tmp_path / "pytorch_model.bin")
    elif layout == "index":
        path = shards(tmp_path, {"a": WEIGHTS["a"]}, {"b": WEIGHTS["b"]}, weight_map={"a": 0, "b": 1})
    else:
        save_file(WEIGHTS, path := tmp_path / "model.safetensors")
    weights = open_weights(path)
    assert {name: (tuple(info.shape), info.dtype) for name, info in weights.about.items()} == {
        "a": ((4, 3), torch.float32),
        "b": ((2,), torch.int64),
    }
    weights.begin(["b", "a"])
    for name in ("b", "a"):
        assert weights.is_mapped(name) == mapped
        assert torch.equal(weights.tensor(name), WEIGHTS[name])
    weights.finish()


@pytest.mark.parametrize("given", [3, {"a": torch.ones(1)}, b"model.safetensors", None])
def test_what_is_no_path(given):
    with pytest.raises(TypeError, match=f"the checkpoint is a {type(given).__name__}; pass the path"):
        open_weights(given)


@pytest.mark.parametrize("option", [{"revision": "main"}, {"token": "t"}, {"token": False}])
def test_options_of_repositories_are_refused_for_local_paths(tmp_path, option):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="are for repositories of a hub"):
        open_weights(tmp_path / "model.safetensors", **option)


def test_the_index_decides_which_of_two_files_counts(tmp_path):
    stale = {"a": torch.zeros(4, 3), "b": WEIGHTS["b"]}
    path = shards(tmp_path, {"a": WEIGHTS["a"]}, stale, weight_map={"a": 0, "b": 1})
    weights = open_weights(path)
    assert torch.equal(weights.tensor("a"), WEIGHTS["a"])
    path = shards(tmp_path, {"a": WEIGHTS["a"]}, stale, weight_map={"a": 1, "b": 1})
    assert torch.equal(open_weights(path).tensor("a"), torch.zeros(4, 3))


def test_a_name_of_the_index_that_no_file_has(tmp_path):
    path = shards(tmp_path, {"a": WEIGHTS["a"]}, weight_map={"a": 0, "c": 0})
    with pytest.raises(CorruptCheckpointError, match=r"the index says that c are in .*part0\.safetensors"):
        open_weights(path)


def test_the_second_name_of_a_tensor_has_memory_of_its_own(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": WEIGHTS["a"]}, path, {"format": "pt", "again": "a"})
    weights = open_weights(path)
    assert weights.key_of("again") == "a"
    first, second = weights.tensor("a"), weights.tensor("again")
    assert torch.equal(second, WEIGHTS["a"])
    second += 1
    assert torch.equal(first, WEIGHTS["a"])
    assert weights.differing([("a", "again")]) == set()


def test_pairs_that_differ(tmp_path):
    nan = torch.tensor([float("nan"), 1.0])
    content = {
        "x": nan,
        "same": nan.clone(),
        "int": nan.view(torch.int32).clone(),
        "other": torch.tensor([float("nan"), 2.0]),
        "one": torch.ones(1),
        "two": torch.ones(2),
        "zero": torch.zeros(1),
        "minus": -torch.zeros(1),
    }
    save_file(content, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    pairs = [("x", name) for name in content] + [("one", "two"), ("zero", "minus"), ("one", "zero")]
    differ = {("x", name) for name in content.keys() - {"x", "same"}} | {("one", "two"), ("one", "zero")}
    assert weights.differing(pairs) == differ


@pytest.mark.parametrize("change", ["longer", "later", "replaced", "touched pieces"])
def test_files_that_change_meanwhile(tmp_path, change):
    path = tmp_path / "model.safetensors"
    if change == "touched pieces":
        opened = open_weights(divided(tmp_path / "c"))
        path = next((tmp_path / "c").glob("model-shard*"))
    else:
        save_file(WEIGHTS, path)
        opened = open_weights(path)
    opened.finish()
    if change == "longer":
        with path.open("ab") as file:
            file.write(b" ")
    elif change == "replaced":
        status = path.stat()
        path.rename(tmp_path / "old")
        path.write_bytes((tmp_path / "old").read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(FileChangedError, match=r"safetensors.*load them again"):
        opened.finish()


def test_fingerprints_know_paths_and_order(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("x")
    os.link(one, two)  # the same inode, size and time
    assert fingerprint_of([one]) == fingerprint_of([one])
    assert len({fingerprint_of(files) for files in ([one], [two], [one, two], [two, one], [])}) == 5
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.write_text("x")
    assert fingerprint_of([odd]) != fingerprint_of([one])


# weights that rank 0 sends


def broadcast(folder):
    from accel_state import PartialState

    state = PartialState()
    rank = state.process_index
    ranks = WorldCoordinator(rank, 2, rank)
    # Rank 1 does not see the files.
    weights = BroadcastWeights(folder if rank == 0 else folder / "not-there", ranks)
    about = {name: (info.shape, info.dtype) for name, info in weights.about.items()}
    mapped = weights.is_mapped("a")
    differ = weights.differing([("a", "b")] if rank else [("a", "a")])
    wanted = (["a"], ["c", "b", "a"])[rank]
    weights.begin(wanted)
    found = {name: weights.tensor(name) for name in wanted}
    weights.finish()
    none = weights.differing([])
    errors = []
    for broken in (folder / "gone", folder):
        try:
            BroadcastWeights(broken, ranks, revision="main")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return about, mapped, differ, found, none, weights.fingerprint, errors


def test_rank_0_sends_what_any_rank_needs(tmp_path):
    content = {**WEIGHTS, "c": torch.full((2, 2), 7.0, dtype=torch.bfloat16), "unused": torch.zeros(3)}
    save_file(content, tmp_path / "model.safetensors")
    first, second = worlds.run(broadcast, 2, tmp_path)
    for about, _, differ, _, none, _, _ in (first, second):
        assert about == {name: (tuple(value.shape), value.dtype) for name, value in content.items()}
        assert differ == {("a", "b")}
        assert none == set()
    assert (first[1], second[1]) == (True, False)
    assert first[5] == second[5] == fingerprint_of([tmp_path / "model.safetensors"])
    assert list(first[3]) == ["a"]
    assert torch.equal(first[3]["a"], content["a"])
    assert list(second[3]) == ["c", "b", "a"]
    for name, value in second[3].items():
        assert torch.equal(value, content[name])
    for here, there in zip(first[6], second[6], strict=True):
        assert here.startswith("ValueError: revision and token")
        assert there.startswith("CheckpointError: opening the checkpoint")
        assert "rank 0: ValueError: revision" in there


def test_a_rank_that_cannot_open_them_says_why(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        BroadcastWeights(tmp_path / "gone", SingleProcess())


@pytest.mark.parametrize("kind", ["tf", "flax"])
def test_weights_of_another_framework_are_refused(tmp_path, kind):
    save_file(WEIGHTS, tmp_path / "model.safetensors", {"format": kind})
    with pytest.raises(CorruptCheckpointError, match=f"was written for the framework '{kind}'"):
        open_weights(tmp_path)


def test_a_message_shows_the_beginning_of_what_a_header_says(tmp_path):
    header = json.dumps({"a" * 10_000: {"dtype": ["F32"] * 10_000, "shape": [1], "data_offsets": [0, 4]}})
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(CorruptCheckpointError) as caught:
        open_weights(tmp_path / "m.safetensors")
    assert len(str(caught.value)) < 1000
