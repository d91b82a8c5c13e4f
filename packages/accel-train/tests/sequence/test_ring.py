"""The parts of ring attention that run where there is no kernel."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from accel_train.sequence.ring import attend, attend_backward


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_a_kernel(dtype, is_causal):
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(2, 3, 10, 4, dtype=torch.float64).to(dtype) for _ in range(4))
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    expected = scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.3)
    expected.backward(gradient.double())
    output, logs = attend(query, key, value, is_causal, 0.3)
    found = attend_backward(gradient, query, key, value, output, logs, is_causal, 0.3)
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[
        dtype
    ]  # scores are in float32 at least
    torch.testing.assert_close(output.double(), expected.detach(), rtol=0, atol=near)
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one.double(), leaf.grad, rtol=0, atol=near)
    scores = query.double() @ key.double().transpose(-1, -2) * 0.3
    if not is_causal:
        torch.testing.assert_close(logs.double(), scores.logsumexp(-1), rtol=0, atol=near)
    assert math.isfinite(logs.sum())
