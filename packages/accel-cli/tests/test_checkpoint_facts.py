"""Facts of checkpoints and the differences between two, from real saves; largest differences against plain torch."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch

from accel_ckpt import open_training_state, save_training_state
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.local import LocalFolder
from accel_ckpt.training.checkpointer import Checkpointer
from accel_cli.checkpoint_facts import checkpoints_below, differences, facts, tensors_of


def saved(folder, weight, **shared):
    save_training_state(folder, models=[{"weight": weight}], shared=shared, per_rank={})
    return open_training_state(folder)


def compared(folder, one, other):
    return [*differences(saved(folder / "a", one, step=1), saved(folder / "b", other, step=1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_largest_difference_of_floats(dtype, tmp_path):
    one, other = (torch.randn(5, 7, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1))
    (found,) = compared(tmp_path, one, other)
    assert found.largest == (one.double() - other.double()).abs().max().item()
    assert found.name == "model 0: weight"
    assert found.first == found.second == f"{str(dtype)[6:]} [5, 7]"


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        ([2**60, 1], [2**60 + 1, 1], 1),  # float64 does not tell them apart
        ([True, False], [True, True], 1),
        ([1.0, math.nan], [1.0, math.nan], None),
        ([0.0, math.inf], [-0.0, math.inf], None),
        ([1 + 2j], [1 - 1j], 3),
        ([], [], None),
    ],
)
def test_values_that_floats_do_not_tell_apart_and_those_that_are_equal(one, other, largest, tmp_path):
    found = compared(tmp_path, torch.tensor(one), torch.tensor(other))
    assert [one.largest for one in found] == ([] if largest is None else [largest])


def test_a_nan_on_one_side_alone_is_a_difference(tmp_path):
    (found,) = compared(tmp_path, torch.tensor([1.0, math.nan, 3.0]), torch.tensor([2.0, 2.0, 3.0]))
    assert math.isnan(found.largest)


def test_a_large_tensor_is_compared_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_cli.checkpoint_facts._CHUNK", 4)
    one = torch.zeros(3, 5)
    other = one.clone()
    other[0, 0], other[2, 4] = 1, -3
    (found,) = compared(tmp_path, one, other)
    assert found.largest == 3


def test_names_shapes_dtypes_and_values_that_differ(tmp_path):
    a = saved(
        tmp_path / "a", torch.zeros(2), step=1, only={"x": torch.ones(1)}, kind=(1, {}), same=[float("nan")]
    )
    b = saved(tmp_path / "b", torch.zeros(3), step=2, kind=(1, []), same=[float("nan")])
    assert [tuple(one) for one in differences(a, b)] == [
        ("kind.1", "{}", "[]", None),
        ("model 0: weight", "float32 [2]", "float32 [3]", None),
        ("only.x", "float32 [1]", None, None),
        ("step", "1", "2", None),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(5000), np.where(np.arange(5000) == 2500, 0, np.arange(5000))),
        (deque([torch.ones(2)]), deque([torch.zeros(2)])),
        ({"b", "a"}, {"b", "c"}),
        (b"x" * 5000, b"x" * 4999 + b"y"),
        (torch.ones(2, dtype=torch.complex128), torch.full((2,), 1j, dtype=torch.complex128)),
        (range(3), slice(3)),
        (1, True),
    ],
)
def test_all_kinds_of_data_are_compared(one, other, tmp_path):
    a, same, b = (
        saved(tmp_path / name, torch.zeros(1), data=data)
        for name, data in (("a", one), ("s", one), ("b", other))
    )
    assert [*differences(a, same)] == []
    assert len([*differences(a, b)]) == 1


def test_only_headers_are_read_for_names_of_tensors(tmp_path, monkeypatch):
    state = saved(tmp_path / "a", torch.zeros(2), tree={"x": torch.ones(3, dtype=torch.int64)})
    monkeypatch.setattr("accel_ckpt.format.saved_tensors.SavedTensor.read", None)
    assert tensors_of(state) == {"model 0: weight": "float32 [2]", "tree.x": "int64 [3]"}
    assert facts(state)["tensors"] == 2


def test_a_checkpointer_says_its_step_by_its_name(tmp_path):
    Checkpointer(tmp_path).save(12, {"model": torch.nn.Linear(2, 2), "epoch": 4}, per_rank={"own": 3})
    about = facts(open_training_state(tmp_path / "step_12"))
    assert (about["step"], about["models"]) == (12, ["model"])
    assert about["shared parts"] == ["epoch", "modules"]
    assert about["parts of each rank"] == ["modules", "own"]
    (listed,) = checkpoints_below(find_folder(tmp_path))
    assert (listed.name, listed.state, listed.step, listed.ranks) == ("step_12", "complete", 12, 1)


def test_odd_trees_under_known_names(tmp_path):
    save_training_state(
        tmp_path / "a",
        models=[{"weight": torch.zeros(2)}],
        shared={"progress": [1], "optimizer_0": 3, "step": "x"},
        per_rank={"rng": 3, ".": {"values": 5}},
    )
    about = facts(open_training_state(tmp_path / "a"))
    assert about["random states"] == []
    assert (about["step"], about["strategy"], about["optimizers"], about["models"]) == (None, None, [], 1)


def test_one_that_cannot_be_read_does_not_hide_the_others(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, {"step": step})
    newer = tmp_path / "step_3" / "manifest.json"
    newer.write_text(newer.read_text().replace('"version": 2', '"version": 3'))
    whole = LocalFolder.has_manifest

    def refused(self):
        if self.path.name == "step_2":
            raise PermissionError(13, "Permission denied", str(self.path))
        return whole(self)

    monkeypatch.setattr(LocalFolder, "has_manifest", refused)
    first, second, third = (listed.state for listed in checkpoints_below(find_folder(tmp_path)))
    assert first == "complete"
    assert second.startswith("cannot be read: [Errno 13] Permission denied")
    assert third.startswith("cannot be read: ")
    assert "format version 3" in third
