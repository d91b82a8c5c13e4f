"""The choice of XLA devices without torch_xla; tests-integration/engines/test_xla.py has the real one."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from accel_state.clusters.base import Topology
from accel_state.config.launch import LaunchConfig
from accel_state.enums import DistributedType
from accel_state.errors import DeviceError, NotAvailableError
from accel_state.host import devices, xla
from accel_state.world.process import PartialState
from testkit import worlds

ALONE = Topology(0, 1, 0, 1, launcher="single")
INSTALLED = pytest.mark.skipif(xla.is_installed(), reason="torch_xla is installed; this is about its absence")


@pytest.mark.parametrize(
    ("environ", "distributed_type", "selected"),
    [
        ({}, None, False),
        ({"PJRT_DEVICE": ""}, None, False),
        ({"PJRT_DEVICE": "TPU"}, None, True),
        ({"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}, None, True),
        ({"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "0"}, None, False),
        ({"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "False"}, None, False),
        ({"USE_TORCH_XLA": "1"}, None, False),
        ({}, "XLA", True),
        ({"USE_TORCH_XLA": "0"}, "XLA", True),
        ({"PJRT_DEVICE": "CPU"}, "MULTI_CPU", True),
    ],
)
def test_selection(environ, distributed_type, selected):
    assert xla.is_selected(environ, LaunchConfig(distributed_type=distributed_type)) is selected


@pytest.fixture
def fake(monkeypatch):
    """As much of torch_xla as choosing a device and its random state need."""
    monkeypatch.setattr(xla, "is_installed", lambda: True)
    model = types.ModuleType("torch_xla.core.xla_model")
    model.state = 0
    model.get_rng_state = lambda: model.state
    model.set_rng_state = lambda seed: setattr(model, "state", seed)
    for name, module in (("torch_xla", types.ModuleType("torch_xla")), (model.__name__, model)):
        monkeypatch.setitem(sys.modules, name, module)
    return model


@pytest.mark.usefixtures("fake")
def test_the_cpu_and_a_named_device_are_stronger():
    assert devices.choose_device(ALONE, cpu=False, use_xla=True) == torch.device("xla", 0)
    assert devices.choose_device(ALONE, cpu=True, use_xla=True) == torch.device("cpu")
    assert devices.choose_device(ALONE, cpu=False, override="meta", use_xla=True) == torch.device("meta")


def device_and_backend_with_torch_tpu():
    torch.utils.rename_privateuse1_backend("tpu")  # as torch_tpu does when it is imported
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("tpu")
    torch.accelerator.device_count = lambda: 4
    four = Topology(3, 4, 3, 4, launcher="torchrun")
    device = devices.choose_device(four, cpu=False, use_xla=True)
    return str(device), devices.choose_collectives(device)


def test_torch_tpu_is_taken_where_it_is():
    """In a process of its own, because a device type is renamed once."""
    found = worlds.run(device_and_backend_with_torch_tpu, 1)
    assert found == [("tpu:3", "cpu:gloo,tpu:tpu_dist")]


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 5, 2**64 - 1])
def test_random_states_are_eight_bytes(fake, seed):
    xla.manual_seed(seed)
    state = devices.accelerator_module("xla").get_rng_state(torch.device("xla", 0))
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (8,), "cpu")
    fake.state = 1
    xla.set_rng_state(state)
    assert fake.state == seed


def test_an_unusable_installation_is_reported(monkeypatch):
    monkeypatch.setattr(xla, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # importing it raises ImportError
    with pytest.raises(
        DeviceError, match=r"cannot be imported with torch .*Install the version of torch_xla"
    ):
        xla.xla_device()


def test_rows():
    assert devices.choose_collectives(torch.device("xla", 0)) == "gloo", "through host memory"
    assert devices.device_backend(torch.device("xla")).lazy
    row = devices.BACKENDS["tpu"]
    assert (row.collectives, row.lazy, row.distributed_type) == ("tpu_dist", False, DistributedType.XLA)
    devices.set_current_device(torch.device("xla", 0))  # torch.accelerator does not know it


@INSTALLED
@pytest.mark.parametrize("variable", ["PJRT_DEVICE", "ACCELERATE_DISTRIBUTED_TYPE"])
def test_a_missing_package_gives_the_install_line(monkeypatch, variable):
    monkeypatch.setenv(variable, {"PJRT_DEVICE": "TPU"}.get(variable, "XLA"))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    PartialState.reset()
    with pytest.raises(NotAvailableError, match=r"pip install 'torch_xla\[tpu\]>=2\.9'"):
        PartialState()
    assert not PartialState._shared_state, "nothing is half done"


def message_of_a_missing_package():
    try:
        PartialState()
    except NotAvailableError as error:
        return str(error)
    return "none"


@INSTALLED
def test_all_ranks_raise_it():
    """Device by device: the ranks have met, and agree before the process group is made."""
    environ = {"PJRT_DEVICE": "CPU", "ACCELERATE_USE_CPU": "false"}
    for message in worlds.run(message_of_a_missing_package, 2, environ=environ):
        assert "pip install 'torch_xla[tpu]>=2.9'" in message
