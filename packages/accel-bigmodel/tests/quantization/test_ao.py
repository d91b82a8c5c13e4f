"""The engine of torchao: what it refuses, and what it makes of weights and of saved pieces."""

import pytest
import torch
from torch import nn

from accel_bigmodel import TorchAoQuantizationConfig

pytest.importorskip("torchao", reason="hatch run engines-quantization:test installs it")
from accel_bigmodel.quantization.ao import TorchAoEngine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FORMATS = ("int8", "float8", "int4")


def engine_of(weights, dtype="bf16"):
    more = {"group_size": 32} if weights == "int4" else {}
    return TorchAoEngine(TorchAoQuantizationConfig(weights, torch_dtype=dtype, **more))


@pytest.mark.parametrize(
    ("inputs", "outputs", "device", "dtype", "told"),
    [
        (48, 16, CPU, "bf16", "48 inputs, not a multiple of the group size 32"),
        (64, 24, CPU, "bf16", "24 outputs, not a multiple of the CPU kernel's 16"),
        (64, 24, CUDA, "bf16", None),
        (64, 16, CUDA, "fp16", "computes in bfloat16 only"),
        (64, 16, CPU, "fp16", None),
    ],
)
def test_sizes_and_types_that_int4_does_not_compute_are_refused(inputs, outputs, device, dtype, told):
    layer = nn.Linear(inputs, outputs, device="meta")
    why = engine_of("int4", dtype).why_not(layer, device)
    assert (why is None) if told is None else (told in why)
    assert engine_of("int8", dtype).why_not(layer, device) is None


def test_8_bit_rows_are_rounded_by_their_largest_weight():
    weight = torch.tensor([[127.0, -64.0, 1.0, 0.0], [-254.0, 2.0, 128.0, 0.0]])
    layer = nn.Linear(4, 2).eval()
    new = engine_of("int8", "fp32").quantize(layer, weight, CPU)
    half_a_step = torch.tensor(
        [[0.6], [1.1]]
    )  # 127 and 254, divided by 127 steps; a little more for their rounding
    assert ((new.weight.dequantize() - weight).abs() <= half_a_step).all()
    assert new.bias is layer.bias
    assert not new.training


@pytest.mark.parametrize("weights", FORMATS)
def test_pieces_are_plain_tensors_as_expected_and_restore_the_layer(weights):
    engine, layer = engine_of(weights), nn.Linear(64, 16, bias=False).eval()
    old = engine.quantize(layer, torch.randn(16, 64), CPU)
    saved = old.state_dict()
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert {n: (v.shape, v.dtype) for n, v in saved.items()} == dict(engine.expected_pieces(layer, CPU))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    new = engine.restore(layer, saved, CPU)
    assert torch.equal(new(x), old(x))
    other = engine.quantize(layer, torch.zeros(16, 64), CPU)
    assert not torch.equal(other(x), old(x))
    other.load_state_dict(saved)
    assert torch.equal(other(x), old(x))
