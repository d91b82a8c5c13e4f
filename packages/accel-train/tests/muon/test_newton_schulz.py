"""Newton-Schulz against the singular value decomposition, and against torch's own Muon."""

from __future__ import annotations

import pytest
import torch

from accel_train.muon.newton_schulz import flops, orthogonalize


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = orthogonalize(matrix).double()
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = u.T @ found @ vt.T
    assert inside.diagonal().min() > 0.6
    assert inside.diagonal().max() < 1.3
    assert (inside - inside.diagonal().diag()).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 8, 24), (5, 24, 8)])
def test_each_of_a_stack_is_a_matrix_of_its_own(shape, dtype):
    torch.manual_seed(0)
    stack = torch.randn(shape, dtype=dtype) * torch.tensor([1e-3, 1, 10, 100, 1e3], dtype=dtype).view(5, 1, 1)
    before = stack.clone()
    found = orthogonalize(stack)
    assert found.dtype == torch.bfloat16
    for one, given in zip(found, stack, strict=True):
        torch.testing.assert_close(one.float(), orthogonalize(given).float(), rtol=0, atol=0.03)
    assert stack.equal(before)


def test_a_matrix_of_zeros_stays_so():
    assert orthogonalize(torch.zeros(3, 4)).eq(0).all()


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((8, 24), (24, 8)):
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.randn(shape), steps=3)
        assert flops(*shape, steps=3) == counter.get_total_flops()
