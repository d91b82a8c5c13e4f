"""The gather with gradients, against one process that computes the loss of one big batch in float64."""

from __future__ import annotations

import pytest
import torch

from accel_state.errors import CollectiveMismatchError
from accel_state.operations.differentiable import gather_with_grad
from accel_state.world.process import PartialState
from testkit import worlds


def rows_of(rank: int, ragged: bool) -> int:
    return 2 + rank if ragged else 3


def inputs(rank: int, ragged: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows_of(rank, ragged), 4, generator=generator, dtype=torch.float64)


def weights() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def contrast(
    anchors: torch.Tensor, everything: torch.Tensor, first: int, temperatures: torch.Tensor
) -> torch.Tensor:
    """Each anchor against all rows; those are in the order of ranks."""
    logits = anchors @ torch.tanh(everything).t() * temperatures.mean()
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(anchors)) + first, reduction="sum")


def big_batch(world: int, ragged: bool) -> torch.Tensor:
    weight = weights().requires_grad_()
    rows = torch.cat([inputs(rank, ragged) for rank in range(world)]) @ weight
    (contrast(rows, rows, 0, rows.sum().reshape(1)) / len(rows)).backward()
    return weight.grad


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("form", ["all", "own"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_one_big_batch(world, form, ragged):
    def body():
        rank = PartialState().process_index
        weight = weights().requires_grad_()
        own = inputs(rank, ragged) @ weight
        rows, labels, sums = gather_with_grad(
            (own, torch.full((len(own),), rank), own.sum()), ragged=ragged
        )  # the last without a dimension
        assert not labels.requires_grad
        assert labels.tolist() == [r for r in range(world) for _ in range(rows_of(r, ragged))]
        first = sum(rows_of(r, ragged) for r in range(rank))
        temperatures = sums.sum().reshape(1)
        # What ranks average: the loss of all rows on each of them, or each one's share of it.
        if form == "all":
            loss = contrast(rows, rows, 0, temperatures) / len(rows)
        else:
            loss = world * contrast(own, rows, first, temperatures) / len(rows)
        loss.backward()
        return weight.grad

    found = worlds.run(body, world)
    average = sum(found) / world
    torch.testing.assert_close(average, big_batch(world, ragged), rtol=1e-12, atol=1e-14)


def test_results_are_those_of_gather_without_gradients():
    def body():
        rank = PartialState().process_index
        with torch.no_grad():
            first = gather_with_grad(torch.full((2,), float(rank), requires_grad=True))
        second = gather_with_grad(torch.full((2,), float(rank)))
        return first.tolist(), second.tolist(), first.requires_grad, second.requires_grad

    assert worlds.run(body, 2) == [([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], False, False)] * 2


def test_ranks_that_differ_in_what_requires_a_gradient_are_told():
    def body():
        rank = PartialState().process_index
        with pytest.raises(CollectiveMismatchError) as caught:
            gather_with_grad(torch.ones(2, requires_grad=rank == 0))
        return str(caught.value)

    for text in worlds.run(body, 2):
        assert "requires_grad=[True]" in text
        assert "requires_grad=[False]" in text
