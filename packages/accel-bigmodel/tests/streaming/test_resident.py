"""Groups that stay on the device."""

import torch
from torch import nn

from accel_bigmodel.streaming.groups import Group
from accel_bigmodel.streaming.resident import Resident
from accel_bigmodel.streaming.streamed_groups import StreamedGroup
from accel_bigmodel.streaming.transfer import HostTransfer


def test_tensors_are_in_memory_of_the_transfer_until_they_are_restored():
    model = nn.Linear(3, 2)
    weight, bias = model.weight, model.bias
    hosts = [weight.data_ptr(), bias.data_ptr()]
    expected = weight.detach().clone()
    group = StreamedGroup(model, 0, Group("", model, dict(model.named_parameters())))
    group.check()
    resident = Resident(group, HostTransfer())
    assert model.weight is weight
    assert weight.data_ptr() not in hosts
    assert torch.equal(weight, expected)
    # Saving one saves nothing else.
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert {key: host.data_ptr() for key, host in resident.homes()} == {
        id(weight): hosts[0],
        id(bias): hosts[1],
    }
    with torch.no_grad():
        weight.add_(1)
    resident.restore()
    assert [weight.data_ptr(), bias.data_ptr()] == hosts
    assert torch.equal(weight, expected + 1)
