"""What autograd saves in place of views of slots."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel_bigmodel import OffloadError
from accel_bigmodel.streaming.autograd import Saving
from accel_bigmodel.streaming.groups import Group
from accel_bigmodel.streaming.streamed_groups import Load, StreamedGroup, TiedUses
from accel_bigmodel.streaming.transfer import HostTransfer
from accel_bigmodel.streaming.types import Slot


@pytest.fixture
def streamed():
    """A frozen layer whose weights are in a slot for the forward and overwritten there afterwards."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).requires_grad_(False)
    group = StreamedGroup(layer, 0, Group("", layer, dict(layer.named_parameters())))
    group.check()
    tied, transfer, saving = TiedUses([group]), HostTransfer(), Saving(torch.device("cpu"))
    slot = Slot(transfer.allocate(group.layout.nbytes), None)
    sources = tied.sources_now(group)
    slot.last_copy = transfer.copy("", sources, group.layout, slot)
    slot.last_copy.wait()
    load = Load(group, slot, sources)

    def forward(x):
        saving.slots[slot.address] = group
        group.point(load, tied)
        with saving.around():
            result = layer(x)
        group.restore(load, tied)
        del saving.slots[slot.address]
        slot.buffer.fill_(255)
        return result

    return layer, group, saving, forward


def test_the_backward_pass_copies_the_weight_again(streamed):
    layer, _, _, forward = streamed
    x = torch.randn(2, 3, requires_grad=True)
    forward(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, 3))


def test_a_weight_that_was_changed_meanwhile_is_refused(streamed):
    layer, _, _, forward = streamed
    result = forward(torch.randn(2, 3, requires_grad=True))
    layer.weight.zero_()
    with pytest.raises(
        OffloadError, match="'weight' was changed after the forward whose backward pass needs it"
    ):
        result.sum().backward()


def test_hooks_around_see_what_is_not_a_weight(streamed):
    _, _, saving, _ = streamed
    seen = []
    x = torch.randn(2, requires_grad=True)
    with (
        saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda tensor: tensor),
        saving.around(),
    ):
        result = (x * x).sum()
    result.backward()
    assert seen == [x.shape, x.shape]
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_tensor_that_is_changed_after_it_was_saved_is_an_error(streamed):
    _, _, saving, _ = streamed
    x = torch.randn(2, requires_grad=True)
    with saving.around():
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match=r"shape \(2,\) and torch.float32.*was changed in place"):
        y.sum().backward()


def test_gradients_of_the_weights_are_refused_until_forgotten(streamed):
    layer, group, saving, _ = streamed
    layer.weight.requires_grad_(True)
    saving.refuse_gradients(group)
    with pytest.raises(OffloadError, match=r"'weight' is trainable.*requires_grad_"):
        layer(torch.ones(1, 3)).sum().backward()
    saving.forget()
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None
