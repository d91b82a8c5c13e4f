"""Taking the wrappers off a prepared model."""

import torch
from torch import nn

from accel_train import Accelerator, TorchDynamoPlugin


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def test_t33_names_are_the_same_eager_and_compiled():
    names = list(make().state_dict())
    for compiled_first in (True, False):
        plugin = None if compiled_first else TorchDynamoPlugin(backend="eager")
        accelerator = Accelerator(dynamo_plugin=plugin)
        model = torch.compile(make(), backend="eager") if compiled_first else make()
        model = accelerator.prepare(model)
        model(torch.randn(2, 4))
        assert list(accelerator.get_state_dict(model)) == names
        assert list(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()) == names
    accelerator = Accelerator()
    model = make()
    model[2] = torch.compile(model[2], backend="eager")
    assert list(accelerator.get_state_dict(accelerator.prepare(model))) == names
