"""Losses of calls that have computed their gradients."""

import pytest
import torch

from accel_train.errors import AccumulationError
from accel_train.strategies.computed_loss import ComputedLosses


def made(losses, value=2.0, factor=1.0, rescaled=None):
    return losses.of_call(torch.tensor(value), factor, (rescaled if rescaled is not None else []).append)


def test_a_loss_that_went_through_backward_is_done():
    losses = ComputedLosses()
    first, second = made(losses), made(losses, 3.0)
    (first + second).backward()
    losses.account()
    losses.check("stop")


def test_two_losses_may_go_one_after_the_other():
    losses = ComputedLosses()
    pair = [made(losses), made(losses)]
    for loss in pair:
        loss.backward()
        losses.account()
    losses.check("stop")


@pytest.mark.parametrize(("count", "begins"), [(1, "The loss of a call"), (2, "The losses of 2 calls")])
def test_a_loss_that_is_left_out_is_named(count, begins):
    losses = ComputedLosses()
    left = [made(losses) for _ in range(count)]
    made(losses).backward()
    losses.account()
    with pytest.raises(AccumulationError, match=rf"{begins} of the model .* or stop\."):
        losses.check("stop")
    del left
    losses.drop()
    losses.check("stop")


def test_a_raw_backward_is_named():
    losses = ComputedLosses()
    made(losses).backward()
    with pytest.raises(AccumulationError, match=r"went to loss\.backward\(\)"):
        losses.check("stop")


def test_a_loss_whose_gradients_were_dropped_cannot_go_through_backward():
    losses = ComputedLosses()
    loss = made(losses)
    losses.drop()
    with pytest.raises(AccumulationError, match=r"zero_grad\(\) was called between"):
        loss.backward()


@pytest.mark.parametrize(("times", "seen"), [(1.0, []), (3.0, [3.0])])
def test_a_factor_is_told(times, seen):
    losses, rescaled = ComputedLosses(), []
    (made(losses, factor=1.0, rescaled=rescaled) * times).backward()
    assert rescaled == seen
