"""Dividing inputs between processes."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.errors import ConfigError
from accel_state.world.splitting import part_bounds, split_for_rank

Pair = namedtuple("Pair", ["words", "labels"])

sizes = st.integers(0, 40)
worlds = st.integers(1, 9)


class Rows:
    """What is used of a ``datasets.Dataset``."""

    column_names = ("row",)

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Rows(self.rows[index] for index in indices)


def as_list(value):
    return value.tolist() if isinstance(value, torch.Tensor) else list(getattr(value, "rows", value))


KINDS = {"list": list, "tuple": tuple, "tensor": torch.tensor, "dataset": Rows}


def parts_of(inputs, world, **kwargs):
    return [split_for_rank(inputs, rank, world, **kwargs) for rank in range(world)]


@given(sizes, worlds)
def test_bounds_cover_everything_once_and_differ_by_one_at_most(length, world):
    bounds = [part_bounds(length, rank, world) for rank in range(world)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(length))
    lengths = [stop - start for start, stop in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, world=worlds)
def test_parts_joined_are_the_input(kind, size, world):
    values = list(range(size))
    inputs = KINDS[kind](values)
    parts = parts_of(inputs, world)
    assert [value for part in parts for value in as_list(part)] == values
    assert {type(part) for part in parts} == {type(inputs)}


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, world=worlds)
def test_padded_parts_are_all_of_one_size_and_padded_with_the_last(kind, size, world):
    values = list(range(size))
    parts = [as_list(part) for part in parts_of(KINDS[kind](values), world, apply_padding=True)]
    assert {len(part) for part in parts} == {math.ceil(size / world)}
    for rank, part in enumerate(parts):
        start, stop = part_bounds(size, rank, world)
        assert part == values[start:stop] + values[-1:] * (len(part) - (stop - start))


@given(st.lists(st.integers(0, 999)), worlds, st.booleans())
def test_t19_the_callers_dict_is_never_changed(values, world, padding):
    inputs = {"a": list(values), "b": {"c": tuple(values), "d": torch.tensor(values, dtype=torch.int64)}}
    before = copy.deepcopy(inputs)
    parts = parts_of(inputs, world, apply_padding=padding)
    assert inputs["a"] == before["a"]
    assert inputs["b"]["c"] == before["b"]["c"]
    assert torch.equal(inputs["b"]["d"], before["b"]["d"])
    for rank, part in enumerate(parts):
        alone = split_for_rank(values, rank, world, apply_padding=padding)
        assert part["a"] == list(part["b"]["c"]) == part["b"]["d"].tolist() == alone


def test_t19_a_tuple_can_be_padded():
    assert parts_of((1, 2, 3), 2, apply_padding=True) == [(1, 2), (3, 3)]
    assert parts_of((1, 2), 2, apply_padding=True) == [(1,), (2,)]


def test_fewer_inputs_than_processes():
    assert parts_of(["x"], 3) == [["x"], [], []]
    assert parts_of(["x"], 3, apply_padding=True) == [["x"], ["x"], ["x"]]


def test_nothing_to_pad_with():
    assert parts_of([], 2, apply_padding=True) == [[], []]


def test_a_named_tuple_is_divided_field_by_field():
    parts = parts_of(Pair(["a", "b", "c"], torch.tensor([1, 2, 3])), 2, apply_padding=True)
    assert [type(part) for part in parts] == [Pair, Pair]
    assert [part.words for part in parts] == [["a", "b"], ["c", "c"]]
    assert [part.labels.tolist() for part in parts] == [[1, 2], [3, 3]]


@pytest.mark.parametrize("make", [OrderedDict, UserDict])
def test_mappings_keep_their_type(make):
    inputs = make({"a": [1, 2, 3], "b": ["x", "z", "w"]})
    part = split_for_rank(inputs, 1, 2)
    assert type(part) is make
    assert dict(part) == {"a": [3], "b": ["w"]}
    assert dict(inputs)["a"] == [1, 2, 3]


def test_lengths_that_differ_are_named():
    with pytest.raises(ConfigError, match=r"inputs\['a'\] has 2, inputs\['b'\] has 3") as caught:
        split_for_rank({"a": [1, 2], "b": [1, 2, 3]}, 0, 2)
    assert isinstance(caught.value, ValueError)


def test_lengths_that_differ_deeper_are_named():
    with pytest.raises(ConfigError, match=r"inputs\['b'\]\['c'\] has 3, inputs\['b'\]\['d'\] has 1"):
        split_for_rank({"a": [1, 2, 3], "b": {"c": [1, 2, 3], "d": [1]}}, 0, 2)


def test_a_value_that_cannot_be_divided_is_named():
    with pytest.raises(ConfigError, match=r"inputs\['scale'\] is of type float"):
        split_for_rank({"a": [1, 2], "scale": 0.5}, 0, 2)


@pytest.mark.parametrize("value", ["a prompt", 7, None, torch.tensor(3.0), object()])
def test_other_things_go_to_everybody_whole(value):
    assert all(part is value for part in parts_of(value, 3, apply_padding=True))


def test_an_empty_dict_goes_to_everybody():
    assert parts_of({}, 2) == [{}, {}]


def test_tensors_move_to_the_device_that_is_asked_for():
    part = split_for_rank({"x": torch.zeros(3, 2)}, 1, 2, apply_padding=True, device=torch.device("meta"))
    assert part["x"].device.type == "meta"
    assert part["x"].shape == (2, 2)
