"""Norms and averages of gradients that ranks hold whole; tests-integration has those of which they hold parts."""

import math

import pytest
import torch
from torch import nn

from accel_train.strategies.gradients import any_divided, any_nonfinite, clip_by_norm, total_norm


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(3, 2, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return [*found, nn.Parameter(torch.zeros(1, dtype=dtype))]  # the last has no gradient


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf, 0.5, 0, -1.0, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_gradients_have_the_norm_that_torch_gives(norm_type, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    assert not any_divided(ours)
    expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type=norm_type)
    norm = total_norm(ours, norm_type)
    assert norm.dtype == dtype
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(clip_by_norm(ours, 0.5, norm_type), expected)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_small_gradients_are_not_scaled():
    found = parameters()
    before = found[0].grad.clone()
    clip_by_norm(found, 1e6, 2.0)
    assert torch.equal(found[0].grad, before)


def test_nothing_has_the_norm_zero():
    assert total_norm([], 2.0).item() == 0
    for norm_type in (2.0, 0, math.inf, -1.0, -math.inf):
        assert total_norm([nn.Parameter(torch.ones(2))], norm_type).item() == 0


def test_low_precision_is_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 100.0)
    assert total_norm([parameter], 2.0).item() == pytest.approx(100 * math.sqrt(100_000))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_element_is_found_and_large_ones_are_not_bad(bad, dtype):
    device = torch.device("cpu")
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((50, 7), (3,), (0, 4), ())]
    assert not any_nonfinite(found, device)
    for parameter in found:
        parameter.grad = torch.full_like(parameter, torch.finfo(dtype).max)
    assert not any_nonfinite(found, device)
    found[0].grad[31, 2] = bad
    assert any_nonfinite(found, device)
    assert not any_nonfinite(found[1:], device)


def test_sparse_gradients_are_looked_at():
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert not any_nonfinite(list(table.parameters()), torch.device("cpu"))
    table(torch.tensor([2])).sum().mul(math.inf).backward()
    assert any_nonfinite(list(table.parameters()), torch.device("cpu"))
