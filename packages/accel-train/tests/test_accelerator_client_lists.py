"""Lists of an accelerator as clients of Accelerate write them."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import Accelerator, OptionError
from accel_train.list_view import ListView


class Counter:
    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        pass


def prepared():
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, scheduler, DataLoader(range(8), batch_size=2))
    accelerator.register_for_checkpointing(Counter())
    return accelerator


LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("how", ["assign", "clear", "pop", "del"])
def test_a_list_can_be_emptied_in_every_way(name, how, tmp_path):
    accelerator = prepared()
    items = getattr(accelerator, name)
    assert len(items) == 1
    if how == "assign":
        setattr(accelerator, name, [])
    elif how == "del":
        del items[:]
    else:
        getattr(items, how)()
    assert len(getattr(accelerator, name)) == 0
    folder = accelerator.save_state(tmp_path / "state")
    assert ("model.safetensors" in os.listdir(folder)) == (name != "_models")
    accelerator.load_state(folder)


@pytest.mark.parametrize("name", LISTS)
def test_what_was_in_a_list_can_be_put_back(name):
    accelerator = prepared()
    item = getattr(accelerator, name)[0]
    setattr(accelerator, name, [])
    setattr(accelerator, name, [item])
    assert list(getattr(accelerator, name)) == [item]


def test_a_model_that_was_taken_out_is_prepared_again():
    accelerator = prepared()
    model = accelerator._models.pop()
    assert accelerator.prepare(model) is model
    assert accelerator._models == [model]
    assert accelerator._prepared.prepared_models == [model]


def test_lists_change_together():
    first, second = [1, 2, 3], ["1", "2", "3"]
    view = ListView(first, second, read=lambda value: value, write=lambda value: (value, str(value)))
    view.append(4)
    view[0] = 9
    del view[1]
    assert (first, second) == ([9, 3, 4], ["9", "3", "4"])
    view[1:] = [5]
    assert (first, second, view) == ([9, 5], ["9", "5"], [9, 5])
    assert repr(view) == "[9, 5]"
    assert view[:1] == [9]


def test_a_scaler_can_be_written_where_it_has_a_meaning():
    plain = prepared()
    plain.scaler = plain._optimizers[0].scaler = None
    with pytest.raises(OptionError, match="scales no losses"):
        plain.scaler = torch.amp.GradScaler("cpu")
    scaled = Accelerator(mixed_precision="fp16", cpu=True)
    scaled.scaler = mine = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(1, 1)
    _, optimizer = scaled.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.scaler is mine
    with pytest.raises(OptionError, match="so it needs a scaler"):
        optimizer.scaler = None


def test_trackers_can_be_replaced():
    accelerator = prepared()
    accelerator.trackers = []
    assert accelerator.trackers == []
