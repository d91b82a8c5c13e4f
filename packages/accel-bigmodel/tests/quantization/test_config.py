from __future__ import annotations

import dataclasses

import pytest
import torch

from accel_bigmodel import BnbQuantizationConfig, QuantizationError, TorchAoQuantizationConfig


def test_names_order_and_defaults_are_accelerates():
    fields = [f.name for f in dataclasses.fields(BnbQuantizationConfig) if not f.kw_only]
    assert fields == [
        "load_in_8bit", "llm_int8_threshold", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
        "bnb_4bit_compute_dtype", "torch_dtype", "skip_modules", "keep_in_fp32_modules",
    ]  # fmt: skip
    config = BnbQuantizationConfig(True)
    assert (config.llm_int8_threshold, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (
        6.0,
        "fp4",
        False,
    )
    assert (config.skip_modules, config.keep_in_fp32_modules) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "load_in_8bit and load_in_4bit are both off; turn on exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "are both on; turn on exactly one"),
        ({"load_in_8bit": 1}, "load_in_8bit is 1; give True or False"),
        ({"load_in_8bit": True, "llm_int8_threshold": True}, "llm_int8_threshold is True; give a number"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "'nf3'; give 'fp4' or 'nf4'"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp64"},
            "bnb_4bit_compute_dtype .* 'fp64'; give 'fp32'",
        ),
        ({"load_in_4bit": True, "torch_dtype": torch.int8}, "torch_dtype .* torch.int8; give 'fp32'"),
        ({"load_in_8bit": True, "skip_modules": "lm_head"}, r"'lm_head'; give a list .* \['lm_head'\]"),
        ({"load_in_8bit": True, "skip_modules": [""]}, "skip_modules is"),
        ({"load_in_8bit": True, "bnb_4bit_cpu_packing": True}, "bnb_4bit_cpu_packing has no effect"),
    ],
)
def test_names_the_value_and_what_to_give(options, message):
    with pytest.raises(QuantizationError, match=message):
        BnbQuantizationConfig(**options)


def test_a_threshold_without_meaning_is_said():
    with pytest.warns(UserWarning, match="llm_int8_threshold has no effect with load_in_4bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)


def test_a_changed_copy_is_resolved_anew():
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert dataclasses.replace(config, skip_modules=["head"]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int2"}, "weights is 'int2'; give 'int8', 'int4' or 'float8'"),
        ({"weights": "int4", "group_size": 48}, "group_size is 48; give 32, 64 or 128"),
        ({"weights": "int8", "group_size": 32}, "group_size has no effect with 'int8'"),
        ({"weights": "int8", "torch_dtype": None}, "torch_dtype of TorchAoQuantizationConfig is None"),
        ({"weights": "int8", "skip_modules": "head"}, "give a list"),
    ],
)
def test_torchao_names_the_value_and_what_to_give(options, message):
    with pytest.raises(QuantizationError, match=message):
        TorchAoQuantizationConfig(**options)


def test_formats_are_rows_of_the_table():
    from accel_bigmodel import QUANTIZATION_SUPPORT

    made = {
        BnbQuantizationConfig(load_in_8bit=True).format,
        BnbQuantizationConfig(load_in_4bit=True).format,
        BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").format,
        *(TorchAoQuantizationConfig(weights).format for weights in ("int8", "int4", "float8")),
    }
    assert made == {cell.format for cell in QUANTIZATION_SUPPORT}
