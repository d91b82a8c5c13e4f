"""bfloat16 under autocast, which needs no gradient scaler."""

import torch

from accel_train import Accelerator
from accel_train.precision.base import DTypePolicy, PrecisionOptions
from accel_train.precision.bf16 import BF16Precision


def test_its_dtypes():
    precision = BF16Precision(PrecisionOptions())
    assert precision.dtypes == DTypePolicy(compute=torch.bfloat16, output=torch.float32)
    assert (precision.scaler, precision.loss_scale) == (None, 1.0)


def test_a_gradient_that_float16_would_lose_survives_without_scaling():
    """1e-30 is below the smallest float16, and in the range of bfloat16."""
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e30))
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 1e-30)
    optimizer.step()
    torch.testing.assert_close(model.weight.item(), before - 1.0, rtol=1e-2, atol=1e-2)


def test_a_huge_gradient_is_stepped_with():
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-30))
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 1e30)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(model.weight.item(), before - 1.0, rtol=1e-2, atol=1e-2)
