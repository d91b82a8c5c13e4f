"""The named choices."""

from __future__ import annotations

import pickle

import pytest

from accel_state import enums
from accel_state.enums import (
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)

ALL = [value for value in vars(enums).values() if isinstance(value, enums.EnumWithContains) and len(value)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_members_are_found_by_value_in_any_case(kind):
    for member in kind:
        assert kind(member.value) is member
        assert kind(member.value.upper()) is member
        assert kind(member.value.lower()) is member
        assert member.value in kind
        assert member in kind
        assert member == member.value
        assert pickle.loads(pickle.dumps(member)) is member
    assert "no such thing" not in kind
    assert None not in kind
    with pytest.raises(ValueError, match="no such thing"):
        kind("no such thing")


def test_how_members_print():
    assert str(DistributedType.MULTI_CPU) == f"{DistributedType.MULTI_CPU}" == "DistributedType.MULTI_CPU"
    assert str(PrecisionType.BF16) == f"{PrecisionType.BF16}" == "bf16"
    assert str(DynamoBackend.INDUCTOR) == "INDUCTOR"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def test_values_that_configuration_files_hold():
    assert {member.value for member in DistributedType} == {
        "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
        "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON",
    }  # fmt: skip
    assert [member.value for member in FP8BackendType] == ["NO", "TE", "MSAMP", "AO"]
    assert LoggerType.COMETML.value == "comet_ml"
    assert RNGType.list() == [
        "torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"
    ]  # fmt: skip
