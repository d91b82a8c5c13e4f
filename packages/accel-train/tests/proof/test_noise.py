"""Noise that ranks draw as one process draws it for the whole batch."""

import pytest
import torch
from torch.nn import functional

from accel_train.proof.noise import RowNoise

ROWS = 4

DRAWS = {
    "randn": lambda x: torch.randn(x.shape[0], 3),
    "randn of a tuple": lambda x: torch.randn((x.shape[0], 3), dtype=torch.float64),
    "rand by name": lambda x: torch.rand(size=(x.shape[0], 2, 2)),
    "randint": lambda x: torch.randint(0, 1000, (x.shape[0],)),
    "randint from 0": lambda x: torch.randint(1000, (x.shape[0],)),
    "normal": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 3)),
    "randint by name": lambda x: torch.randint(low=3, high=9, size=(x.shape[0], 2)),
    "randint_like by name": lambda x: torch.randint_like(x, low=2, high=5),
    "randint_like from 0": lambda x: torch.randint_like(x, high=5),
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 5, 900),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "a layer": lambda x: torch.nn.Dropout(0.5)(x),
}


def draw(name, rows, index, size):
    x = torch.ones(rows, 16)
    with RowNoise(lambda: (rows, index, size)):
        return [DRAWS[name](x) for _ in range(2)]


@pytest.mark.parametrize("name", DRAWS)
def test_ranks_draw_their_rows_of_what_one_process_draws(name):
    torch.manual_seed(1)
    whole = draw(name, 2 * ROWS, 0, 1)
    for index in range(2):
        torch.manual_seed(index)  # whatever their seeds are
        for mine, all_rows in zip(draw(name, ROWS, index, 2), whole, strict=True):
            assert torch.equal(mine, all_rows[index * ROWS : (index + 1) * ROWS])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0][:ROWS], whole[0][ROWS:])


def test_other_tensors_and_generators_are_as_without():
    torch.manual_seed(3)
    plain = [torch.randn(7, 2), torch.rand(3), functional.dropout(torch.ones(7), 0.5)]
    own = torch.randn(ROWS, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(3)
    with RowNoise(lambda: (ROWS, 1, 2)) as noise:
        again = [torch.randn(7, 2), torch.rand(3), functional.dropout(torch.ones(7), 0.5)]
        assert torch.equal(torch.randn(ROWS, generator=torch.Generator().manual_seed(5)), own)
    assert all(map(torch.equal, plain, again))
    assert noise.drawn == 0


def test_bounds_leaves_and_sizes_are_those_of_the_call():
    x = torch.ones(ROWS, 200)
    with RowNoise(lambda: (ROWS, 1, 2)):
        assert set(torch.randint_like(x, high=3).unique().tolist()) == {0, 1, 2}
        assert set(torch.randint_like(x, 2, 4).unique().tolist()) == {2, 3}
        leaf = torch.randn(ROWS, 2, requires_grad=True)
        leaf.sum().backward()
        assert leaf.grad is not None
        assert torch.rand_like(x, requires_grad=True).requires_grad
        assert torch.rand(()).shape == torch.randn(size=()).shape == torch.randint(0, 5, ()).shape == ()
        assert torch.randint(low=0, high=5, size=(3,)).shape == (3,)
        assert torch.empty(ROWS).bernoulli_(torch.ones(ROWS)).tolist() == [1.0] * ROWS
        assert functional.dropout(x, 1.0).sum() == 0


def test_nothing_is_replaced_before_the_first_batch():
    torch.manual_seed(3)
    plain = torch.randn(ROWS, 2)
    torch.manual_seed(3)
    with RowNoise(lambda: (0, 0, 1)):
        assert torch.equal(torch.randn(ROWS, 2), plain)


def test_dropout_of_attention_is_left_out_and_counted():
    q = torch.randn(ROWS, 2, 5, 8)
    with RowNoise(lambda: (ROWS, 0, 2)) as noise:
        found = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.equal(found, functional.scaled_dot_product_attention(q, q, q))
    assert noise.attention == 1


def test_evaluation_keeps_everything():
    with RowNoise(lambda: (ROWS, 0, 2)):
        x = torch.randn(9)[:ROWS].expand(ROWS, ROWS)
        assert torch.equal(functional.dropout(x, 0.5, training=False), x)
