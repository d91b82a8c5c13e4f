"""The layout of a training state: what a file gives is checked, and leads to the boxes that were saved."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import torch

from accel_ckpt.divisions import Division, RankMesh
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.layout import LaidOut, Layout
from accel_ckpt.geometry import Box


def laid_out(shape: tuple[int, ...], mesh: torch.Tensor, splits: Any, copy: int = 0) -> LaidOut:
    return LaidOut(shape, torch.float32, Division(RankMesh.of(mesh), splits), copy)


LAYOUT = Layout(
    {
        "model": {
            "rows": laid_out((12, 4), torch.arange(4), ((0, 1),)),
            "copies": laid_out((12, 4), torch.arange(4).view(2, 2), (None, (0, 1)), 1),
        },
        "state": {"any order": laid_out((6,), torch.tensor([3, 0, 2]), ((0, 1),))},
    },
    {"model": ["model-shard-00002.safetensors"]},
    {"model": {"tied": "rows"}},
    {"model": {"": 1}},
)


def plain() -> Any:
    return json.loads(json.dumps(LAYOUT.to_plain()))


def test_a_layout_comes_back_from_json() -> None:
    assert Layout.from_plain(plain(), 4, "x") == LAYOUT


def test_boxes_are_those_of_the_copy_that_was_written() -> None:
    found = list(LAYOUT.tensors["model"]["copies"].boxes_in(Box((5, 0), (2, 4))))
    assert [(rank, number, box) for rank, number, box in found] == [
        (2, 0, Box((0, 0), (6, 4))),
        (3, 0, Box((6, 0), (6, 4))),
    ]


def test_a_layout_grows_with_tensors_and_not_with_ranks() -> None:
    sizes = []
    for world in (8, 4096):
        named = {f"t{n}": laid_out((8192, 4), torch.arange(world), ((0, 1),)) for n in range(100)}
        sizes.append(len(json.dumps(Layout({"model": named}).to_plain())))
    assert sizes[1] - sizes[0] < 10
    assert sizes[1] < 100 * 100


DAMAGE: dict[str, Any] = {
    "a division that is not there": lambda d: d["tensors"]["model"]["rows"].update(division=9),
    "a copy that is not there": lambda d: d["tensors"]["model"]["copies"].update(copy=2),
    "a negative size": lambda d: d["tensors"]["model"]["rows"].update(shape=[-12, 4]),
    "a size that overflows": lambda d: d["tensors"]["model"]["rows"].update(shape=[1 << 62, 4]),
    "fewer dimensions than are divided": lambda d: d["tensors"]["model"]["rows"].update(shape=[]),
    "an unknown dtype": lambda d: d["tensors"]["model"]["rows"].update(dtype="F31"),
    "more ranks than there are": lambda d: d["divisions"][0].update(shape=[5]),
    "a mesh of a thousand million ranks": lambda d: d["divisions"][0].update(shape=[10**9], strides=[0]),
    "ranks behind the last": lambda d: d["divisions"][0].update(first=1),
    "one rank at two places": lambda d: d["divisions"][2].update(ranks=[3, 3, 2]),
    "steps that meet": lambda d: d["divisions"][1].update(strides=[1, 1]),
    "a mesh of fewer dimensions": lambda d: d["divisions"][1].update(shape=[4]),
    "no such reading": lambda d: d["divisions"][0].update(reading=1),
    "a factor of 0": lambda d: d["divisions"][0].update(splits=[[0, 0]]),
    "a split of three numbers": lambda d: d["divisions"][0].update(splits=[[0, 1, 2]]),
    "a factor of a thousand million": lambda d: d["divisions"][0].update(splits=[[0, 10**9]]),
    "no tensors": lambda d: d.pop("tensors"),
    "a list": lambda d: d.update(divisions={}),
    "text for a number": lambda d: d["divisions"][0].update(first="0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_layout_is_refused(name: str) -> None:
    damaged = copy.deepcopy(plain())
    DAMAGE[name](damaged)
    with pytest.raises(CorruptCheckpointError, match="the manifest"):
        Layout.from_plain(damaged, 4, "the manifest")


@pytest.mark.parametrize("splits", list(itertools.product([None, (0, 1), (1, 1), (0, 2)], repeat=2)))
def test_boxes_of_a_whole_tensor_cover_it_once(splits: Any) -> None:
    laid = laid_out((7, 5), torch.arange(6).view(2, 3), splits)
    count = torch.zeros(7, 5)
    for _, _, box in laid.boxes_in(Box((0, 0), (7, 5))):
        count[box.slices] += 1
    assert torch.equal(count, torch.ones(7, 5))
