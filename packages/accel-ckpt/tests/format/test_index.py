"""Finding files, and never outside the folder."""

import json

import pytest
import torch

from accel_ckpt import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.format.index import find_weights, inside, read_index
from accel_ckpt.format.writer import write_safetensors


def shard(folder, name, **tensors):
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / name, tensors or {"w": torch.ones(1)}, {"format": "pt"})


def index(folder, weight_map, name="model.safetensors.index.json", flat=False):
    (folder / name).write_text(json.dumps(weight_map if flat else {"metadata": {}, "weight_map": weight_map}))
    return folder / name


@pytest.mark.parametrize("flat", [False, True])
def test_indexes(tmp_path, flat):
    shard(tmp_path, "a.safetensors")
    shard(tmp_path / "sub", "b.safetensors")
    path = index(tmp_path, {"w": "a.safetensors", "v": "sub/b.safetensors"}, flat=flat)
    files = read_index(path)
    assert files.files == (tmp_path / "a.safetensors", tmp_path / "sub" / "b.safetensors")
    assert files.weight_map == {"w": files.files[0], "v": files.files[1]}
    assert find_weights(tmp_path) == find_weights(path) == files


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hosts", "a/../../secret", "", "C:\\x", "..\\x", "\\\\host\\x", "a\\..\\..\\x", "C:x"],
)
def test_names_outside_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "f"
    shard(folder, "a.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        read_index(index(folder, {"w": name}))


def test_links_to_outside_are_refused(tmp_path):
    shard(tmp_path / "elsewhere", "x.safetensors")
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "x.safetensors").symlink_to(tmp_path / "elsewhere" / "x.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="is a link to"):
        read_index(index(folder, {"w": "x.safetensors"}))
    (folder / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeCheckpointError, match="is a link to"):
        read_index(index(folder, {"w": "d/x.safetensors"}))


def test_names_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnsafeCheckpointError, match="cannot be followed"):
        read_index(index(tmp_path, {"w": "a\0b"}))
    # Since Python 3.13 a loop is resolved to itself, which is no file.
    with pytest.raises(
        (UnsafeCheckpointError, CheckpointNotFoundError), match=r"cannot be followed|not there.*loop"
    ):
        read_index(index(tmp_path, {"w": "loop"}))


def test_links_inside_and_in_the_hub_s_cache_are_followed(tmp_path):
    folder = tmp_path / "f"
    shard(folder, "x.safetensors")
    (folder / "y.safetensors").symlink_to("x.safetensors")
    read_index(index(folder, {"w": "y.safetensors"}))
    repository = tmp_path / "models--org--name"
    shard(repository / "blobs", "0123abcd")
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert inside(snapshot, "model.safetensors").is_file()
    (tmp_path / "mine").symlink_to(snapshot)
    assert inside(tmp_path / "mine", "model.safetensors").is_file()
    (snapshot / "evil").symlink_to("../../../f/x.safetensors")
    with pytest.raises(UnsafeCheckpointError):
        inside(snapshot, "evil")


def test_missing_shards_are_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"gone\.safetensors"):
        read_index(index(tmp_path, {"w": "gone.safetensors"}))


@pytest.mark.parametrize("content", ["[]", '{"weight_map": {"w": 1}}', "{", '{"weight_map": []}'])
def test_broken_indexes(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        read_index(path)


def test_what_a_folder_holds(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="holds none of them"):
        find_weights(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no file or folder"):
        find_weights(tmp_path / "x")
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert find_weights(tmp_path).files == (tmp_path / "pytorch_model.bin",)
    shard(tmp_path, "model.safetensors")
    assert find_weights(tmp_path).files == (tmp_path / "model.safetensors",)
    shard(tmp_path, "other.safetensors")
    index(tmp_path, {"w": "other.safetensors"})
    with pytest.raises(CheckpointNotFoundError, match="belong to different saves"):
        find_weights(tmp_path)


def test_other_names_of_indexes(tmp_path):
    shard(tmp_path, "a.safetensors")
    one = index(tmp_path, {"w": "a.safetensors"}, name="diffusion.safetensors.index.json")
    assert find_weights(tmp_path).files == (tmp_path / "a.safetensors",)
    index(tmp_path, {"w": "a.safetensors"}, name="second.index.json")
    with pytest.raises(CheckpointNotFoundError, match=r"several files \*\.index\.json \(diffusion.*second"):
        find_weights(tmp_path)
    assert find_weights(one).files


def test_a_single_file_of_another_name(tmp_path):
    shard(tmp_path, "diffusion_pytorch_model.safetensors")
    assert find_weights(tmp_path).files == (tmp_path / "diffusion_pytorch_model.safetensors",)
    shard(tmp_path, "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="pass the one you mean"):
        find_weights(tmp_path)
    index(tmp_path, {"w": "diffusion_pytorch_model.safetensors"}, name="diffusion.safetensors.index.json")
    assert find_weights(tmp_path).files == (tmp_path / "diffusion_pytorch_model.safetensors",)


def test_shards_without_their_index(tmp_path):
    for number in range(1, 31):
        shard(tmp_path, f"model-{number:05}-of-00030.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"and 18 more.*shards, whose index is missing"):
        find_weights(tmp_path)
