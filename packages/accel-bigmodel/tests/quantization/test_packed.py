"""Checkpoints with quantised weights, shown as one tensor per weight."""

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_bigmodel import QuantizationError
from accel_bigmodel.quantization.packed import PackedWeights
from accel_ckpt import open_weights

LINEAR = {"a": nn.Linear(4, 2), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)}
TENSORS = {
    "a.weight": torch.ones(2, 4, dtype=torch.int8),
    "a.SCB": torch.ones(2),
    "a.bias": torch.zeros(2),
    "b.weight.scale": torch.full((2,), 3.0),
    "b.weight.codes": torch.ones(2, 4, dtype=torch.uint8),
    "c.weight": torch.randn(2, 4),
}
EXPECTED = {
    "a": {"weight": (torch.Size((2, 4)), torch.int8), "SCB": (torch.Size((2,)), torch.float32)},
    "b": {"weight.codes": (None, torch.uint8), "weight.scale": (torch.Size((2,)), torch.float32)},
}


class Engine:
    def __init__(self, expected):
        self.expected = expected

    def expected_pieces(self, layer, device):
        return next(self.expected[name] for name, each in LINEAR.items() if each is layer)


@pytest.fixture
def packed(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return PackedWeights(open_weights(tmp_path), LINEAR, torch.bfloat16)


def test_pieces_appear_as_one_weight_of_the_layers_shape(packed):
    assert set(packed.about) == {"a.weight", "a.bias", "b.weight", "c.weight"}
    for name in ("a.weight", "b.weight"):
        assert (tuple(packed.about[name].shape), packed.about[name].dtype) == ((2, 4), torch.bfloat16)
    assert packed.about["c.weight"].dtype == torch.float32
    assert packed.tensor("b.weight").numel() == 0
    assert torch.equal(packed.tensor("c.weight"), TENSORS["c.weight"])
    assert not packed.is_mapped("b.weight")
    assert packed.is_mapped("c.weight")


def test_pieces_are_read_by_their_names_after_the_layers(packed):
    found = packed.read("b")
    assert set(found) == {"weight.scale", "weight.codes"}
    assert torch.equal(found["weight.scale"], TENSORS["b.weight.scale"])
    assert set(packed.read("a")) == {"weight", "SCB"}


def check(packed, layers=("a", "b"), **changes):
    expected = {name: {**EXPECTED[name], **changes.get(name, {})} for name in EXPECTED}
    places = dict.fromkeys(LINEAR, torch.device("cpu"))
    packed.check({name: LINEAR[name] for name in layers}, Engine(expected), places)


def test_pieces_as_the_engine_makes_them_pass(packed):
    check(packed)


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        (("a",), {}, "b is quantised in the checkpoint, but is not to be quantised here"),
        (
            ("a", "b"),
            {"a": {"SCB": (torch.Size((3,)), torch.float32)}},
            r"a\.SCB is torch.float32 \(2,\) instead of",
        ),
        (
            ("a", "b"),
            {"b": {"weight.codes": (None, torch.int8)}},
            "b.weight.codes is torch.uint8 .* instead of",
        ),
        (("a", "b"), {"b": {"weight.zero": (None, torch.int8)}}, "b.weight.zero is missing"),
    ],
)
def test_other_pieces_are_refused_by_name(packed, layers, changes, message):
    with pytest.raises(QuantizationError, match=rf"another configuration: .*{message}.*nothing was changed"):
        check(packed, layers, **changes)
