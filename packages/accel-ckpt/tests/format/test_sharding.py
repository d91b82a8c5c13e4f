"""What a safetensors file says of the places of its tensors."""

import json

import pytest
import safetensors.torch
import torch

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.reader import read_header
from accel_ckpt.format.sharding import EntryPlace, places_of, sharding_metadata
from accel_ckpt.parts import Part


@pytest.fixture
def whole():
    return torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize(
    "info",
    [
        "{",
        "{}x",
        '{"w": 3}',
        '{"v": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [-1, 0]}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [Infinity, 0]}}',
        '{"w": {"saved_offsets": [1e999, 0]}}',
        '{"w": {"saved_offsets": [0, 0], "shape": [6]}}',
        '{"w": {"saved_offsets": [0, 0], "shape": [-6, 4]}}',
        '{"w": {"saved_offsets": [0, 0], "shape": [6, 1e30]}}',
        '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [6, 0]}}',
        "[" * 100_000,
    ],
)
def test_metadata_that_lies_is_refused(tmp_path, whole, info):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": whole}, path, {"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors"):
        places_of(read_header(path))


def test_files_without_metadata_hold_whole_tensors(tmp_path, whole):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": whole}, path)
    assert places_of(read_header(path)) == {"w": EntryPlace((0, 0), (6, 4))}


def test_the_metadata_is_torch_s(whole):
    metadata = json.loads(sharding_metadata({"w": Part(whole, (4, 0), (10, 4))})["DCP_SHARDING_INFO"])
    assert metadata["w"]["saved_offsets"] == [4, 0]
