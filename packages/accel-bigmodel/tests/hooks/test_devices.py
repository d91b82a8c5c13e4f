"""Naming devices."""

import pytest
import torch

from accel_bigmodel import DeviceMapError
from accel_bigmodel.hooks.devices import concrete_device


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu"), torch.device("meta")])
def test_devices_without_an_index(device):
    assert concrete_device(device) == torch.empty(1, device=device).device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_gets_its_index():
    kind = torch.accelerator.current_accelerator().type
    for device in (kind, 0, torch.device(kind)):
        assert concrete_device(device) == torch.empty(1, device=device).device


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator 0 here")
def test_a_number_names_an_accelerator():
    with pytest.raises(DeviceMapError, match=r"the device 0 cannot be used.*no accelerator"):
        concrete_device(0)
