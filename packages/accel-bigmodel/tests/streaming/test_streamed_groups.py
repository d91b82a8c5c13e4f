"""Run-time state of groups: versions, tied tensors, and where values are."""

import pytest
import torch
from torch import nn

from accel_bigmodel import OffloadError
from accel_bigmodel.streaming.groups import Group
from accel_bigmodel.streaming.streamed_groups import Load, StreamedGroup, TiedUses
from accel_bigmodel.streaming.transfer import HostTransfer
from accel_bigmodel.streaming.types import Slot


def group_of(model, name="", index=0):
    module = model.get_submodule(name)
    tensors = {f"{name}.{leaf}" if name else leaf: tensor for leaf, tensor in module.named_parameters()}
    made = StreamedGroup(model, index, Group(name, module, tensors))
    made.check()
    return made


def loaded(group, tied):
    transfer = HostTransfer()
    slot = Slot(transfer.allocate(group.layout.nbytes), None)
    sources = tied.sources_now(group)
    slot.last_copy = transfer.copy(group.name, sources, group.layout, slot)
    slot.last_copy.wait()
    return Load(group, slot, sources)


def test_tensors_point_at_the_slot_and_bring_changes_home():
    model = nn.Linear(3, 2)
    host, expected = model.weight.data_ptr(), model.weight.detach() + 1
    group = group_of(model)
    tied = TiedUses([group])
    load = loaded(group, tied)
    group.point(load, tied)
    assert model.weight.untyped_storage().data_ptr() == load.slot.address
    with torch.no_grad():
        model.weight.add_(1)
    group.restore(load, tied)
    assert model.weight.data_ptr() == host
    assert torch.equal(model.weight, expected)


def test_changes_after_the_request_are_noticed():
    model = nn.Linear(3, 2)
    group = group_of(model)
    tied = TiedUses([group])
    load = loaded(group, tied)
    assert not group.changed(load, tied)
    with torch.no_grad():
        model.bias.zero_()
    assert group.changed(load, tied)
    load = loaded(group, tied)
    model.weight = nn.Parameter(torch.ones(2, 3))
    assert group.changed(load, tied)


def test_a_tied_tensor_is_copied_for_the_first_group_only():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    first, second = group_of(model, "a"), group_of(model, "b", 1)
    tied = TiedUses([first, second])
    load = loaded(first, tied)
    first.point(load, tied)
    assert tied.sources_now(second) == [None]
    (host,) = tied.hosts(second)
    assert host.data_ptr() == load.hosts[0].data_ptr()
    first.restore(load, tied)
    assert tied.sources_now(second)[0] is not None


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            StreamedGroup.check,
            "'weight' is a Tensor, so it cannot be streamed",
        ),
        (
            lambda: torch.ones(2, 2, device="meta"),
            StreamedGroup.check_values,
            r"has no values \(meta device\)",
        ),
    ],
)
def test_tensors_that_cannot_be_streamed(make, check, message):
    model = nn.Module()
    model.weight = nn.Parameter(make(), requires_grad=False)
    group = StreamedGroup(model, 0, Group("", model, {"weight": model.weight}))
    with pytest.raises(OffloadError, match=message):
        check(group)


def test_a_removed_tensor_is_named():
    model = nn.Linear(2, 2)
    group = group_of(model)
    model.bias = None
    with pytest.raises(
        OffloadError, match="'bias' was removed from its module after the model was dispatched"
    ):
        TiedUses([group]).sources_now(group)
