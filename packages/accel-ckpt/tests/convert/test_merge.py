"""Merging: the same weights in plain files, a piece at a time, and nothing lost on the way."""

import errno
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedValueError,
    load_checkpoint_in_model,
    merge_fsdp_weights,
    merge_weights,
    open_weights,
    save_model,
    save_training_state,
)
from accel_ckpt.disk import Disk

FIXTURES = Path(__file__).parent.parent / "fixtures" / "accelerate-1.15"
SHARDED = FIXTURES / "fsdp_sharded" / "checkpoint"
FULL = FIXTURES / "fsdp_full" / "checkpoint"
WEIGHTS = {
    "body.weight": torch.arange(24.0).reshape(6, 4),
    "body.bias": torch.ones(6),
    "head.weight": torch.zeros(1, 6),
}


def expected():
    """What FSDP's other layout holds at the same step, by torch alone."""
    return torch.load(FULL / "pytorch_model_fsdp.bin", weights_only=True)


def assert_same(found, weights):
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype


def linear(width, height):
    return torch.nn.Linear(width, height, bias=False)


def write_dcp(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return path


@pytest.mark.parametrize(
    "source",
    [SHARDED, SHARDED / "pytorch_model_fsdp_0", FULL, FULL / "pytorch_model_fsdp.bin"],
    ids=lambda p: p.name,
)
def test_fsdp_checkpoints_of_accelerate(source, tmp_path):
    assert merge_weights(source, tmp_path / "out") == ("model.safetensors",)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected())


def test_the_name_of_accelerate(tmp_path):
    merge_fsdp_weights(str(SHARDED / "pytorch_model_fsdp_0"), str(tmp_path / "out"), False)
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), expected())


@pytest.mark.parametrize("safe", [True, False])
def test_shards_with_an_index(safe, tmp_path):
    names = merge_weights(SHARDED, tmp_path, safe, max_shard_size=100)
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in expected().values())
    found = {}
    for file in names[:-1]:
        found |= load_file(tmp_path / file) if safe else torch.load(tmp_path / file, weights_only=True)
    assert_same(found, expected())
    assert index["weight_map"].keys() == expected().keys()
    again = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 6), "head": linear(6, 1)})
    load_checkpoint_in_model(again, tmp_path)
    assert_same(again.state_dict(), expected())


@pytest.mark.parametrize("safe", [True, False])
def test_shards_of_save_model_become_one(safe, tmp_path):
    save_model(WEIGHTS, tmp_path / "parts", max_shard_size=30, safe_serialization=safe)
    merge_weights(tmp_path / "parts", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)


@pytest.mark.parametrize("before", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("after", [True, False], ids=["to safetensors", "to pickle"])
def test_tied_names_stay(before, after, tmp_path):
    tied = {**WEIGHTS, "copy.weight": WEIGHTS["body.weight"]}
    save_model(tied, tmp_path / "parts", max_shard_size=120, safe_serialization=before)
    names = merge_weights(tmp_path / "parts", tmp_path / "out", after)
    model = torch.nn.ModuleDict(
        {
            "body": torch.nn.Linear(4, 6),
            "head": torch.nn.Linear(6, 1, bias=False),
            "copy": torch.nn.Linear(4, 6, bias=False),
        }
    )
    load_checkpoint_in_model(model, tmp_path / "out", strict=True)
    assert_same(model.state_dict(), tied)
    size = sum(t.numel() * 4 for t in WEIGHTS.values())
    assert size < (tmp_path / "out" / names[0]).stat().st_size < size + (4000 if not after else 400)


def test_a_training_state(tmp_path):
    one = save_training_state(tmp_path / "one", models=[WEIGHTS], shared={}, per_rank={}, max_shard_size=30)
    merge_weights(one, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)
    two = save_training_state(
        tmp_path / "two", models=[WEIGHTS, {"x": torch.ones(2)}], shared={}, per_rank={}
    )
    with pytest.raises(
        CheckpointNotFoundError, match=r"holds 2 models; pass the file .*model_1\.safetensors"
    ):
        merge_weights(two, tmp_path / "other")
    merge_weights(two / "model_1.safetensors", tmp_path / "other")
    assert_same(load_file(tmp_path / "other" / "model.safetensors"), {"x": torch.ones(2)})


def test_names_that_wrappers_add_are_left_out(tmp_path):
    folder = write_dcp(
        {"model": {"_orig_mod.w": torch.ones(2), "a._fsdp_wrapped_module.b": torch.zeros(1)}}, tmp_path / "d"
    )
    merge_weights(folder, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w", "a.b"}


def test_extra_state_of_a_training_state_is_said(tmp_path):
    model = {"weight": torch.ones(2), "_extra_state": {"scale": 2.0}}
    save_training_state(tmp_path / "state", models=[model], shared={}, per_rank={})
    with pytest.warns(UserWarning, match="not tensors, so they are not merged: _extra_state"):
        merge_weights(tmp_path / "state", tmp_path / "out")
    assert [*load_file(tmp_path / "out" / "model.safetensors")] == ["weight"]


def test_the_prefix_of_a_wrapper_is_left_out(tmp_path):
    model = torch.nn.Linear(2, 2)
    content = {"model": {f"module.{name}": value for name, value in model.state_dict().items()}}
    torch.save(content, tmp_path / "pytorch_model.bin")
    merge_weights(tmp_path / "pytorch_model.bin", tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["bias", "weight"]


def test_what_is_no_tensor_is_said(tmp_path):
    folder = write_dcp({"model": {"w": torch.ones(2), "_extra_state": "x"}}, tmp_path / "d")
    with pytest.warns(UserWarning, match=r"they are left out: model\._extra_state"):
        merge_weights(folder, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w"}


def rank_files(folder, cuts):
    """Files as torch's Hugging Face writer leaves them: each rank its pieces, and where they belong."""
    folder.mkdir()
    for rank, pieces in enumerate(cuts, 1):
        about = {name: {"saved_offsets": list(offsets)} for name, (offsets, _) in pieces.items()}
        save_file(
            {name: value.contiguous() for name, (_, value) in pieces.items()},
            folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
            metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(about)},
        )
    return folder


def test_safetensors_files_of_each_rank(tmp_path):
    weight = WEIGHTS["body.weight"]
    folder = rank_files(
        tmp_path / "ranks",
        [
            {"rows": ((0, 0), weight[:4]), "columns": ((0, 0), weight[:, :1]), "once": ((0,), torch.ones(3))},
            {"rows": ((4, 0), weight[4:]), "columns": ((0, 1), weight[:, 1:])},
        ],
    )
    merge_weights(folder, tmp_path / "out")
    whole = {"rows": weight, "columns": weight, "once": torch.ones(3)}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), whole)
    [first, second] = sorted(folder.iterdir())
    with pytest.raises(CheckpointNotFoundError, match="pieces of one rank; pass its folder"):
        merge_weights(second, tmp_path / "out")
    first.unlink()
    with pytest.raises(CorruptCheckpointError, match="does not hold the whole tensor"):
        merge_weights(folder, tmp_path / "out")


def test_the_folder_to_pass_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint_3").symlink_to(SHARDED)
    with pytest.raises(
        CheckpointNotFoundError, match=r"pass one of the folders in it that do: .*checkpoint_3"
    ):
        merge_weights(tmp_path / "run", tmp_path / "out")
    with pytest.raises(
        CheckpointNotFoundError, match=r"state of an optimizer.*pass the folder of a model: .*fsdp_0"
    ):
        merge_weights(SHARDED / "optimizer_0", tmp_path / "out")
    with pytest.raises(CheckpointNotFoundError, match="there is no file or folder"):
        merge_weights(tmp_path / "gone", tmp_path / "out")
    for index in (0, 1):
        (tmp_path / "several").mkdir(exist_ok=True)
        (tmp_path / "several" / f"pytorch_model_fsdp_{index}").symlink_to(SHARDED / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointNotFoundError, match=r"several models; pass the folder .*fsdp_0, .*fsdp_1"):
        merge_weights(tmp_path / "several", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def copy_of(source, target):
    import shutil

    return Path(shutil.copytree(source, target))


def test_the_source_is_removed_only_after_success(tmp_path):
    run = copy_of(SHARDED, tmp_path / "run")
    merge_weights(run, tmp_path / "out", remove_checkpoint_dir=True)
    assert not (run / "pytorch_model_fsdp_0").exists()
    assert (run / "optimizer_0" / ".metadata").is_file()
    broken = copy_of(SHARDED, tmp_path / "broken")
    (broken / "pytorch_model_fsdp_0" / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        merge_weights(broken, tmp_path / "other", remove_checkpoint_dir=True)
    assert (broken / "pytorch_model_fsdp_0" / "__0_0.distcp").is_file()
    assert not (tmp_path / "other").exists()


def test_what_holds_more_than_weights_is_not_removed(tmp_path):
    state = save_training_state(tmp_path / "state", models=[WEIGHTS], shared={}, per_rank={})
    for source in (state, copy_of(FULL, tmp_path / "full")):
        before = sorted(source.iterdir())
        with pytest.raises(CheckpointSaveError, match="not removed"):
            merge_weights(source, tmp_path / "out", remove_checkpoint_dir=True)
        assert sorted(source.iterdir()) == before
    parts = tmp_path / "parts"
    save_model(WEIGHTS, parts, max_shard_size=30)
    with pytest.raises(CheckpointSaveError, match="is inside"):
        merge_weights(parts, parts / "out", remove_checkpoint_dir=True)
    merge_weights(parts, tmp_path / "out", remove_checkpoint_dir=True)
    assert not parts.exists()
    assert not [path for path in tmp_path.glob("out/*") if path.name != "model.safetensors"]


def test_the_source_is_never_the_output(tmp_path):
    parts = tmp_path / "parts"
    save_model(WEIGHTS, parts, max_shard_size=30)
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    for source in (parts, parts / "model.safetensors.index.json"):
        with pytest.raises(CheckpointSaveError, match="would replace it; choose another folder"):
            merge_weights(source, parts)
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before
    folder = write_dcp({"model": WEIGHTS}, tmp_path / "dcp")
    with pytest.raises(CheckpointSaveError, match="is the checkpoint that is to be merged"):
        merge_weights(folder, folder)
    beside = copy_of(SHARDED, tmp_path / "beside")
    merge_weights(beside, beside)
    assert_same(load_file(beside / "model.safetensors"), expected())


def test_outputs_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointSaveError, match="is a file"):
        merge_weights(SHARDED, tmp_path / "file")
    state = save_training_state(tmp_path / "state", models=[WEIGHTS], shared={}, per_rank={})
    with pytest.raises(CheckpointSaveError, match="is a training state"):
        merge_weights(SHARDED, state)


def test_a_dtype_that_safetensors_does_not_know(tmp_path):
    torch.save({"c": torch.ones(2, dtype=torch.complex128)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedValueError, match=r"'c' has the dtype torch\.complex128.*--unsafe_serialization"
    ):
        merge_weights(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_weights(tmp_path, tmp_path / "out", False)


def test_a_pickle_that_would_run_code(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"w": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError):
        merge_weights(tmp_path, tmp_path / "out")
    assert "executed" not in capsys.readouterr().out


def test_a_failing_disk_leaves_what_was_there(tmp_path):
    save_model({"old": torch.ones(3)}, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    class Full(Disk):
        def write(self, descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        merge_weights(SHARDED, tmp_path / "out", disk=Full())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


KILL = """
import os, signal, sys
from accel_ckpt import merge_weights
def halfway(done, total):
    if done * 2 >= total:
        os.kill(os.getpid(), signal.SIGKILL)
source, out, limit = sys.argv[1:]
limit = None if limit == "0" else int(limit)
merge_weights(source, out, max_shard_size=limit, progress=halfway, remove_checkpoint_dir=True)
"""


@pytest.mark.parametrize("limit", [0, 100])
def test_a_killed_merge_leaves_nothing_that_looks_whole(limit, tmp_path):
    source = copy_of(SHARDED, tmp_path / "run") / "pytorch_model_fsdp_0"
    save_model({"old": torch.ones(60)}, tmp_path / "out", max_shard_size=100 if limit else "1GB")
    command = [sys.executable, "-c", KILL, str(source), str(tmp_path / "out"), str(limit)]
    assert subprocess.run(command).returncode == -9
    try:
        names = set(open_weights(tmp_path / "out").about)
    except CheckpointNotFoundError:
        names = set()
    assert names in (set(), {"old"})
    merge_weights(source, tmp_path / "out", max_shard_size=limit or None)
    assert set(open_weights(tmp_path / "out").about) == set(expected())


def test_progress_counts_bytes(tmp_path):
    seen = []
    merge_weights(SHARDED, tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(t.numel() * 4 for t in expected().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


MEASURE = """
import resource, sys
from accel_ckpt import merge_weights
small, large, out, limit, safe = sys.argv[1:]
merge_weights(small, out + "/warm", safe == "True")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge_weights(large, out + "/merged", safe == "True", max_shard_size=None if limit == "0" else int(limit))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
"""


@pytest.mark.wide(but=["dcp-*"])
@pytest.mark.parametrize(
    ("layout", "safe", "limit"),
    [
        ("dcp", True, 0),
        ("bin", True, 60),
        pytest.param("ranks", True, 60, marks=pytest.mark.full),
        pytest.param("shards", True, 0, marks=pytest.mark.full),
        pytest.param("dcp", False, 60, marks=pytest.mark.full),
    ],
)
def test_memory_is_that_of_one_shard(layout, safe, limit, tmp_path):
    """300 MB in tensors of 30 MB; a shard is 60 MB at most. The result is the same, and so is the large part of it."""
    large = {f"layer{i}.weight": torch.full((300, 25_000), float(i)) for i in range(10)}
    small = {"x": torch.ones(4, 4)}
    for name, state in (("large", large), ("small", small)):
        folder = tmp_path / name
        if layout == "dcp":
            write_dcp({"model": state}, folder)
        elif layout == "ranks":
            half = {key: (value[: len(value) // 2], value[len(value) // 2 :]) for key, value in state.items()}
            rank_files(
                folder,
                [
                    {k: ((0, 0), a) for k, (a, _) in half.items()},
                    {k: ((len(a), 0), b) for k, (a, b) in half.items()},
                ],
            )
        else:
            save_model(state, folder, "60MB", safe_serialization=layout == "shards")
    command = [sys.executable, "-c", MEASURE, *map(str, (tmp_path / "small", tmp_path / "large", tmp_path))]
    done = subprocess.run(
        [*command, str(limit * 10**6), str(safe)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) <= 62, done.stdout
    found = torch.nn.ModuleDict(
        {name.split(".")[0]: torch.nn.Linear(25_000, 300, bias=False) for name in large}
    )
    load_checkpoint_in_model(found, tmp_path / "merged")
    assert_same(dict(found.state_dict()), large)
