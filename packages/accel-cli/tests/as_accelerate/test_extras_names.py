"""Names of ``accelerate`` that are answered for clients alone, against what plain PyTorch does."""

import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from accel_ckpt.errors import UnsafeCheckpointError
from accel_cli.as_accelerate.extras import blocks, checkpointing, examples, fsdp, names, operations
from accel_state import DistributedOperationException, PartialState, gather
from accel_train import Accelerator, FullyShardedDataParallelPlugin, SkipDataLoader, prepare_data_loader
from accel_train.errors import OptionError, PrepareError
from accel_train.loop.manual_amp import ConvertOutputsToFp32
from testkit import worlds

# Training states


def parts():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def train(model, optimizer, scheduler):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def draws():
    return random.random(), np.random.random(), torch.rand(1).item()


@pytest.mark.parametrize("safe", [True, False])
def test_a_training_state_comes_back(tmp_path, safe):
    model, optimizer, scheduler = parts()
    train(model, optimizer, scheduler)
    loader = SkipDataLoader(list(range(8)), 0, True, batch_size=2)
    next(iter(loader))
    checkpointing.save_accelerator_state(
        tmp_path, [model.state_dict()], [optimizer], [scheduler], [loader], 0, 7, safe_serialization=safe
    )
    expected = draws()
    train(model, optimizer, scheduler)
    other = parts()
    again = SkipDataLoader(list(range(8)), 0, True, batch_size=2)
    found = checkpointing.load_accelerator_state(tmp_path, other[:1], other[1:2], other[2:], [again], 0)
    assert (found, draws()) == ({"step": 7}, expected)
    assert next(iter(again)).tolist() == [2, 3]
    train(*other)
    for mine, theirs in zip(other[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other[2].get_last_lr() == scheduler.get_last_lr()


def test_options_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(OptionError, match="map_location"):
        checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 0, map_location="cuda:3")
    with pytest.raises(OptionError, match="weights_only"):
        checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 0, load_kwargs={"weights_only": False})


class Counter:
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Evil:
    def __reduce__(self):
        return os.system, ("false",)


def test_a_custom_object_is_loaded_and_runs_nothing(tmp_path):
    PartialState()
    checkpointing.save_custom_state(Counter(3), tmp_path, 1)
    counter = Counter(0)
    checkpointing.load_custom_state(counter, tmp_path, 1)
    assert counter.count == 3
    (tmp_path / "custom_checkpoint_2.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsafeCheckpointError):
        checkpointing.load_custom_state(counter, tmp_path, 2)


# Operations


def shapes():
    state = PartialState()
    rank = state.process_index
    shape, number = operations.gather_tensor_shape(torch.zeros(2, 3, dtype=torch.int8) if rank == 1 else None)
    with pytest.raises(DistributedOperationException, match="2 ranks"):
        operations.gather_tensor_shape(torch.zeros(1))
    state.debug = True
    checked = operations.chained_operation(
        operations.verify_operation(lambda tensor: gather(tensor).sum().item())
    )
    with pytest.raises(DistributedOperationException, match=r"while calling .*rank 1: "):
        checked(torch.ones(rank + 1))
    return shape.tolist(), operations.TENSOR_INT_TO_DTYPE[number], checked(torch.ones(2))


def test_shapes_are_told_and_compared():
    assert worlds.run(shapes, 2) == [([2, 3], torch.int8, 4.0)] * 2


def test_parameters_are_whole_without_an_engine():
    Accelerator(cpu=True)
    layer = nn.Linear(1, 1)
    with operations.GatheredParameters(layer.parameters(), modifier_rank=0):
        assert layer.weight.shape == (1, 1)


def test_outputs_are_converted():
    forward = ConvertOutputsToFp32(lambda value: {"x": value.half()})
    assert isinstance(forward, ConvertOutputsToFp32)
    assert forward(torch.ones(1))["x"].dtype == torch.float32


# Blocks, devices, loaders


def test_repeated_blocks():
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert blocks.is_repeated_blocks(layers)
    assert blocks.has_repeated_blocks(nn.Sequential(nn.ReLU(), layers))
    assert not blocks.is_repeated_blocks(nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)]))
    assert not blocks.has_repeated_blocks(nn.Sequential(nn.ReLU(), nn.ModuleList()))
    assert blocks.compile_regions_fsdp2(layers, backend="eager") is layers
    assert torch.equal(layers[0](torch.zeros(1, 2)), layers[0].bias[None])


def test_devices():
    assert names.check_device_same(torch.device("cpu"), torch.device("cpu:0"))
    assert not names.check_device_same(torch.device("cpu"), torch.device("meta"))
    assert names.get_parameter_device(nn.Linear(1, 1, device="meta")) == torch.device("meta")


def test_what_needs_deepspeed_says_so(monkeypatch):
    monkeypatch.setattr(names, "is_deepspeed_available", lambda: False)
    with pytest.raises(ImportError, match=r"train_with_it.*pip install deepspeed"):
        names.deepspeed_required(named("train_with_it"))()
    monkeypatch.setattr(names, "is_deepspeed_available", lambda: True)
    assert names.deepspeed_required(named("x"))() == "ran"


def named(name):
    def function():
        return "ran"

    function.__name__ = name
    return function


def test_all_prepared_loaders_are_of_one_class():
    from torch.utils.data import DataLoader

    assert isinstance(prepare_data_loader(DataLoader([1])), names.DataLoaderAdapter)
    assert not isinstance(DataLoader([1]), names.DataLoaderAdapter)


# FSDP


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.inner.weight


def test_what_was_tied_is_tied_after_new_values():
    model = Tied()
    make = fsdp.ensure_weights_retied(
        lambda module: module.to_empty(device="meta", recurse=False), model, "meta"
    )
    for module in model.modules():
        make(module)
    assert model.head.weight is model.inner.weight
    assert model.head.weight.device.type == "meta"


def divide():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=12
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    is_unit = fsdp.fsdp2_prepare_auto_wrap_policy(plugin, whole)
    units = [is_unit(module) for module in whole]
    values = {name: torch.full_like(value, 2.0) for name, value in whole.state_dict().items()}
    model = fsdp.fsdp2_prepare_model(accelerator, whole)
    fsdp.fsdp2_load_full_state_dict(accelerator, model, values if accelerator.is_main_process else {})
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return (
        units,
        all(torch.equal(found[name], values[name]) for name in values),
        accelerator._models[0] is model,
    )


def test_a_model_is_divided_and_filled():
    assert worlds.run(divide, 2) == [([True, False], True, True)] * 2


def test_another_strategy_does_not_divide():
    with pytest.raises(PrepareError, match="FullyShardedDataParallelPlugin"):
        fsdp.fsdp2_prepare_model(Accelerator(cpu=True), nn.Linear(1, 1))


def test_names_without_wrappers():
    given = {"_orig_mod.a._checkpoint_wrapped_module.weight": 1}
    assert fsdp.fsdp2_canonicalize_names(given) == {"a.weight": 1}


def test_arguments_of_a_loader_are_those_of_this_torch():
    defaults = names._PYTORCH_DATALOADER_KWARGS
    assert (defaults["batch_size"], defaults["shuffle"], defaults["num_workers"]) == (1, None, 0)
    assert "dataset" not in defaults
    torch.utils.data.DataLoader([1], **defaults)


# Sizes of tensor parallelism


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"tp_size": 4}, 4),
        ({"config": SimpleNamespace(distributed_config={"tp_size": 2})}, 2),
        ({"config": SimpleNamespace(distributed_config=SimpleNamespace(tp_size=2)), "tp_size": None}, 2),
        ({"config": SimpleNamespace(distributed_config=None)}, None),
        ({}, None),
    ],
)
def test_the_degree_that_a_model_of_transformers_has(given, size):
    model = nn.Linear(1, 1)
    for name, value in given.items():
        setattr(model, name, value)
    assert names.get_model_tp_size(model) == size


# What an example adds


def example(extra):
    return (
        "import torch\n\ndef training_function(config):\n    # a comment\n    train()\n"
        + extra
        + "\ndef main():\n    parse()\n    training_function({})\n\nif __name__ == '__main__':\n    main()\n"
    )


def test_lines_that_the_complete_example_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    Path("examples/nlp_example.py").write_text(example(""))
    Path("feature.py").write_text(example("    save()\n    load()\n    train()\n"))
    Path("complete.py").write_text(example("    save()\n"))
    assert examples.compare_against_test("complete.py", "feature.py", False) == ["    load()\n"]
    assert examples.compare_against_test("complete.py", "feature.py", True) == []
    with pytest.raises(ValueError, match="known: training_function, main"):
        examples.get_function_contents_by_name([], "other")
