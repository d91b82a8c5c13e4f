"""The null object of the precision axis: nothing is cast, nothing is scaled."""

import copy

import pytest
import torch
from torch import nn

from accel_train import Accelerator, ArgumentTypeError, OptionError
from accel_train.precision.base import DTypePolicy, Precision, PrecisionOptions


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


def test_a_precision_with_a_state_dict_has_a_state():
    class Counting(Precision):
        def state_dict(self, optimizers):
            return {"steps": 1}

    assert Counting(PrecisionOptions()).has_state
    assert not Precision(PrecisionOptions()).has_state


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


def null():
    return Precision(PrecisionOptions())


def test_the_null_object_decides_no_dtype_and_scales_nothing():
    precision = null()
    assert precision.dtypes == DTypePolicy(None, None, None, None)
    assert (precision.name, precision.dtype, precision.scaler, precision.loss_scale) == (
        "no",
        None,
        None,
        1.0,
    )
    assert precision.state_dict([]) is None
    precision.load_state_dict({}, [])
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_backward_passes_its_arguments_on():
    precision, weight = null(), torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    loss = (weight * other).sum()
    precision.backward(loss, False, {"inputs": [weight], "retain_graph": True})
    assert weight.grad.tolist() == [1.0, 1.0]
    assert other.grad is None
    precision.backward(loss, True, {})
    assert other.grad.tolist() == [1.0, 1.0]


def test_a_step_is_the_optimizers_own():
    precision = null()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.full((2,), float("inf"))
    precision.unscale_(optimizer)
    assert precision.step(optimizer) == (True, None)
    assert weight.tolist() == [-float("inf")] * 2
    assert precision.step(optimizer, lambda: 3.0) == (True, 3.0)


def test_a_copied_optimizer_shares_the_precision():
    precision = null()
    assert copy.deepcopy({"a": precision})["a"] is precision
