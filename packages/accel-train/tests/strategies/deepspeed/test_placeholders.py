"""Placeholders for what a DeepSpeed configuration describes. Needs no DeepSpeed."""

import pytest
import torch
from torch import nn

from accel_train import DummyOptim, DummyScheduler
from accel_train.errors import PrepareError


def test_a_placeholder_keeps_groups_and_options_and_cannot_step():
    model = nn.Linear(2, 2)
    optimizer = DummyOptim(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1, eps=1e-6
    )
    assert [group["lr"] for group in optimizer.params] == [0.1, 0.5]
    assert optimizer.kwargs == {"eps": 1e-6}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.5})
    # The configuration has what a group does not say itself.
    assert [{**group, "params": len(group["params"])} for group in optimizer.groups_for_engine()] == [
        {"params": 1},
        {"params": 1, "lr": 0.5},
        {"params": 1, "weight_decay": 0.5},
    ]
    with pytest.raises(PrepareError, match="the optimizer that prepare\\(\\) returned"):
        optimizer.step()


def test_a_scheduler_placeholder_changes_no_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2, name="x")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps, scheduler.kwargs) == (10, 2, {"name": "x"})
    with pytest.raises(PrepareError, match="the scheduler that prepare\\(\\) returned"):
        scheduler.step()
