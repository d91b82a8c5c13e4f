"""Tensors in boxes in files: what headers give, what fits, and what is read."""

import pytest
import safetensors.torch
import torch

from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError
from accel_ckpt.format.saved_tensors import FileChecks, SavedTensors, fill_all, verify_all
from accel_ckpt.format.sharding import sharding_metadata
from accel_ckpt.parts import Part


def write(path, _metadata=None, **parts):
    metadata = sharding_metadata(parts) if _metadata is None else _metadata
    safetensors.torch.save_file({name: part.tensor for name, part in parts.items()}, path, metadata)
    return path


@pytest.fixture
def whole():
    return torch.arange(24.0).view(6, 4)


@pytest.fixture
def files(tmp_path, whole):
    return [
        write(
            tmp_path / "a.safetensors", w=Part(whole[:4].clone(), (0, 0), (6, 4)), v=Part.whole(torch.ones(3))
        ),
        write(tmp_path / "b.safetensors", w=Part(whole[4:].clone(), (4, 0), (6, 4))),
    ]


def test_headers_give_names_shapes_and_dtypes(files):
    saved = SavedTensors(files)
    assert {n: (tuple(s.shape), s.dtype) for n, s in saved.items()} == {
        "w": ((6, 4), torch.float32),
        "v": ((3,), torch.float32),
    }
    assert len(saved) == 2


def test_boxes_make_up_the_tensor(files, whole):
    saved = SavedTensors(files)
    assert torch.equal(saved["w"].read(), whole)
    target = {"w": torch.zeros(6, 4), "v": torch.zeros(3, dtype=torch.float64)}
    fill_all(saved.pairs(target))
    assert torch.equal(target["w"], whole)
    assert torch.equal(target["v"], torch.ones(3).double())


def test_every_kind_of_target_gets_its_part(files, whole):
    saved = SavedTensors(files)
    middle, columns, flat = torch.zeros(2, 4), torch.zeros(2, 6).t(), torch.zeros(9)
    targets = {
        "w": [
            Part(middle, (3, 0), (6, 4)),
            Part(columns, (0, 1), (6, 4)),
            *Part.of_flat(flat, 7, (6, 4)),
            Part.nothing((6, 4)),
        ],
        "v": [],
    }
    fill_all(saved.pairs(targets))
    assert torch.equal(middle, whole[3:5])
    assert torch.equal(columns, whole[:, 1:3])
    assert torch.equal(flat, whole.flatten()[7:16])


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [
        pytest.param((5, 0), (6, 4), id="outside"),
        pytest.param((3, 0), (6, 4), id="an overlap"),
        pytest.param((0, 0), (6, 4), id="twice"),
        pytest.param((4, 0), (7, 4), id="another shape"),
    ],
)
def test_boxes_that_do_not_are_refused(tmp_path, whole, offsets, shape):
    metadata = {"DCP_SHARDING_INFO": f'{{"w": {{"saved_offsets": {list(offsets)}, "shape": {list(shape)}}}}}'}
    paths = [
        write(tmp_path / "a.safetensors", w=Part(whole[:4].clone(), (0, 0), (6, 4))),
        write(tmp_path / "b.safetensors", metadata, w=Part.whole(whole[4:].clone())),
    ]
    with pytest.raises(
        CorruptCheckpointError, match=r"parts of the tensor 'w' in a\.safetensors, b\.safetensors"
    ):
        SavedTensors(paths)


def test_a_missing_last_part_is_noticed(files):
    with pytest.raises(CorruptCheckpointError, match=r"do not make up one of shape \[6, 4\]"):
        SavedTensors(files[:1])


def test_what_does_not_fit_changes_nothing(files):
    saved = SavedTensors(files)
    target = {"w": torch.zeros(6, 4), "x": torch.zeros(1)}
    with pytest.raises(StateMismatchError, match=r"it lacks x\. Nothing was changed"):
        fill_all(saved.pairs(target))
    with pytest.raises(StateMismatchError, match=r"w is \[6, 4\] there and \[4, 6\] here"):
        saved.pairs({"w": torch.zeros(4, 6)})
    with pytest.raises(StateMismatchError, match="w is on the meta device here"):
        saved.pairs({"w": torch.zeros(6, 4, device="meta")})
    assert not target["w"].any()


def test_two_names_of_one_saved_tensor_fill_two_targets(tmp_path, whole):
    metadata = {"tied": "w", **sharding_metadata({"w": Part.whole(whole)})}
    saved = SavedTensors([write(tmp_path / "a.safetensors", metadata, w=Part.whole(whole))])
    targets = {"w": torch.zeros(6, 4), "tied": torch.zeros(6, 4)}
    fill_all(saved.pairs(targets))
    assert torch.equal(targets["w"], whole)
    assert torch.equal(targets["tied"], whole)


def test_only_files_that_are_read_are_checked_and_once(files, whole):
    checked = []

    def checksum(name):
        checked.append(name)
        return "0" * 16 if name == "b.safetensors" else None

    saved = SavedTensors(files, FileChecks(checksum))
    assert not checked
    top = Part(torch.zeros(4, 4), (0, 0), (6, 4))
    for _ in range(2):
        fill_all(saved.pairs({"w": top}))
    assert checked == ["a.safetensors"]
    target = torch.zeros(6, 4)
    for act in (verify_all, fill_all):
        with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors has the checksum"):
            act(saved.pairs({"w": target}))
    assert not target.any()


def test_files_of_torch_save_are_sources_too(tmp_path):
    weights = {"w": torch.arange(6.0).view(2, 3), "i": torch.tensor(3)}
    weights["tied"] = weights["w"]
    weights["sparse"] = torch.eye(3).to_sparse()
    torch.save(weights, tmp_path / "m.bin")
    saved = SavedTensors([tmp_path / "m.bin"])
    part = torch.zeros(2, 1)
    fill_all(saved.pairs({"tied": Part(part, (0, 1), (2, 3))}))
    assert part.tolist() == [[1.0], [4.0]]
    assert saved["sparse"].read().is_sparse
    assert saved["i"].read() == 3
