"""Exchanges of a divided sequence, against slices of the whole one."""

import pytest
import torch
import torch.distributed as dist

from accel_train.sequence.exchange import gather_sequence, heads_to_sequence, precise, sequence_to_heads
from testkit import worlds

SHAPE = (2, 4, 6, 3)  # batch, heads, positions, features


def whole(seed, dtype=torch.float64):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part(tensor, dimension, rank, ranks):
    return tensor.chunk(ranks, dimension)[rank].clone()


def exchanged():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values, gradient = whole(1), whole(2)

    positions = part(values, 2, rank, ranks).requires_grad_()
    heads = sequence_to_heads(positions, None)
    heads.backward(part(gradient, 1, rank, ranks))
    torch.testing.assert_close(heads.detach(), part(values, 1, rank, ranks), rtol=0, atol=0)
    torch.testing.assert_close(positions.grad, part(gradient, 2, rank, ranks), rtol=0, atol=0)

    heads = part(values, 1, rank, ranks).requires_grad_()
    positions = heads_to_sequence(heads, None)
    positions.backward(part(gradient, 2, rank, ranks))
    torch.testing.assert_close(positions.detach(), part(values, 2, rank, ranks), rtol=0, atol=0)
    torch.testing.assert_close(heads.grad, part(gradient, 1, rank, ranks), rtol=0, atol=0)

    # As it comes from a projection: heads and positions in another order in memory.
    turned = part(values, 2, rank, ranks).transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    torch.testing.assert_close(sequence_to_heads(turned, None), part(values, 1, rank, ranks), rtol=0, atol=0)
    torch.testing.assert_close(gather_sequence(turned, None), values, rtol=0, atol=0)

    # Every rank uses all positions: the gradients of all of them are summed.
    for dtype in (torch.float64, torch.bfloat16):
        gradients = [whole(3 + other, dtype) for other in range(ranks)]
        mine = part(values.to(dtype), 2, rank, ranks).requires_grad_()
        gathered = gather_sequence(mine, None)
        gathered.backward(gradients[rank])
        torch.testing.assert_close(gathered.detach(), values.to(dtype), rtol=0, atol=0)
        expected = torch.stack([each.double() for each in gradients]).sum(0).to(dtype)
        torch.testing.assert_close(mine.grad, part(expected, 2, rank, ranks), rtol=0, atol=0)


def twice():
    """Second derivatives: of (heads ** 3).sum(), which moves numbers only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    positions = part(whole(1), 2, rank, ranks).requires_grad_()
    [first] = torch.autograd.grad(
        (sequence_to_heads(positions, None) ** 3).sum(), positions, create_graph=True
    )
    torch.testing.assert_close(first, 3 * positions**2)
    [second] = torch.autograd.grad(first.sum(), positions)
    torch.testing.assert_close(second, 6 * positions)


def both():
    dist.init_process_group("gloo")
    exchanged()
    twice()


def test_exchanges_are_slices_of_the_whole_sequence():
    worlds.run(both, 2)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_sums_of_16_bits_are_made_in_32(dtype, expected):
    assert precise(dtype) is expected
