"""Files of each FSDP rank, read in one process. Into other worlds: tests-integration/test_rank_files.py."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from accel_ckpt import (
    AccelerateCheckpoint,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    Part,
    UnsafeCheckpointError,
    UnsupportedValueError,
    load_checkpoint_in_model,
    merge_weights,
)
from accel_ckpt.foreign import rank_files
from accel_ckpt.foreign.rank_files import RankFiles
from accel_ckpt.format.saved_tensors import SavedTensor
from testkit.rank_files import STEPS, Net, written

MESHES = [(2,), (4,), (2, 2)]
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the whole state of each mesh."""
    base = tmp_path_factory.mktemp("saved")
    return {mesh: (base / str(i), written(base / str(i), *mesh)) for i, mesh in enumerate(MESHES)}


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of what four ranks saved."""
    return Path(shutil.copytree(saved[4,][0], tmp_path / "checkpoint"))


def read(node):
    if isinstance(node, dict):
        return {key: read(value) for key, value in node.items()}
    return node.read() if isinstance(node, SavedTensor) else node


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("mesh", MESHES)
def test_the_whole_state_comes_back(saved, mesh):
    folder, expected = saved[mesh]
    for stem, what in ((MODEL, "model"), (OPTIMIZER, "optimizer")):
        found = read(RankFiles(folder / stem).tree)
        assert equal(found, expected[what])
    assert found["state"]["head.bias"]["step"] == STEPS


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_merged_and_loaded(saved, mesh, tmp_path):
    folder, expected = saved[mesh]
    assert merge_weights(folder, tmp_path / "merged") == ("model.safetensors",)
    assert merge_weights(folder / f"{MODEL}_rank1.bin", tmp_path / "again") == ("model.safetensors",)
    for source in (folder, tmp_path / "merged", tmp_path / "again"):
        model = Net()
        load_checkpoint_in_model(model, source, strict=True)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected["model"]), rtol=0, atol=0)


def test_a_merge_removes_no_more_than_weights(folder, tmp_path):
    with pytest.raises(CheckpointSaveError, match=r"holds more than the weights \(optimizer_0_rank0\.bin"):
        merge_weights(folder, tmp_path / "merged", remove_checkpoint_dir=True)
    assert not (tmp_path / "merged").exists()


def test_weights_of_several_models_are_asked_for(folder, tmp_path):
    for path in list(folder.glob(f"{MODEL}_rank*")):
        shutil.copy(path, folder / path.name.replace("_0_", "_1_"))
    with pytest.raises(CheckpointNotFoundError, match=r"pass the first file.*_0_rank0\.bin.*_1_rank0\.bin"):
        merge_weights(folder, tmp_path / "merged")
    with pytest.raises(CheckpointNotFoundError, match="hold the state of an optimizer"):
        merge_weights(folder / f"{OPTIMIZER}_rank0.bin", tmp_path / "merged")


def test_only_files_with_wanted_boxes_are_opened(saved, monkeypatch):
    folder, expected = saved[4,]
    opened = []
    plain = rank_files.unpickle
    monkeypatch.setattr(
        rank_files, "unpickle", lambda path, *a, **k: opened.append(path.name) or plain(path, *a, **k)
    )
    tree = RankFiles(folder / MODEL).tree
    assert opened == [f"{MODEL}_rank0.bin"]
    part = Part(torch.zeros(2, 4), (3, 0), (7, 4))  # of the rows 0-1, 2-3, 4-5 and 6
    tree["body.weight"].fill(part)
    assert torch.equal(part.tensor, expected["model"]["body.weight"][3:5])
    assert opened == [f"{MODEL}_rank{rank}.bin" for rank in (0, 1, 2)]


def test_accelerates_folder_is_recognised(saved):
    folder, expected = saved[2, 2]
    checkpoint = AccelerateCheckpoint(folder)
    assert checkpoint.kind == "FSDP, a file of each rank"
    assert (checkpoint.parts()["models"], checkpoint.parts()["optimizers"]) == (1, 1)
    torch.testing.assert_close(dict(checkpoint.model(0)), dict(expected["model"]), rtol=0, atol=0)
    lazy = AccelerateCheckpoint(folder, lazy=True).optimizer(0, [], [Net()])
    moment = lazy["state"]["model_0.body.weight"]["exp_avg"]
    assert torch.equal(moment.read(), expected["optimizer"]["state"]["body.weight"]["exp_avg"])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_missing_file_is_named(folder, rank):
    (folder / f"{MODEL}_rank{rank}.bin").unlink()
    message = rf"{MODEL}_rank{rank}\.bin is missing: .* saved by 4 ranks, and there are the files of 3"
    with pytest.raises(CheckpointNotFoundError, match=message):
        RankFiles(folder / MODEL)
    with pytest.raises(CheckpointNotFoundError, match=message):
        AccelerateCheckpoint(folder).model(0)


def test_no_file_at_all(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=rf"there is no file .*{MODEL}_rank0\.bin"):
        RankFiles(tmp_path / MODEL)


def test_a_file_of_a_larger_world_is_refused(saved, tmp_path):
    mixed = shutil.copytree(saved[2,][0], tmp_path / "mixed")
    shutil.copy(saved[4,][0] / f"{MODEL}_rank3.bin", mixed)
    with pytest.raises(
        UnsupportedValueError, match=rf"mesh of 2 ranks, and {MODEL}_rank3\.bin is not of one"
    ):
        RankFiles(mixed / MODEL)


@pytest.mark.parametrize("stem", [MODEL, OPTIMIZER])
def test_a_file_of_another_mesh_is_refused(saved, folder, stem):
    shutil.copy(saved[2, 2][0] / f"{stem}_rank3.bin", folder)
    with pytest.raises(
        CorruptCheckpointError, match=rf"{stem}_rank3\.bin does not belong to {stem}_rank0\.bin"
    ):
        read(RankFiles(folder / stem).tree)


def changed(path, change):
    """Load a file of a rank, change its content, and write it again."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_an_optimizer_of_another_step_is_refused(folder):
    path = folder / f"{OPTIMIZER}_rank1.bin"
    changed(path, lambda content: content["state"]["body.bias"]["step"].add_(1))
    with pytest.raises(CorruptCheckpointError, match="the optimizer had taken other steps"):
        read(RankFiles(folder / OPTIMIZER).tree)


def dtensor(local, shape, placements, mesh):
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def mesh_of(**state):
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh.__dict__.update(state)
    return mesh


# As torch up to 2.9 writes a mesh; later ones compute `mesh`.
TWO = {"device_type": "cpu", "mesh": torch.tensor([0, 1]), "mesh_dim_names": ("fsdp",)}


def write(folder, *tensors):
    for rank, tensor in enumerate(tensors):
        torch.save({"weight": tensor}, folder / f"{MODEL}_rank{rank}.bin")
    return RankFiles(folder / MODEL)


def test_meshes_of_older_torch_are_read(tmp_path):
    halves = torch.arange(6.0).reshape(2, 3).split(1)
    found = write(tmp_path, *(dtensor(half.clone(), (2, 3), [Shard(0)], mesh_of(**TWO)) for half in halves))
    assert torch.equal(found.tree["weight"].read(), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("shape", "placement", "local", "message"),
    [
        pytest.param((3, 3), Shard(0), torch.ones(1, 3), "is not what its placements give", id="shape"),
        pytest.param((2, 3), Shard(0), torch.ones(1).expand(1, 3), "shows them as 12", id="expanded"),
        pytest.param((4, 3), _StridedShard(0, split_factor=10**9), torch.ones(2, 3), "divided as", id="pieces"),
        pytest.param((2, 3), "anything", torch.ones(1, 3), "does not hold what an FSDP rank saves", id="placement"),
        pytest.param((), Shard(0), torch.ones(()), "does not hold what an FSDP rank saves", id="scalar"),
    ],
)  # fmt: skip
def test_what_no_rank_saves_is_refused(tmp_path, shape, placement, local, message):
    one = dtensor(local, shape, [Replicate()], mesh_of(**TWO))
    one._spec.placements = (placement,)
    with pytest.raises(CorruptCheckpointError, match=message):
        write(tmp_path, one, one)


def test_a_mesh_that_does_not_cover_the_ranks_is_refused(tmp_path):
    meshes = [mesh_of(**TWO | {"mesh": torch.tensor(ranks)}) for ranks in ([0, 1], [0, 3], [0, 0])]
    one, far, twice = (dtensor(torch.ones(1, 3), (2, 3), [Shard(0)], mesh) for mesh in meshes)
    with pytest.raises(UnsupportedValueError, match=r"mesh of 2 ranks, and .*_rank2\.bin is not of one"):
        write(tmp_path, one, one, one)
    (tmp_path / f"{MODEL}_rank2.bin").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"_rank3\.bin is missing"):
        write(tmp_path, far, far)
    with pytest.raises(UnsupportedValueError, match=r"mesh of 2 ranks, and .*_rank1\.bin is not of one"):
        write(tmp_path, twice, twice)


class Hostile:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("rank", [0, 3])
def test_no_file_runs_code(folder, rank, capsys):
    path = folder / f"{MODEL}_rank{rank}.bin"
    torch.save({"body.weight": Hostile()}, path)
    with pytest.raises(UnsafeCheckpointError, match=rf"_rank{rank}\.bin was not read: .*refers to print"):
        read(RankFiles(folder / MODEL).tree)
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError), match=rf"_rank{rank}\.bin"):
        read(RankFiles(folder / MODEL).tree)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [[1], {"body.weight": torch.ones(7, 4)}])
def test_other_content_is_refused(folder, content):
    torch.save(content, folder / f"{MODEL}_rank2.bin")
    with pytest.raises(CorruptCheckpointError, match=r"_rank2\.bin does not (hold a state dict|belong to)"):
        read(RankFiles(folder / MODEL).tree)


def test_a_truncated_file_is_named(folder):
    path = folder / f"{MODEL}_rank1.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError, match=r"_rank1\.bin cannot be read"):
        read(RankFiles(folder / MODEL).tree)
