"""The null object of the precision axis: nothing is cast, nothing is scaled."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, ArgumentTypeError, OptionError


def test_switching_off_what_is_not_on_changes_nothing():
    accelerator = Accelerator(mixed_precision="no")
    accelerator.native_amp = False
    assert not accelerator.native_amp


def test_a_precision_without_autocast_cannot_switch_it_on():
    accelerator = Accelerator(mixed_precision="no")
    with pytest.raises(OptionError, match=r"native_amp=True needs autocast.*mixed_precision='no'"):
        accelerator.native_amp = True
    with pytest.raises(ArgumentTypeError, match="native_amp takes True or False, got str: 'no'"):
        accelerator.native_amp = "no"


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_precision_no_leaves_the_forward_alone():
    model = make()
    forward = model.forward
    prepared = Accelerator().prepare(model)
    assert prepared is model
    assert prepared.forward == forward
    assert "forward" not in vars(prepared)
