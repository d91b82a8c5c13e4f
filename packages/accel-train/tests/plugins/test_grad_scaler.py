"""Options of the gradient scaler."""

import dataclasses
import inspect

import torch

from accel_train import GradScalerKwargs


def test_names_and_defaults_are_those_of_torch():
    parameters = inspect.signature(torch.amp.GradScaler).parameters
    for field in dataclasses.fields(GradScalerKwargs):
        assert parameters[field.name].default == field.default
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=1.0).to_kwargs() == {"init_scale": 1.0}
