"""Collectives under the names of `Accelerator`, against values that are written down."""

import pytest
import torch

from accel_train import Accelerator, NoGradientError
from testkit import worlds


def exchanged():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    values = torch.tensor([rank + 1.0])
    longer = torch.full((rank + 1,), rank + 1.0)
    return {
        "gather": accelerator.gather({"a": values})["a"].tolist(),
        "sum": accelerator.reduce(values).item(),
        "scaled": accelerator.reduce(values, "mean", 2.0).item(),
        "max": accelerator.reduce((values,), reduction="max")[0].item(),
        "padded": accelerator.pad_across_processes(longer, pad_index=-1).tolist(),
        "padded first": accelerator.pad_across_processes(longer, 0, 0, pad_first=True).tolist(),
    }


def test_what_two_ranks_get():
    common = {"gather": [1.0, 2.0], "sum": 3.0, "scaled": 3.0, "max": 2.0}
    assert worlds.run(exchanged, 2) == [
        common | {"padded": [1.0, -1.0], "padded first": [0.0, 1.0]},
        common | {"padded": [2.0, 2.0], "padded first": [2.0, 2.0]},
    ]


def test_a_process_by_itself_gets_its_own_values():
    assert worlds.run(exchanged, 1) == [
        {"gather": [1.0], "sum": 1.0, "scaled": 2.0, "max": 1.0, "padded": [1.0], "padded first": [1.0]}
    ]


def contrastive(ranks: int):
    """The gradient of a contrastive loss over four samples, shared out among ranks."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    samples = torch.randn(4, 5, dtype=torch.float64)
    model = accelerator.prepare(model)
    own = samples.chunk(ranks)[accelerator.process_index]
    rows = accelerator.gather_with_grad(model(own))
    similarity = rows @ torch.tanh(rows).t()
    accelerator.backward(torch.nn.functional.cross_entropy(similarity, torch.arange(4)))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loss_over_the_samples_of_all_ranks_has_the_gradient_of_one_batch(ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    rows = model(torch.randn(4, 5, dtype=torch.float64))
    torch.nn.functional.cross_entropy(rows @ torch.tanh(rows).t(), torch.arange(4)).backward()
    for found in worlds.run(contrastive, ranks, ranks):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


def plain_gather():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(5, 3))
    with pytest.raises(NoGradientError, match="gather_with_grad"):
        accelerator.backward(accelerator.gather(model(torch.ones(2, 5))).sum())
    return "refused"


def test_a_loss_of_gathered_values_names_the_gather_that_has_a_gradient():
    assert worlds.run(plain_gather, 2) == ["refused"] * 2
