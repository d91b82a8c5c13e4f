"""What a path is found to be, for folders laid out by hand, and that opened weights are those that were written."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Part,
    UnsafeCheckpointError,
    save_training_state,
)
from accel_ckpt.foreign.sources import (
    PiecedFolder,
    find_source,
    open_pieces,
    refuse_several_models,
    source_of,
)
from accel_ckpt.format.index import WeightFiles

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2, dtype=torch.int64)}


def write_dcp(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return folder


def write_shards(folder, *shards, index=True):
    """Files as transformers names them, and their index."""
    folder.mkdir()
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    if index:
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def rank_file(folder, rank, parts):
    """What a rank of torch's writer of Hugging Face files leaves: pieces, and where they belong."""
    folder.mkdir(exist_ok=True)
    about = {key: {"saved_offsets": list(offsets)} for key, (offsets, _) in parts.items()}
    path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(about)}
    save_file({key: tensor.contiguous() for key, (_, tensor) in parts.items()}, path, metadata)
    return path


def same(pieces, expected):
    assert set(pieces.about) == set(expected)
    for name, value in expected.items():
        assert torch.equal(pieces.tensor(name), value)
        assert pieces.about[name].dtype == value.dtype
        assert tuple(pieces.about[name].shape) == tuple(value.shape)


# what is found


def test_a_distributed_checkpoint(tmp_path):
    folder = write_dcp({"model": dict(WEIGHTS)}, tmp_path / "dcp")
    assert find_source(folder) == PiecedFolder(folder)
    same(open_pieces(find_source(folder)), WEIGHTS)


def test_a_folder_of_accelerate_holds_weights_one_level_below(tmp_path):
    inner = write_dcp({"model": dict(WEIGHTS)}, tmp_path / "pytorch_model_fsdp_0")
    write_dcp({"optimizer": {"step": torch.ones(1)}}, tmp_path / "optimizer_0")
    assert find_source(tmp_path) == PiecedFolder(inner)
    file = tmp_path / "pytorch_model_fsdp.bin"
    torch.save(WEIGHTS, file)
    assert find_source(tmp_path) == PiecedFolder(inner)  # the folder is looked for first
    (inner / ".metadata").unlink()
    assert find_source(tmp_path) == WeightFiles((file,))
    same(open_pieces(find_source(tmp_path)), WEIGHTS)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_several_models_are_named(tmp_path, kind):
    for index in (0, 1):
        if kind == "folder":
            write_dcp({"model": dict(WEIGHTS)}, tmp_path / f"pytorch_model_fsdp_{index}")
        else:
            torch.save(WEIGHTS, tmp_path / ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin")[index])
    with pytest.raises(
        CheckpointNotFoundError, match=rf"several models; pass the {kind} of the one you mean: .*, .*fsdp_1"
    ):
        find_source(tmp_path)


def test_pieces_of_ranks_are_put_together(tmp_path):
    folder = tmp_path / "ranks"
    a, b = WEIGHTS["a"], WEIGHTS["b"]
    first = rank_file(folder, 0, {"a": ((0, 0), a[:, :2]), "b": ((0,), b)})
    second = rank_file(folder, 1, {"a": ((0, 2), a[:, 2:])})
    assert find_source(folder) == PiecedFolder(folder, (first, second))
    same(open_pieces(find_source(folder)), WEIGHTS)
    with pytest.raises(CheckpointNotFoundError, match=f"pieces of one rank; pass its folder {folder}"):
        open_pieces(find_source(second))
    second.unlink()
    # Of what is left one cannot see that a column is missing; the shape is not in these files.
    assert tuple(open_pieces(find_source(folder)).about["a"].shape) == (4, 2)
    first.unlink()
    rank_file(folder, 1, {"a": ((0, 2), a[:, 2:])})
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        open_pieces(find_source(folder))


def test_files_with_an_index_are_whole_files(tmp_path):
    folder = write_shards(tmp_path / "c", {"a": WEIGHTS["a"]}, {"b": WEIGHTS["b"]})
    source = find_source(folder)
    assert isinstance(source, WeightFiles)
    assert [path.name for path in source.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    same(open_pieces(source), WEIGHTS)


def test_an_index_decides_where_a_name_is(tmp_path):
    folder = write_shards(tmp_path / "c", {"a": WEIGHTS["a"]}, {"b": WEIGHTS["b"]})
    save_file({"a": torch.zeros(9), "b": WEIGHTS["b"]}, folder / "model-00002-of-00002.safetensors")
    same(open_pieces(find_source(folder)), WEIGHTS)


def test_an_index_that_names_what_is_not_there(tmp_path):
    folder = write_shards(tmp_path / "c", {"a": WEIGHTS["a"]}, {"b": WEIGHTS["b"]})
    save_file({"c": WEIGHTS["b"]}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match="index names b, which are not in the files"):
        open_pieces(find_source(folder))


def test_a_folder_of_checkpoints_names_them(tmp_path):
    for name in ("checkpoint_1", "checkpoint_2", "logs"):
        (tmp_path / name).mkdir()
    save_file(WEIGHTS, tmp_path / "checkpoint_1" / "model.safetensors")
    torch.save(WEIGHTS, tmp_path / "checkpoint_2" / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointNotFoundError, match="holds no weights itself; pass one") as told:
        find_source(tmp_path)
    assert "logs" not in str(told.value)
    assert str(told.value).endswith(f"{tmp_path / 'checkpoint_1'}, {tmp_path / 'checkpoint_2'}")


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_no_checkpoint(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=name):
        find_source(tmp_path / name)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_dcp({"model": dict(WEIGHTS)}, tmp_path / "dcp")
    assert find_source(type(tmp_path)("~/dcp")) == PiecedFolder(folder)


# training states of this library


def state(folder, *models, **more):
    return save_training_state(folder, models=models, shared={}, per_rank={}, **more)


def test_a_training_state_is_its_first_model(tmp_path):
    folder = state(tmp_path / "c", WEIGHTS, {"c": torch.zeros(1)})
    assert find_source(folder) == WeightFiles((folder / "model.safetensors",))
    assert source_of(folder, ["model_1.safetensors"]) == WeightFiles((folder / "model_1.safetensors",))
    assert source_of(folder, []) == WeightFiles(())


def test_divided_tensors_of_a_training_state(tmp_path):
    a = WEIGHTS["a"]
    halves = [Part(a[:1], (0, 0), (4, 3)), Part(a[1:], (1, 0), (4, 3))]
    folder = state(tmp_path / "c", {"a": halves, "b": WEIGHTS["b"]})
    source = find_source(folder)
    assert isinstance(source, PiecedFolder)
    assert len(source.files) == 3
    same(open_pieces(source), WEIGHTS)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname"])
def test_files_outside_the_folder_are_refused(tmp_path, name):
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        source_of(tmp_path, [name])


def test_the_file_of_one_of_several_models_is_named(tmp_path):
    one = state(tmp_path / "one", WEIGHTS)
    refuse_several_models(one)
    refuse_several_models(tmp_path)  # no training state
    two = state(tmp_path / "two", {"b": WEIGHTS["b"]}, WEIGHTS, max_shard_size=20)
    with pytest.raises(CheckpointNotFoundError, match="holds 2 models") as told:
        refuse_several_models(two)
    assert str(told.value).endswith(f"{two / 'model.safetensors'}, {two / 'model_1.safetensors.index.json'}")


# what is in a distributed checkpoint


def test_weights_at_the_top_of_a_distributed_checkpoint(tmp_path):
    same(open_pieces(find_source(write_dcp(dict(WEIGHTS), tmp_path / "dcp"))), WEIGHTS)


def test_the_model_among_other_things(tmp_path):
    content = {"model": {"layer": {"a": WEIGHTS["a"]}, "b": WEIGHTS["b"]}, "epoch": {"n": torch.ones(1)}}
    folder = write_dcp(content, tmp_path / "dcp")
    same(open_pieces(find_source(folder)), {"layer.a": WEIGHTS["a"], "b": WEIGHTS["b"]})


def test_the_state_of_an_optimizer_is_refused_with_the_model_beside_it(tmp_path):
    folder = write_dcp({"optimizer": {"step": torch.ones(1)}}, tmp_path / "optimizer_0")
    with pytest.raises(CheckpointNotFoundError, match=r"pass the folder of a model$"):
        open_pieces(find_source(folder))
    beside = write_dcp({"model": dict(WEIGHTS)}, tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointNotFoundError, match=f"pass the folder of a model: {beside}$"):
        open_pieces(find_source(folder))


def test_several_things_of_which_none_is_a_model(tmp_path):
    folder = write_dcp({"net": {"a": torch.ones(1)}, "ema": {"a": torch.ones(1)}}, tmp_path / "dcp")
    with pytest.raises(CheckpointNotFoundError, match="and no model under the key 'model'"):
        open_pieces(find_source(folder))


MOMENTS = {
    "state": {name: {"exp_avg": value + 1} for name, value in WEIGHTS.items()},
    "param_groups": {"lr": 1.0},
}


@pytest.mark.parametrize(
    "content",
    [
        {"app": {"model": dict(WEIGHTS), "optim": MOMENTS}},  # PyTorch's recipe
        {"app": {"model": dict(WEIGHTS), "optim": MOMENTS, "step": torch.tensor(3)}},
        {"trainer": {"net": dict(WEIGHTS), "optimizer": MOMENTS}},
        {"net": dict(WEIGHTS), "optimizer_0": MOMENTS, "lr_scheduler": {"last": torch.ones(1)}},
        {"net": dict(WEIGHTS)},
        {"state_dict": dict(WEIGHTS), "rng_state": {"cpu": torch.ones(1)}},
        {
            **WEIGHTS,
            "optimizer": MOMENTS,
            "dataloader": {"dp": torch.ones(1)},
            "train_state": {"step": torch.ones(1)},
        },
    ],
    ids=["app", "app with a counter", "trainer", "net", "alone", "lightning", "torchtitan"],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_the_model_is_found_among_what_programs_save(tmp_path, content, pickled):
    if pickled:
        torch.save(content, tmp_path / "x.bin")
        same(open_pieces(find_source(tmp_path / "x.bin")), WEIGHTS)
    else:
        same(open_pieces(find_source(write_dcp(content, tmp_path / "dcp"))), WEIGHTS)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"app": {"optim": MOMENTS}}, "holds optim under 'app' and no model"),
        ({"state": MOMENTS["state"], "param_groups": {"lr": torch.ones(1)}}, "state of an optimizer"),
        ({**WEIGHTS, "ema": dict(WEIGHTS)}, "tensors beside dictionaries"),
        (
            {"net": dict(WEIGHTS), "ema": dict(WEIGHTS), "optim": MOMENTS},
            "holds net, ema, optim and no model",
        ),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_what_is_no_model_or_several_is_named(tmp_path, content, told, pickled):
    if pickled:
        torch.save(content, tmp_path / "x.bin")
    else:
        write_dcp(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointNotFoundError, match=told):
        open_pieces(find_source(tmp_path / "x.bin"))


def test_what_is_no_tensor_is_left_out_and_said(tmp_path):
    folder = write_dcp({"model": {**WEIGHTS, "version": 3}}, tmp_path / "dcp")
    with pytest.warns(UserWarning, match=r"not tensors, so they are left out: model\.version"):
        pieces = open_pieces(find_source(folder))
    same(pieces, WEIGHTS)


# files of torch.save


def test_tied_tensors_of_torch_save(tmp_path):
    torch.save({"a": WEIGHTS["a"], "again": WEIGHTS["a"], "b": WEIGHTS["b"]}, tmp_path / "pytorch_model.bin")
    pieces = open_pieces(find_source(tmp_path))
    assert pieces.aliases == {"again": "a"}
    for name in ("a", "again"):
        assert torch.equal(pieces.tensor(name), WEIGHTS["a"])
