"""Offloaded models on an accelerator, and the same on the CPU with ordinary memory as the device."""

import copy

import pytest
import torch

from accel_bigmodel import HostTransfer, cpu_offload, disk_offload, dispatch_model, offload_stats, undispatch
from testkit.streamed import Model, Tied, x


class Place:
    """Where a test computes."""

    def __init__(self, kind):
        self.is_cpu = kind == "cpu"
        self.device = (
            torch.device("cpu")
            if self.is_cpu
            else torch.device(torch.accelerator.current_accelerator().type, 0)
        )

    @property
    def options(self):
        return {"transfer": HostTransfer()} if self.is_cpu else {}


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def place(request):
    return Place(request.param)


def expected(model, place, *inputs):
    there = copy.deepcopy(model).to(place.device)
    with torch.no_grad():
        return there(*(each.to(place.device) for each in inputs))


def check(model, right, place, *inputs):
    """Twice: the second forward runs in the order that the first has shown."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with torch.no_grad():
            found = model(*(each.to(place.device) for each in inputs))
        assert found.device == place.device
        torch.testing.assert_close(found, right)
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name].cpu()), name


def test_weights_in_host_memory(place):
    model = Model(blocks=6)
    right = expected(model, place, x())
    cpu_offload(model, execution_device=place.device, **place.options)
    check(model, right, place, x())
    stats = offload_stats(model)
    assert stats.bytes_moved > 0
    assert stats.peak_bytes < sum(parameter.nbytes for parameter in model.parameters())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    undispatch(model)
    torch.testing.assert_close(model(x()), right.cpu())


def test_weights_on_disk(place, tmp_path):
    model = Model(blocks=4)
    right = expected(model, place, x())
    disk_offload(model, tmp_path, execution_device=place.device, **place.options)
    check(model, right, place, x())


def test_a_map_over_device_host_and_disk(place, tmp_path):
    model = Model(blocks=4)
    right = expected(model, place, x())
    first = "cpu" if place.is_cpu else 0
    device_map = {"blocks.0": first, "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": first}
    dispatch_model(model, device_map, main_device=place.device, offload_dir=tmp_path, **place.options)
    if not place.is_cpu:
        assert model.blocks[0].linear.weight.device == place.device
    assert model.blocks[2].linear.weight.device.type == "cpu"
    check(model, right, place, x())


def test_tied_weights(place):
    model = Tied()
    ids = torch.tensor([[1, 5, 69], [0, 2, 3]])
    right = expected(model, place, ids)
    cpu_offload(model, execution_device=place.device, **place.options)
    check(model, right, place, ids)
    assert model.head.weight is model.embed.weight


def test_gradients_of_inputs_go_through_offloaded_weights(place):
    model = Model(blocks=4).requires_grad_(False)
    there = copy.deepcopy(model).to(place.device)
    one, other = (x().to(place.device).requires_grad_() for _ in range(2))
    there(one).sum().backward()
    cpu_offload(model, execution_device=place.device, **place.options)
    model(other).sum().backward()
    torch.testing.assert_close(other.grad, one.grad)
