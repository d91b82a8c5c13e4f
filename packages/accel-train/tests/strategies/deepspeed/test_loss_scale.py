"""The loss scale of an engine in the form of torch's gradient scaler. Needs no DeepSpeed."""

from types import SimpleNamespace

import pytest
import torch

from accel_train.strategies.deepspeed.loss_scale import LossScale


def with_zero(dynamic=True):
    scaler = SimpleNamespace(
        dynamic=dynamic, cur_scale=64.0, cur_iter=13, last_overflow_iter=4, cur_hysteresis=1, scale_window=5
    )
    return SimpleNamespace(loss_scaler=scaler, loss_scale=scaler.cur_scale)


def without_zero():
    fields = SimpleNamespace(
        dynamic_loss_scale=True, cur_scale=64.0, cur_iter=13, last_overflow_iter=4, scale_window=5
    )
    return SimpleNamespace(loss_scale_config=fields, loss_scale=fields.cur_scale)


@pytest.mark.parametrize("optimizer", [with_zero(), without_zero()], ids=["zero", "no zero"])
def test_torchs_scaler_takes_it(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(LossScale(optimizer).as_gradient_scaler())
    assert scaler.get_scale() == 64
    assert scaler.get_growth_interval() == 5
    assert scaler.state_dict()["_growth_tracker"] == 3  # 8 steps since an overflow, of which 5 let it grow


@pytest.mark.parametrize("make", [with_zero, without_zero])
def test_its_own_state_comes_back(make):
    saved = LossScale(make()).state()
    other = make()
    scaler = getattr(other, "loss_scaler", None) or other.loss_scale_config
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 1.0, 0, -1
    LossScale(other).load(saved)
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (64.0, 13, 4)


def test_a_configured_scale_stays():
    optimizer = with_zero(dynamic=False)
    LossScale(optimizer).load_steps(2.0, 1)
    assert optimizer.loss_scaler.cur_scale == 64
