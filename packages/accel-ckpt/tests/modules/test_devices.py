"""Devices as a user names them."""

import pytest
import torch

from accel_ckpt.modules import devices
from accel_ckpt.modules.devices import existing_device, parse_device
from accel_state.errors import AccelError, DeviceError


class OtherError(AccelError):
    pass


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: torch.device("xpu"))
    monkeypatch.setattr(devices, "device_count", lambda kind: 2 if kind == "xpu" else 0)


def test_a_number_is_an_index_of_the_accelerator(two_devices):
    assert parse_device(1) == torch.device("xpu", 1)
    assert existing_device("xpu") == torch.device("xpu")
    assert existing_device(torch.device("cpu")) == torch.device("cpu")
    assert existing_device("meta").type == "meta"


def test_without_an_accelerator_a_number_is_of_type_cuda(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: torch.device("cpu"))
    assert parse_device(3) == torch.device("cuda", 3)


@pytest.mark.parametrize("wrong", ["gpu", -1, 1.5, None, True])
@pytest.mark.parametrize("function", [parse_device, existing_device])
def test_what_is_not_a_device(two_devices, function, wrong):
    with pytest.raises(DeviceError, match=rf"^main_device is {wrong!r}, which is not a device; give"):
        function(wrong, "main_device is")
    with pytest.raises(OtherError):
        function(wrong, error=OtherError)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("xpu:2", "has 2 of type xpu"), (2, "has 2 of type xpu"), ("cuda", "has no cuda device")],
)
def test_what_this_machine_does_not_have(two_devices, wrong, why):
    parse_device(wrong)
    with pytest.raises(DeviceError, match=f"^it is {wrong!r}, but this machine {why}; use 'cpu'"):
        existing_device(wrong, "it is")
    with pytest.raises(OtherError):
        existing_device(wrong, error=OtherError)
