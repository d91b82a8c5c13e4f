"""Each format of quantised weights on the device, as the table of what runs where says."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    QUANTIZATION_SUPPORT,
    BnbQuantizationConfig,
    QuantizationError,
    TorchAoQuantizationConfig,
    load_and_quantize_model,
)
from testkit.figures import Figure, NotRunError, Run

CONFIGS = {
    "bitsandbytes int8": BnbQuantizationConfig(load_in_8bit=True, skip_modules=[]),
    "bitsandbytes fp4": BnbQuantizationConfig(load_in_4bit=True, skip_modules=[]),
    "bitsandbytes nf4": BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16", skip_modules=[]
    ),
    "torchao int8": TorchAoQuantizationConfig("int8", skip_modules=[]),
    "torchao int4": TorchAoQuantizationConfig("int4", group_size=32, skip_modules=[]),
    "torchao float8": TorchAoQuantizationConfig("float8", skip_modules=[]),
}
# Largest difference to the outputs with full weights, relative to their largest value, as in the tests with the real
# engines.
CLOSE = {"int8": 0.05, "float8": 0.15, "fp4": 0.6, "nf4": 0.5, "int4": 0.5}


@torch.no_grad()
def cells(run: Run, engine: str) -> Iterator[Figure]:
    cells = [
        cell
        for cell in QUANTIZATION_SUPPORT
        if cell.device == run.device.type and cell.format.startswith(engine)
    ]
    if not cells:
        raise NotRunError(f"the table has no cell of {engine} on {run.device.type}")
    width = run.pick(128, 2048)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(2)]
    full = nn.Sequential(layers[0], nn.GELU(), layers[1]).eval()
    batch = torch.randn(16, width)
    expected = full(batch)
    for cell in cells:
        config = CONFIGS[cell.format]
        where = {"": "cpu" if run.on_cpu else 0}
        if not cell.runs:
            try:
                load_and_quantize_model(copy.deepcopy(full), config, device_map=where)
            except QuantizationError:
                yield Figure(cell.format, 1, "refused", "refused", True, cell.why)
            else:
                yield Figure(cell.format, 0, "refused", "refused", False, "it ran")
            continue
        model = load_and_quantize_model(copy.deepcopy(full), config, device_map=where)
        found = model(batch.to(run.device, config.dtype)).float().cpu()
        apart = float((found - expected).abs().max() / expected.abs().max())
        yield run.within(f"{cell.format}: error of the outputs", apart, CLOSE[cell.format.split()[1]])
        del model


@pytest.mark.gpu(small_on_cpu=True)
@pytest.mark.parametrize("engine", ["bitsandbytes", "torchao"])
def test_quantise(engine, judge):
    pytest.importorskip(engine)
    judge(cells, engine)
