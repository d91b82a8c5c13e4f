"""A precision that an engine computes in: the dtypes are told, nothing is cast or scaled."""

import torch
from torch import nn

from accel_train.precision.base import PrecisionOptions
from accel_train.precision.engine import EnginePrecision
from accel_train.precision.fp16 import FP16Precision


def test_nothing_is_cast_or_scaled():
    precision = EnginePrecision(FP16Precision(PrecisionOptions("cpu")))
    assert precision.name == "fp16"
    assert precision.dtypes.compute is torch.float16
    assert precision.scaler is None
    assert precision.loss_scale == 1.0
    assert not precision.uses_autocast
    model = nn.Linear(2, 2)
    assert precision.convert(model) is model
    assert model(torch.ones(1, 2)).dtype is torch.float32
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
