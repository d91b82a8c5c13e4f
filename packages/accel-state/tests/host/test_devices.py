"""The choice of device and of the communication library, with simulated accelerators."""

from __future__ import annotations

import pytest
import torch

from accel_state.clusters.base import Topology
from accel_state.enums import DistributedType
from accel_state.errors import ConfigError, DeviceError
from accel_state.host import devices


@pytest.fixture
def accelerators(monkeypatch):
    """Simulate ``count`` devices of a kind."""

    def simulate(kind: str, count: int) -> None:
        device = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)

    return simulate


def local(rank: int, size: int, launcher: str = "torchrun") -> Topology:
    return Topology(rank, size, rank, size, launcher=launcher)


def test_without_an_accelerator_it_is_the_cpu(accelerators):
    accelerators("cuda", 0)
    assert devices.choose_device(local(1, 2), cpu=False) == torch.device("cpu")
    assert devices.default_device() == torch.device("cpu")


def test_the_local_rank_is_the_index(accelerators):
    accelerators("cuda", 4)
    place = Topology(rank=6, world_size=8, local_rank=2, local_world_size=4, launcher="torchrun")
    assert devices.choose_device(place, cpu=False) == torch.device("cuda", 2)
    assert devices.choose_device(Topology(), cpu=False) == torch.device("cuda", 0)


def test_cpu_wins_over_an_accelerator(accelerators):
    accelerators("cuda", 4)
    assert devices.choose_device(local(1, 2), cpu=True) == torch.device("cpu")


@pytest.mark.parametrize(("count", "text"), [(1, "1 cuda device;"), (2, "2 cuda devices;")])
def test_more_processes_than_devices(accelerators, count, text):
    accelerators("cuda", count)
    with pytest.raises(DeviceError) as caught:
        devices.choose_device(local(0, 3), cpu=False)
    message = str(caught.value)
    assert "3 processes" in message
    assert text in message
    assert f"--num_processes {count}" in message
    assert "--cpu" in message


@pytest.mark.parametrize("launcher", ["slurm", "mpi", "flux", "lsf"])
def test_a_scheduler_may_show_each_process_its_own_device_only(accelerators, launcher):
    accelerators("cuda", 1)
    assert devices.choose_device(local(2, 3, launcher), cpu=False) == torch.device("cuda", 0)


def test_mps_has_no_index_and_no_world(accelerators):
    accelerators("mps", 1)
    assert devices.choose_device(Topology(), cpu=False) == torch.device("mps")
    with pytest.raises(DeviceError, match=r"2 processes.*mps devices cannot communicate.*--cpu"):
        devices.choose_device(local(0, 2), cpu=False)


def test_the_override_is_taken_as_it_is():
    assert devices.choose_device(local(1, 2), cpu=True, override="meta") == torch.device("meta")
    assert devices.choose_device(Topology(), cpu=False, override="cuda:5") == torch.device("cuda", 5)


def test_an_override_that_is_no_device_is_named():
    with pytest.raises(ConfigError, match="ACCELERATE_TORCH_DEVICE is 'gpu'"):
        devices.choose_device(Topology(), cpu=False, override="gpu")


@pytest.mark.parametrize(
    ("kind", "kind_of_world", "default"),
    [
        ("cpu", DistributedType.MULTI_CPU, "gloo"),
        ("cuda", DistributedType.MULTI_GPU, "cpu:gloo,cuda:nccl"),
        ("xpu", DistributedType.MULTI_XPU, "cpu:gloo,xpu:xccl"),
        ("mps", DistributedType.NO, "gloo"),
    ],
)
def test_defaults_per_kind(kind, kind_of_world, default):
    device = torch.device(kind)
    assert devices.device_backend(device).distributed_type is kind_of_world
    assert devices.choose_collectives(device) == default


@pytest.mark.parametrize("requested", ["gloo", "GLOO", "cpu:gloo"])
def test_a_backend_that_serves_the_device_is_kept(requested):
    assert devices.choose_collectives(torch.device("cpu"), requested) == requested.lower()


@pytest.mark.parametrize(
    ("requested", "name"),
    [("nccl", "nccl"), ("bogus", "bogus"), ("cpu:bogus", "bogus"), ("cpu:gloo,cuda:bogus", "bogus")],
)
def test_a_backend_that_is_not_there_is_named(requested, name):
    if name == "nccl" and torch.distributed.is_nccl_available():
        pytest.skip("this build of PyTorch has NCCL")
    with pytest.raises(ConfigError, match=rf"{requested!r} .*is not available.*{name!r}.*use 'gloo'"):
        devices.choose_collectives(torch.device("cpu"), requested)


def test_a_backend_for_other_devices_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    with pytest.raises(ConfigError, match=r"'nccl'.* is not available on cpu devices; use 'gloo'"):
        devices.choose_collectives(torch.device("cpu"), "nccl")


def test_an_unknown_kind_of_device():
    with pytest.raises(DeviceError, match=r"'meta' is unknown, and torch\.accelerator finds no such device"):
        devices.device_backend(torch.device("meta"))


def test_a_kind_that_another_package_has_registered(accelerators, monkeypatch):
    accelerators("privateuseone", 2)
    device = devices.choose_device(Topology(), cpu=False)
    assert device == torch.device("privateuseone", 0)
    assert devices.device_backend(device).collectives is None
    with pytest.raises(DeviceError, match="privateuseone devices cannot communicate with each other"):
        devices.choose_device(local(0, 2), cpu=False)
    known = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setitem(known, "privateuseone", "theirs")
    assert devices.choose_device(local(1, 2), cpu=False) == torch.device("privateuseone", 1)
    assert devices.choose_collectives(device) == "cpu:gloo,privateuseone:theirs"
    assert devices.device_backend(device).distributed_type is DistributedType.MULTI_GPU


def test_a_module_of_an_absent_device(accelerators):
    accelerators("cuda", 0)
    with pytest.raises(DeviceError, match=r"this machine has no xpu device.*'cpu'"):
        devices.accelerator_module("xpu")


def test_every_row_can_be_chosen():
    for kind, row in devices.BACKENDS.items():
        assert row.type == kind
        assert isinstance(row.distributed_type, DistributedType)


@pytest.mark.gpu
def test_device_of_this_machine():
    device = devices.choose_device(Topology(), cpu=False)
    devices.set_current_device(device)
    assert device.type == torch.accelerator.current_accelerator().type
    assert torch.accelerator.current_device_index() == (device.index or 0)
    devices.empty_cache()


def test_current_device_type_is_that_of_cuda_without_an_accelerator():
    kind, world = devices.get_current_device_type()
    if not torch.accelerator.is_available():
        assert (kind, world) == ("cuda", "MULTI_GPU")
    else:
        assert kind == torch.accelerator.current_accelerator().type
