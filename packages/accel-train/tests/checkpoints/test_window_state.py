"""Accumulation windows that are not finished when a state is saved."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator


def build(accelerator, seed=0, width=4):
    torch.manual_seed(seed)
    model = nn.Linear(width, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(8, width)), batch_size=2, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def open_window(steps=4, taken=2, seed=0, precision="no"):
    """A training in the middle of a window."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, mixed_precision=precision)
    parts = build(accelerator, seed=seed)
    model = parts[0]
    for number in range(taken):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), number + 1.0)).sum(), num_items=3 + number)
    return accelerator, parts


def test_gradients_and_counts_of_an_unfinished_window_come_back(tmp_path):
    accelerator, (model, *_) = open_window()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(taken=0, seed=9)
    other.load_state(folder)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )
    assert other.sync_gradients is accelerator.sync_gradients is False
    [window] = other._accumulator.unfinished()
    assert (window.micro_batches, window.items, window.planned, window.weighted) == (2, 7, 4, True)
    for each, net in ((accelerator, model), (other, restored)):
        for _ in range(2):
            with each.accumulate(net):
                each.backward(net(torch.ones(2, 4)).sum(), num_items=2)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), restored.parameters(), strict=True)
    )


def test_gradients_that_were_stepped_with_are_not_saved(tmp_path):
    accelerator, (model, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert model.weight.grad is not None
    assert restored.weight.grad is None


def test_gradients_of_zeros_come_back_as_zeros(tmp_path):
    accelerator, (_, optimizer, *_) = open_window(steps=1, taken=1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    folder = accelerator.save_state(tmp_path / "state")
    other, (restored, *_) = open_window(steps=1, taken=0)
    other.load_state(folder)
    assert torch.equal(restored.weight.grad, torch.zeros(1, 4))


def test_a_window_of_a_model_that_was_not_prepared_cannot_be_saved(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    build(accelerator)
    stranger = nn.Linear(4, 1)
    with accelerator.accumulate(stranger):
        accelerator.backward(stranger(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError, match="no part of a prepared model"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()
