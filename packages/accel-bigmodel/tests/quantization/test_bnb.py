"""The engine of bitsandbytes: what it refuses, what it expects of a file, and what it makes of saved weights."""

import json

import pytest
import torch
from torch import nn

from accel_bigmodel import BnbQuantizationConfig, QuantizationError

pytest.importorskip("bitsandbytes", reason="hatch run engines-quantization:test installs it")
from accel_bigmodel.quantization.bnb import BitsAndBytesEngine

CPU = torch.device("cpu")
INT8 = BnbQuantizationConfig(load_in_8bit=True)
FP4 = BnbQuantizationConfig(load_in_4bit=True)
NESTED = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
NESTED_TEXT = "weight.quant_state.bitsandbytes__nf4"


def test_an_odd_number_of_4_bit_weights_is_refused():
    assert "odd number" in BitsAndBytesEngine(FP4).why_not(nn.Linear(3, 5), CPU)
    assert BitsAndBytesEngine(FP4).why_not(nn.Linear(3, 4), CPU) is None
    assert BitsAndBytesEngine(INT8).why_not(nn.Linear(3, 5), CPU) is None


def test_8_bit_rows_are_rounded_by_their_largest_weight():
    weight = torch.tensor([[127.0, -64.0, 1.0, 0.0], [-254.0, 2.0, 128.0, 0.0]])
    layer = nn.Linear(4, 2)
    new = BitsAndBytesEngine(INT8).quantize(layer, weight, CPU)
    assert new.weight.data.tolist() == [[127, -64, 1, 0], [-127, 1, 64, 0]]
    assert new.weight.SCB.tolist() == [127.0, 254.0]
    assert new.bias is layer.bias


@pytest.mark.parametrize("config", [INT8, FP4, NESTED], ids=["int8", "fp4", "nested nf4"])
def test_what_is_expected_of_a_file_is_what_the_engine_saves(config):
    engine, layer = BitsAndBytesEngine(config), nn.Linear(64, 6, bias=False)
    saved = engine.quantize(layer, torch.randn(6, 64), CPU).state_dict()
    expected = engine.expected_pieces(layer, CPU)
    assert {name.removeprefix("weight.") for name in saved} == {n.removeprefix("weight.") for n in expected}
    for name, (shape, dtype) in expected.items():
        value = torch.as_tensor(saved[name])
        assert value.dtype == dtype or name == "weight_format", name
        assert shape in (None, value.shape), name


@pytest.mark.parametrize("config", [INT8, FP4, NESTED], ids=["int8", "fp4", "nested nf4"])
def test_restored_layers_compute_as_those_that_were_saved(config):
    engine, layer = BitsAndBytesEngine(config), nn.Linear(64, 6).eval()
    old = engine.quantize(layer, torch.randn(6, 64), CPU)
    pieces = {name: torch.as_tensor(v) for name, v in old.state_dict().items() if name != "bias"}
    if "weight_format" in pieces:
        pieces["weight_format"] = pieces["weight_format"].to(torch.uint8)
    new = engine.restore(layer, pieces, CPU)
    x = torch.randn(3, 64)
    assert torch.equal(new(x), old(x))


def test_another_order_of_8_bit_weights_is_refused():
    pieces = {"weight": torch.zeros(2, 4, dtype=torch.int8), "SCB": torch.ones(2)}
    pieces["weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(QuantizationError, match="weight_format is 1; bitsandbytes reads only 0, row-major"):
        BitsAndBytesEngine(INT8).restore(nn.Linear(4, 2), pieces, CPU)


def nested_pieces(text):
    engine, layer = BitsAndBytesEngine(NESTED), nn.Linear(64, 6, bias=False)
    pieces = dict(engine.quantize(layer, torch.randn(6, 64), CPU).state_dict())
    pieces[NESTED_TEXT] = torch.tensor(list(text(bytes(pieces[NESTED_TEXT].tolist()))), dtype=torch.uint8)
    return engine, layer, pieces


def test_nested_entries_of_weights_that_are_not_nested_are_refused():
    engine, layer = BitsAndBytesEngine(FP4), nn.Linear(64, 6, bias=False)
    pieces = dict(engine.quantize(layer, torch.randn(6, 64), CPU).state_dict())
    name = "weight.quant_state.bitsandbytes__fp4"
    found = json.loads(bytes(pieces[name].tolist())) | {"nested_absmax": 1}
    pieces[name] = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)
    told = r"fp4 has unknown entries \['nested_absmax'\], expected \['quant_type', 'blocksize', 'shape', 'dtype'\]"
    with pytest.raises(QuantizationError, match=told):
        engine.restore(layer, pieces, CPU)


def changed(**values):
    return lambda old: json.dumps(json.loads(old) | values).encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (lambda old: b"\xff{", "cannot be read"),
        (lambda old: b"[" * 100_000, "cannot be read"),
        (lambda old: b"[]", "expected"),
        (changed(shape=[600, 64]), "expected"),
        (changed(blocksize=128), "expected"),
        (changed(quant_type="fp4"), "expected"),
        (changed(nested_blocksize=64), "expected"),
        (changed(dtype="int64"), "expected"),
        (changed(nested_offset=None), "nested_offset"),
        (changed(nested_offset="1"), "nested_offset"),
        (changed(nested_offset=10**400), "nested_offset"),
        (changed(author="me", zone=1), r"unknown entries \['author', 'zone'\]"),
        (changed(absmax=[1.0]), r"unknown entries \['absmax'\]"),
        (changed(**{"a.quant_map": [1.0]}), r"unknown entries \['a.quant_map'\]"),
    ],
    ids=[
        "bytes",
        "deep",
        "list",
        "shape",
        "block",
        "type",
        "nested",
        "dtype",
        "no offset",
        "text",
        "large",
        "unknown",
        "tensor",
        "prefix",
    ],
)
def test_metadata_that_do_not_fit_are_refused(text, told):
    engine, layer, pieces = nested_pieces(text)
    with pytest.raises(QuantizationError, match=f"{NESTED_TEXT} .*{told}"):
        engine.restore(layer, pieces, CPU)
