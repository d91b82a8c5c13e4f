import itertools

import pytest
import torch
from torch import nn

from accel_bigmodel import PipelineError, generate_device_map
from accel_bigmodel.pipelines.stages import check_split_points, choose_split_points


class Blocks(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1, size, bias=False), nn.ReLU()) for size in sizes
        )
        self.register_buffer("end", torch.zeros(2))


def largest(sizes, starts):
    bounds = [0, *starts, len(sizes)]
    return max(sum(sizes[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_largest_part_is_as_small_as_brute_force_can_make_it(parts):
    generator = torch.Generator().manual_seed(parts)
    for _ in range(20):
        sizes = torch.randint(1, 30, (6,), generator=generator).tolist()
        model = Blocks(sizes)
        device_map = generate_device_map(model, parts)
        assert {name.partition(".")[0] for name in device_map} == {"start", "end", "blocks"}
        cut = [int(point.removeprefix("blocks.")) for point in choose_split_points(model, parts)]
        whole = [5 + sizes[0], *sizes[1:]]  # the model's own tensors are the first part's
        best = min(largest(whole, starts) for starts in itertools.combinations(range(1, 6), parts - 1))
        assert largest(whole, cut) == best


def test_every_tensor_has_a_process_and_parts_follow_each_other():
    model = nn.Transformer(8, 2, 2, 2, 16)
    device_map = generate_device_map(model, 3)
    parts = list(device_map.values())
    assert parts == sorted(parts)
    assert set(parts) == {0, 1, 2}
    for name, _ in model.named_parameters():
        assert sum(name == entry or name.startswith(f"{entry}.") for entry in device_map) == 1


def test_blocks_stay_whole_unless_there_are_fewer_than_processes():
    model = Blocks([4, 4])
    assert choose_split_points(model, 2) == ["blocks.1"]
    deep = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
    assert choose_split_points(deep, 3) == ["0.1", "1.0"]
    with pytest.raises(PipelineError, match=r"only 2 parts .*\(Sequential stay whole\).* 3 processes"):
        generate_device_map(deep, 3, no_split_module_classes="Sequential")


def test_a_stage_begins_with_a_module_that_is_called():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.scales = nn.ParameterList([torch.zeros(100)])
            self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    model = Parts()
    assert choose_split_points(model, 3) == ["attention", "last"]
    assert list(generate_device_map(model, 3)) == ["first", "attention", "scales", "last"]


def test_classes_that_a_transformers_model_names_stay_whole():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert choose_split_points(model, 2) == ["0.1"]
    model._no_split_modules = ["Sequential"]
    assert choose_split_points(model, 2) == ["1"]


def test_memory_limits():
    model = Blocks([10, 10])
    assert set(generate_device_map(model, 2, max_memory={0: 60, 1: "1KB"}).values()) == {0, 1}
    with pytest.raises(PipelineError, match="process 0 would hold 60 bytes, but max_memory gives it 59"):
        generate_device_map(model, 2, max_memory={0: 59, 1: 60})
    with pytest.raises(PipelineError, match=r"max_memory\[1\]: 'much' is not a size"):
        generate_device_map(model, 2, max_memory={0: 60, 1: "much"})
    assert set(generate_device_map(model, 2, max_memory={0: float("inf"), 1: 60}).values()) == {0, 1}
    with pytest.raises(PipelineError, match="has no entry for process 1"):
        generate_device_map(model, 2, max_memory={0: 60})


def test_a_module_with_two_names_is_one_split_point():
    model = nn.Module()
    model.a = model.b = nn.Linear(1, 1)
    with pytest.raises(PipelineError, match="twice"):
        check_split_points(model, ["a", "b"], 3)
    assert list(generate_device_map(model, 1)) == ["a"]
