"""Who writes which part of a tensor, and files that do not make up whole ones. With ranks: tests-integration."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import CorruptCheckpointError, StateMismatchError
from accel_ckpt.format.reader import read_header
from accel_ckpt.saving.save_state import _share_boxes
from accel_ckpt.sharded import (
    Box,
    BoxFiles,
    Place,
    load_tensors,
    overlap,
    places_of,
    sharding_metadata,
    tied_boxes,
)

held_by_ranks = st.lists(
    st.dictionaries(st.sampled_from([f"model/t{i}@0" for i in range(8)]), st.just(8)), min_size=1, max_size=4
)


@given(held_by_ranks, st.sets(st.sampled_from([f"model/t{i}" for i in range(8)])))
def test_each_box_is_written_by_one_of_its_holders(held, tied):
    loads = [0] * len(held)
    shares = _share_boxes(held, tied, loads)
    written = [key for share in shares for key in share]
    assert sorted(written) == sorted({k for boxes in held for k in boxes if k.partition("@")[0] not in tied})
    assert all(share <= set(boxes) for share, boxes in zip(shares, held, strict=True))
    assert loads == [8 * len(share) for share in shares]


corners = st.tuples(st.integers(0, 4), st.integers(0, 4))
areas = st.tuples(corners, corners).map(lambda c: (c[0], (c[0][0] + c[1][0], c[0][1] + c[1][1])))


@given(st.lists(areas, max_size=5))
def test_overlaps_are_those_of_the_elements(boxes):
    elements = [(x, y) for low, high in boxes for x in range(low[0], high[0]) for y in range(low[1], high[1])]
    assert overlap(boxes) == (len(set(elements)) < len(elements))


def test_scalars_overlap_when_there_are_two():
    assert overlap([((), ()), ((), ())])
    assert not overlap([((), ())])


def write(path, *boxes, metadata=None):
    metadata = sharding_metadata(boxes) if metadata is None else metadata
    safetensors.torch.save_file({box.name: box.tensor for box in boxes}, path, metadata)
    return path


@pytest.fixture
def whole():
    return torch.arange(24.0).view(6, 4)


def test_boxes_make_up_the_tensor(tmp_path, whole):
    top, bottom = Box("w", (0, 0), whole[:4].clone(), (6, 4)), Box("w", (4, 0), whole[4:].clone(), (6, 4))
    vector = Box("v", (0,), torch.ones(3), (3,))
    files = BoxFiles(
        [write(tmp_path / "a.safetensors", top, vector), write(tmp_path / "b.safetensors", bottom)]
    )
    assert torch.equal(files.whole("w"), whole)
    target = {"w": torch.zeros(6, 4), "v": torch.zeros(3)}
    load_tensors(files, target)
    assert torch.equal(target["w"], whole)
    assert torch.equal(target["v"], torch.ones(3))


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
    paths = [
        write(tmp_path / "a.safetensors", Box("w", (0, 0), whole[:4].clone(), (6, 4))),
        write(tmp_path / "b.safetensors", Box("w", offsets, whole[4:].clone(), shape)),
    ]
    with pytest.raises(
        CorruptCheckpointError, match=r"parts of the tensor 'w' in a\.safetensors, b\.safetensors"
    ):
        BoxFiles(paths)


@pytest.mark.parametrize(
    "info",
    [
        "{",
        "{}x",
        '{"w": 3}',
        '{"v": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [-1, 0]}}',
        '{"w": {"saved_offsets": [0]}}',
    ],
)
def test_metadata_that_lies_is_refused(tmp_path, whole, info):
    path = write(
        tmp_path / "a.safetensors", Box("w", (0, 0), whole, (6, 4)), metadata={"DCP_SHARDING_INFO": info}
    )
    with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors"):
        places_of(read_header(path))


def test_what_does_not_fit_changes_nothing(tmp_path, whole):
    files = BoxFiles([write(tmp_path / "a.safetensors", Box("w", (0, 0), whole, (6, 4)))])
    target = {"w": torch.zeros(6, 4), "x": torch.zeros(1)}
    with pytest.raises(StateMismatchError, match="it lacks x"):
        load_tensors(files, target)
    with pytest.raises(StateMismatchError, match=r"w is \[6, 4\] there and \[4, 6\] here"):
        load_tensors(files, {"w": torch.zeros(4, 6)})
    assert not target["w"].any()


def test_files_without_metadata_hold_whole_tensors(tmp_path, whole):
    path = write(tmp_path / "a.safetensors", Box("w", (0, 0), whole, (6, 4)), metadata={})
    assert places_of(read_header(path)) == {"w": Place((0, 0), (6, 4))}


def test_tied_boxes_are_the_same_memory_at_the_same_place(whole):
    boxes = [
        Box("a", (0, 0), whole, (6, 4)),
        Box("b", (0, 0), whole.view(6, 4), (6, 4)),
        Box("c", (6, 0), whole, (12, 4)),
        Box("d", (0, 0), whole + 0, (6, 4)),
    ]
    assert tied_boxes(boxes) == {"b": "a"}


def test_the_metadata_is_torch_s(whole):
    metadata = json.loads(sharding_metadata([Box("w", (4, 0), whole, (10, 4))])["DCP_SHARDING_INFO"])
    assert metadata["w"]["saved_offsets"] == [4, 0]


def test_a_missing_last_part_is_noticed(tmp_path, whole):
    path = write(tmp_path / "a.safetensors", Box("w", (0, 0), whole[:4].clone(), (6, 4)))
    with pytest.raises(CorruptCheckpointError, match=r"do not make up one of shape \[6, 4\]"):
        BoxFiles([path])
