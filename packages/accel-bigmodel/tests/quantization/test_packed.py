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


def four_bits(kind="nf4", nested=False):
    return {
        "weight": (None, torch.uint8),
        "weight.absmax": (None, torch.float32),
        f"weight.quant_state.bitsandbytes__{kind}": (None, torch.uint8),
        **({"weight.nested_absmax": (None, torch.float32)} if nested else {}),
    }


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (four_bits(nested=False), "asked for is 4 bits .*'nf4', bnb_4bit_use_double_quant=False"),
        (four_bits("fp4", nested=True), "asked for is 4 bits .*'fp4', bnb_4bit_use_double_quant=True"),
        (EXPECTED["a"], "asked for is 8 bits"),
    ],
    ids=["not nested", "fp4", "int8"],
)
def test_another_quantisation_is_named_beside_the_one_asked_for(tmp_path, asked, told):
    tensors = {f"a.{name}": torch.ones(1, dtype=dtype) for name, (_, dtype) in four_bits(nested=True).items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    packed = PackedWeights(open_weights(tmp_path), LINEAR, torch.bfloat16)
    holds = r"it holds 4 bits .*'nf4', bnb_4bit_use_double_quant=True\)"
    with pytest.raises(QuantizationError, match=rf"{holds}, and {told}"):
        packed.check({"a": LINEAR["a"]}, Engine({"a": asked}), {"a": torch.device("cpu")})
