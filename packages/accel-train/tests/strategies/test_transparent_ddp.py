"""DDP's wrapper: attributes of the model are those of the model, and it knows whether a forward came."""

import copy

import torch
from torch import nn

from testkit import worlds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)
        self.temperature = 1.0

    def forward(self, x):
        return self.head(x) * self.temperature


def prepared():
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = Net()
    return accelerator, model, accelerator.prepare(model)


def written():
    _, plain, wrapped = prepared()
    x = torch.ones(1, 4)
    full = wrapped(x)
    wrapped.temperature *= 0.5
    halved = torch.equal(wrapped(x), full * 0.5)
    wrapped.head = nn.Linear(4, 3)
    wrapped.mine = 1  # what the model does not have stays here, as under DDP
    wrapped.forward = wrapped.forward  # and so does what the wrapper has itself
    wrapped.device_ids = None
    return halved, plain.temperature, wrapped(x).shape[1], hasattr(plain, "mine"), "forward" in vars(plain)


def test_attributes_of_the_model_are_written_through_the_wrapper():
    assert worlds.run(written, 2) == [(True, 0.5, 3, False, False)] * 2


def armed():
    _, _, wrapped = prepared()
    x = torch.ones(1, 4)
    found = [wrapped.armed]
    with wrapped.no_sync():
        wrapped(x)
    found.append(wrapped.armed)
    wrapped(x)
    found.append(wrapped.armed)
    with torch.no_grad():
        wrapped(x)
    found.append(wrapped.armed)
    found.append(copy.deepcopy(wrapped).require_forward_param_sync)
    return found


def test_only_a_forward_that_is_to_be_reduced_arms_it():
    assert worlds.run(armed, 2) == [[False, False, True, True, False]] * 2
