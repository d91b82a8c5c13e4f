"""Noise that ranks draw as one process draws it for the whole batch."""

import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_train.proof.noise import RowNoise

ROWS = 4
SEEDS = [11, 5, 2**63 + 1, 8, 1, 90, 6, 7]

DRAWS = {
    "randn": lambda x: torch.randn(x.shape[0], 3),
    "randn of a tuple": lambda x: torch.randn((x.shape[0], 3), dtype=torch.float64),
    "rand by name": lambda x: torch.rand(size=(x.shape[0], 2, 2)),
    "randint": lambda x: torch.randint(0, 1000, (x.shape[0],)),
    "randint from 0": lambda x: torch.randint(1000, (x.shape[0],)),
    "normal": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 3)),
    "normal of tensors": lambda x: torch.normal(x, 2.0),
    "randint by name": lambda x: torch.randint(low=3, high=999, size=(x.shape[0], 2)),
    "randint_like by name": lambda x: torch.randint_like(x, low=2, high=900),
    "randint_like from 0": lambda x: torch.randint_like(x, high=900),
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli of a method": lambda x: torch.full_like(x, 0.3).bernoulli(),
    "bernoulli_ of tensors": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "multinomial": lambda x: torch.multinomial(x, 9),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True),
    "a generator": lambda x: torch.randn(x.shape[0], 3, generator=torch.Generator().manual_seed(x.shape[0])),
    "a choice": lambda x: Categorical(logits=x).sample((1,)),
    "a distribution": lambda x: Normal(x, 1.0).rsample(),
}


def draw(name, seeds):
    x = torch.ones(len(seeds), 16)
    with RowNoise({len(seeds): seeds}):
        torch.manual_seed(1)
        return [DRAWS[name](x).flatten() for _ in range(2)]


@pytest.mark.parametrize("name", DRAWS)
def test_ranks_draw_the_rows_that_one_process_draws_for_their_samples(name):
    whole = draw(name, SEEDS)
    parts = [draw(name, SEEDS[:3]), draw(name, SEEDS[3:])]  # ranks may have different numbers of samples
    for one, two, both in zip(*parts, whole, strict=True):
        assert torch.equal(torch.cat([one, two]), both)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0].chunk(2)[0], whole[0].chunk(2)[1])


def test_what_has_no_rows_is_the_same_on_ranks_of_any_size_and_leaves_their_generators_alike():
    found = []
    for size in (3, 30):
        torch.manual_seed(3)
        with RowNoise({8: SEEDS}) as noise:
            torch.randn(size, 2)
            found.append(
                [torch.rand(5), torch.randperm(9), torch.randn(()), torch.multinomial(torch.ones(8), 4)]
            )
        assert noise.drawn == 0
        found[-1].append(torch.rand(2))
    assert all(map(torch.equal, *found))


def test_generators_of_the_script_draw_what_has_no_rows():
    own = torch.randn(5, generator=torch.Generator().manual_seed(5))
    with RowNoise({8: SEEDS}):
        assert torch.equal(torch.randn(5, generator=torch.Generator().manual_seed(5)), own)


def test_bounds_leaves_and_sizes_are_those_of_the_call():
    x = torch.ones(ROWS, 200)
    with RowNoise({ROWS: SEEDS[:ROWS]}):
        assert set(torch.randint_like(x, high=3).unique().tolist()) == {0, 1, 2}
        assert set(torch.randint_like(x, 2, 4).unique().tolist()) == {2, 3}
        leaf = torch.randn(ROWS, 2, requires_grad=True)
        leaf.sum().backward()
        assert leaf.grad is not None
        assert torch.rand_like(x, requires_grad=True).requires_grad
        assert torch.rand(()).shape == torch.randn(size=()).shape == torch.randint(0, 5, ()).shape == ()
        assert torch.randint(low=0, high=5, size=(3,)).shape == (3,)
        assert torch.empty(ROWS).bernoulli_(torch.ones(ROWS)).tolist() == [1.0] * ROWS


def test_what_has_no_samples_takes_one_number_before_the_first_batch_and_after_it():
    drawn = []
    for seeds in ({}, {ROWS: range(ROWS)}):  # a resumed run has read none, where another has
        torch.manual_seed(3)
        with RowNoise(seeds):
            drawn.append([torch.randn(ROWS + 1, 2), torch.empty(()).random_(), torch.randint(99, ())])
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same(reentrant):
    def layer(x):
        return x * torch.randn_like(x) * torch.rand(()) + torch.randn(3).sum()

    def slopes(call):
        torch.manual_seed(1)
        x = torch.ones(len(SEEDS), 2, requires_grad=True)
        with RowNoise({8: SEEDS}):
            found = call(call(x))
            torch.randn_like(x)
            found.sum().backward()
        return x.grad

    assert torch.equal(slopes(lambda x: checkpoint(layer, x, use_reentrant=reentrant)), slopes(layer))


@pytest.mark.parametrize(
    "call",
    [
        functional.dropout,
        lambda x: functional.dropout(x, p=0.5),
        lambda x: functional.dropout2d(x, 0.5, training=True),
        torch.nn.Dropout(0.5),
        torch.nn.AlphaDropout(0.5),
        lambda x: torch.dropout(x, 0.5, True),
    ],
)
def test_dropout_is_left_out_and_counted(call):
    x = torch.ones(9, 3, 8, 8)
    with RowNoise({}) as noise:
        assert torch.equal(call(x), x)
    assert noise.dropout == 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda p: torch.nn.LSTM(8, 8, num_layers=2, dropout=p),
        lambda p: torch.nn.GRU(8, 8, num_layers=2, dropout=p),
        lambda p: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=p),
    ],
)
def test_layers_leave_their_dropout_out(layer):
    torch.manual_seed(0)
    model, same = layer(0.5), layer(0.0)
    same.load_state_dict(model.state_dict())
    x = torch.randn(5, 4, 8)
    first = lambda found: found[0] if isinstance(found, tuple) else found  # noqa: E731
    with RowNoise({}) as noise:
        assert torch.equal(first(model(x)), first(same(x)))
    assert noise.dropout > 0


def test_attention_leaves_its_dropout_out_and_keeps_its_scale():
    q = torch.randn(ROWS, 2, 5, 8)
    with RowNoise({}) as noise:
        found = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5, scale=0.3)
        functional.scaled_dot_product_attention(q, q, q, scale=0.3)
    assert torch.equal(found, functional.scaled_dot_product_attention(q, q, q, scale=0.3))
    assert noise.dropout == 1


def test_float64_stays_as_it_is_in_a_proof_in_float64():
    x = torch.ones(3, dtype=torch.float64)
    calls = {
        "float": x.float,
        "to": lambda: x.to(torch.float32),
        "to by name": lambda: x.to("cpu", dtype=torch.float32),
        "softmax": lambda: functional.softmax(x, dim=0, dtype=torch.float32),
        "sum": lambda: x.sum(dtype=torch.float32),
    }
    with RowNoise({}, double=True):
        assert {name: call().dtype for name, call in calls.items()} == dict.fromkeys(calls, torch.float64)
        assert torch.ones(3, dtype=torch.float16).float().dtype == torch.float32
        assert x.to(torch.float16).dtype == torch.float16
    with RowNoise({}):
        assert {call().dtype for call in calls.values()} == {torch.float32}


def test_the_newest_alone_draws():
    torch.manual_seed(1)
    with RowNoise({}):
        plain = torch.randn(8, 2)
    torch.manual_seed(1)
    with RowNoise({8: SEEDS}), RowNoise({}):
        assert torch.equal(torch.randn(8, 2), plain)
