from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from accel_bigmodel.device_maps.device_usage import Usage, device_of, entry_of, main_device_of
from accel_bigmodel.device_maps.model_outline import Outline


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.ones(10))
        self.down = nn.Parameter(torch.ones(10))
        self.act = nn.ReLU()
        self.register_buffer("seen", torch.zeros(1))


def model():
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), e=Experts(), b=nn.Linear(4, 4)))


def test_entries():
    device_map = {"a": 0, "a.b": 1, "": "cpu"}
    assert [entry_of(name, device_map) for name in ("a.b.c", "a.x", "ab", "a")] == ["a.b", "a", "", "a"]
    assert device_of("ab", device_map) == "cpu"
    assert device_of("b", {"a": 0}) is None
    assert main_device_of({"x": "disk", "y": 1, "z": 0}) == 1
    assert main_device_of({"x": "disk"}) == "cpu"
    gpu = torch.device("cuda", 1)
    assert main_device_of({"x": torch.device("cpu"), "y": "disk", "z": gpu}) == gpu


def test_tensors_of_a_module_pass_through_together():
    usage = Usage.of(
        Outline.of(model()), {"a": 0, "e.up": "cpu", "e.down": "disk", "e.act": 0, "e.seen": 0, "b": 0}
    )
    assert usage.used == {0: 164, "cpu": 40, "disk": 40}
    assert usage.kept == {0: (80, "e"), "cpu": (40, "e")}
    assert usage.buffers == 0
    assert usage.room(0, {0: 300}) == 300 - 164 - 80
    assert usage.complaints({0: 244, "cpu": 80, "disk": 40}) == []
    over, passing = usage.complaints({0: 243, "cpu": 39, "disk": 40})
    assert over.startswith(
        "0 has 243 bytes, and the map puts 164 bytes on it while 'e' with 80 bytes must pass"
    )
    assert passing.startswith("'cpu' has 39 bytes, and the map puts 40 bytes on it while 'e'")


def test_an_empty_host_has_nothing_in_the_way():
    usage = Usage.of(Outline.of(model()), {"": "disk"})
    assert usage.kept == {}
    assert usage.complaints({"cpu": 0, "disk": 1000}) == []


def test_split_ties_and_offloaded_buffers():
    tied = model()
    tied.b.weight = tied.a.weight
    usage = Usage.of(Outline.of(tied), {"a": 0, "e": "cpu", "b": "cpu"})
    assert usage.split_ties == [["a.weight", "b.weight"]]
    assert usage.buffers == 4
    assert usage.used == {0: 80, "cpu": 84 + 16}
    budgets = {0: 1000, "cpu": 1000}
    assert usage.complaints(budgets) == ["the tied parameters a.weight, b.weight are on different devices"]
