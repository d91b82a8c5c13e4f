"""What one accelerator has prepared and registered."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator
from accel_train.setup.prepared import Hooks, Registered, mark_prepared
from accel_train.strategies.base import Strategy


@pytest.mark.parametrize("kind", ["save", "load"])
def test_hooks_run_in_their_order_and_are_removed_by_their_handles(kind):
    hooks = Hooks()
    added, other = (hooks.add_save, hooks.load) if kind == "save" else (hooks.add_load, hooks.save)
    handles = [added(name) for name in ("first", "second", "third")]
    assert list(getattr(hooks, kind).values()) == ["first", "second", "third"]
    handles[1].remove()
    handles[1].remove()
    assert list(getattr(hooks, kind).values()) == ["first", "third"]
    assert not other
    with added("for a while"):
        assert len(getattr(hooks, kind)) == 3
    assert list(getattr(hooks, kind).values()) == ["first", "third"]


def test_a_mark_is_an_attribute():
    item = nn.Linear(1, 1)
    mark_prepared(item)
    assert item._is_accelerate_prepared is True


def test_what_is_registered_is_not_trusted_unless_it_is_said():
    assert not Registered(1).trusted


class Releasing(Strategy):
    """Notes that everything was forgotten."""

    name = "releasing"
    released = 0

    def release(self):
        self.released += 1


def test_clearing_forgets_what_was_prepared_and_keeps_what_was_registered(register):
    register(Releasing)
    accelerator = Accelerator(strategy="releasing", gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)))
    model, *_ = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.step = 5
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    here = accelerator._prepared
    lists = [here.models, here.prepared_models, here.optimizers, here.schedulers, here.loaders]
    assert [len(items) for items in lists] == [1] * 5
    here.clear()
    assert [len(items) for items in lists] == [0] * 5, "the same lists, which the accumulator also has"
    assert here.step == 0
    assert here.accumulator.unfinished() == []
    assert here.accumulator.sync_gradients
    assert accelerator.strategy.released == 1
    assert (len(here.registered), len(here.hooks.save)) == (1, 1)


class Equal(nn.Linear):
    """Equal to every other of its kind."""

    def __init__(self):
        super().__init__(2, 1)

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = nn.Module.__hash__


def test_a_model_that_is_prepared_again_keeps_its_place_and_loses_its_windows():
    """By identity: models may be equal."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second, third = accelerator.prepare(Equal(), Equal(), Equal())
    for model in (first, second, third):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    here = accelerator._prepared
    again = Equal()
    here.add_model(again, again, before=second)
    expected = [id(model) for model in (first, again, third)]
    assert [id(model) for model in here.models] == [id(model) for model in here.prepared_models] == expected
    assert [id(window.models[0]) for window in here.accumulator.unfinished()] == [id(first), id(third)]
