"""Which layers compute in fp8 with torchao, without it: what they compute is in engines:fp8."""

import pytest
import torch
from torch import nn

from accel_train import (
    Accelerator,
    AORecipeKwargs,
    IncompatibleOptionsError,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
)
from accel_train.precision.fp8 import ao
from testkit.fp8 import CONVERTED, Net


def linear_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_the_first_and_the_last_linear_layer():
    assert find_first_last_linear_layers(Net()) == ("first", "head")
    assert find_first_last_linear_layers(nn.Linear(2, 2)) == ("", "")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_the_default_filter():
    model = Net()
    names = linear_names(model)
    assert [name for name in names if filter_first_and_last_linear_layers(model, name)] == CONVERTED
    chosen = [name for name in names if filter_linear_layers(model.get_submodule(name), name, ["first"])]
    assert chosen == CONVERTED, "sizes 20 and 1 are not divisible by 16"
    assert filter_linear_layers(nn.Linear(32, 16), "a", [])
    assert not filter_linear_layers(nn.Linear(32, 24), "a", [])
    assert not filter_linear_layers(nn.Linear(24, 32), "a", [])


class Recipe:
    class config:
        emulate = False


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
def test_gpus_without_products_in_fp8_are_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    if fits:
        ao.AOLayers(Recipe(), "cuda")
        return
    message = rf"8\.9 or later.*Some GPU has {capability[0]}\.{capability[1]}; use 'bf16'"
    with pytest.raises(IncompatibleOptionsError, match=message):
        ao.AOLayers(Recipe(), "cuda")


def test_other_devices_are_refused():
    ao.AOLayers(Recipe(), "cpu")
    with pytest.raises(IncompatibleOptionsError, match="CPU, CUDA and XPU devices, and this one is 'mps'"):
        ao.AOLayers(Recipe(), "mps")


@pytest.mark.gpu
def test_the_real_engine_trains_on_a_gpu():
    """torchao's layers on an accelerator: a loss falls, and the plain layers come back."""
    pytest.importorskip("torchao", reason="torchao is not installed here")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert [ao.has_ao_layers(layer) for layer in model] == [False, True, False]
    x = torch.randn(32, 64, device=accelerator.device)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not ao.has_ao_layers(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
