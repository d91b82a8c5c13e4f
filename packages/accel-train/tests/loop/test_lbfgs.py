"""torch.optim.LBFGS: it moves as with the whole batch on one process, or is refused."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from accel_train import Accelerator, ParallelismConfig
from accel_train.errors import IncompatibleOptionsError
from testkit import worlds


def lbfgs(search=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.LBFGS(model.parameters(), lr=0.7, max_iter=6, line_search_fn=search)


def train(model, optimizer, window, backward, accumulate, rank=0, ranks=1, number=False):
    """Three steps on data whose losses differ among ranks; the values that come out."""
    growing = torch.linspace(0.2, 3.0, 16, dtype=torch.float64)[:, None]
    for data in torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64):

        def closure(data=data):
            optimizer.zero_grad()
            total = 0.0
            for some in (data * growing).chunk(ranks)[rank].chunk(window):
                with accumulate(model):
                    loss = nn.functional.mse_loss(model(some[:, :4]), some[:, 4:])
                    backward(loss)
                    total = total + loss.detach() / window
            return total.item() if number else total

        optimizer.step(closure)
    return [p.detach() for p in model.parameters()]


def prepared(search, window, number):
    own = Accelerator(cpu=True, gradient_accumulation_steps=window)
    place = own.process_index, own.num_processes
    return train(*own.prepare(*lbfgs(search)), window, own.backward, own.accumulate, *place, number)


@pytest.mark.parametrize(
    ("ranks", "search", "window", "number"),
    [
        (2, "strong_wolfe", 2, False),
        pytest.param(2, "strong_wolfe", 1, True, marks=pytest.mark.full),
        pytest.param(1, "strong_wolfe", 2, False, marks=pytest.mark.full),
        pytest.param(2, None, 2, False, marks=pytest.mark.full),
    ],
)
def test_ranks_move_as_one_process_with_the_whole_batch(ranks, search, window, number):
    expected = train(*lbfgs(search), 1, torch.Tensor.backward, nullcontext)
    for values in worlds.run(prepared, ranks, search, window, number):
        torch.testing.assert_close(values, expected, rtol=1e-7, atol=1e-7)


def refused(degree):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{degree: 2}))
    with pytest.raises(IncompatibleOptionsError, match="LBFGS computes with all parameters as one vector"):
        accelerator.prepare(*lbfgs())


@pytest.mark.parametrize(
    "degree", ["dp_shard_size", *(pytest.param(f"{d}_size", marks=pytest.mark.full) for d in ("tp", "pp"))]
)
def test_a_strategy_that_divides_parameters_refuses_it_on_all_ranks(degree):
    worlds.run(refused, 2, degree)
