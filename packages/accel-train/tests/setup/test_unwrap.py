"""Taking the wrappers off a prepared model."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, TorchDynamoPlugin
from accel_train.setup.unwrap import (
    extract_model_from_parallel,
    has_compiled_regions,
    plain_module,
    unwrap,
)
from accel_train.strategies.base import Strategy
from accel_train.strategies.wrappers import is_compiled_module


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def test_t33_names_are_the_same_eager_and_compiled():
    names = list(make().state_dict())
    for compiled_first in (True, False):
        plugin = None if compiled_first else TorchDynamoPlugin(backend="eager")
        accelerator = Accelerator(dynamo_plugin=plugin)
        model = torch.compile(make(), backend="eager") if compiled_first else make()
        model = accelerator.prepare(model)
        model(torch.randn(2, 4))
        assert list(accelerator.get_state_dict(model)) == names
        assert list(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()) == names
    accelerator = Accelerator()
    model = make()
    model[2] = torch.compile(model[2], backend="eager")
    assert list(accelerator.get_state_dict(accelerator.prepare(model))) == names


class Box(nn.Module):
    """The wrapper of `Boxing`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Boxing(Strategy):
    """Wraps models in a `Box`."""

    name = "boxing"

    def prepare_model(self, model, steps):
        return steps.compile(Box(steps.place(steps.convert(model))))

    def unwrap(self, model):
        return model.module if isinstance(model, Box) else model


def compiled(model):
    return torch.compile(model, backend="eager")


# What is compiled


def test_a_compiled_module_inside_another_is_found():
    model = make()
    assert not has_compiled_regions(model)
    assert has_compiled_regions(nn.Sequential(compiled(model)))
    model[0].compile(backend="eager")
    assert has_compiled_regions(model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        compiled,
        nn.DataParallel,
        lambda model: compiled(nn.DataParallel(model)),
        lambda model: nn.DataParallel(compiled(model)),
    ],
)
def test_the_plain_module_is_inside_all_wrappers_which_stay(wrap):
    model = make()
    wrapped = wrap(model)
    assert plain_module(wrapped) is model
    assert plain_module(wrapped) is model


# Taking wrappers off


@pytest.mark.parametrize("strategy", ["single", "boxing"])
def test_the_scripts_own_model_comes_back(register, strategy):
    register(Boxing)
    accelerator = Accelerator(strategy=strategy)
    model = make()
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    assert extract_model_from_parallel(prepared) is model, "of the newest accelerator"
    assert accelerator.unwrap_model(model) is model
    assert isinstance(prepared, Box) == (strategy == "boxing")


def test_without_an_accelerator_torchs_own_wrappers_are_taken_off():
    model = make()
    assert extract_model_from_parallel(nn.DataParallel(model)) is model
    box = Box(model)
    assert extract_model_from_parallel(box) is box


@pytest.mark.parametrize("keep", [True, False])
def test_mixed_precision_stays_or_goes(keep):
    accelerator = Accelerator(mixed_precision="bf16")
    model = make().eval()
    x = torch.randn(2, 4)
    expected = model(x)
    prepared = accelerator.prepare(model)
    low = prepared(x)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)
    assert unwrapped is model
    assert torch.equal(unwrapped(x), low if keep else expected)
    assert not torch.equal(low, expected)


def test_mixed_precision_goes_from_inside_a_compiled_model():
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    model = make().eval()
    x = torch.randn(2, 4)
    expected = model(x)
    prepared = accelerator.prepare(model)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert plain is model
    assert torch.equal(plain(x), expected)


def test_a_compiled_model_stays_compiled_around_its_own_module(register):
    register(Boxing)
    accelerator = Accelerator(strategy="boxing", dynamo_backend="eager")
    model = make()
    prepared = accelerator.prepare(model)
    assert isinstance(prepared._orig_mod, Box)
    kept = accelerator.unwrap_model(prepared)
    assert is_compiled_module(kept)
    assert kept._orig_mod is model
    assert prepared._orig_mod.module is model, "the prepared one is not changed"
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


def test_a_compiled_model_without_another_wrapper_is_its_own():
    accelerator = Accelerator(dynamo_backend="eager")
    prepared = accelerator.prepare(make())
    assert accelerator.unwrap_model(prepared) is prepared


@pytest.mark.parametrize("keep", [True, False])
def test_regions_that_were_compiled_in_place_stay_or_go(keep):
    model = make()
    model[0].compile(backend="eager")
    found = extract_model_from_parallel(nn.DataParallel(model), keep_torch_compile=keep)
    assert found is model
    assert has_compiled_regions(model) is keep


@pytest.mark.parametrize("recursive", [True, False])
def test_wrappers_inside_are_taken_off_when_asked_for(register, recursive):
    register(Boxing)
    accelerator = Accelerator(strategy="boxing")
    inner, deep = make(), nn.Linear(2, 2)
    model = nn.ModuleDict(
        {"a": nn.DataParallel(inner), "b": nn.ModuleDict({"c": Box(nn.DataParallel(deep))})}
    )
    found = extract_model_from_parallel(Box(model), recursive=recursive)
    assert found is model
    assert (model["a"] is inner) is recursive
    assert (model["b"]["c"] is deep) is recursive
    assert unwrap(accelerator.strategy, Box(model), recursive=recursive) is model
