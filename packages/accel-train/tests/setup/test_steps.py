"""The steps that a strategy calls while it prepares a model."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def test_meta_parameters_are_refused_before_anything_moves():
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match=r"'0\.weight'.*meta device"):
        Accelerator().prepare(model)
