"""Helpers for plain Python objects."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from accel_state.compat import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (3 * 2**30, "3.0 GB"),
        (2**60, "1024.0 PB"),
    ],
)
def test_bytes_for_people(size, text):
    assert convert_bytes(size) == text


def test_pretty_names():
    assert get_pretty_name(nn.Linear) == "Linear"
    assert get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert get_pretty_name(test_pretty_names) == "test_pretty_names"
    assert get_pretty_name(nn.Linear.forward) == "Linear.forward"
    assert get_pretty_name(functools.partial(print)) == "partial"


def test_merging():
    destination = {"a": {"x": 1, "y": 2}, "b": 3}
    merged = merge_dicts({"a": {"y": 5, "z": {"deep": 6}}, "c": [7]}, destination)
    assert merged is destination
    assert merged == {"a": {"x": 1, "y": 5, "z": {"deep": 6}}, "b": 3, "c": [7]}


def test_dotted_attributes():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.1.weight")
