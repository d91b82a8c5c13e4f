"""fp8 with a stand-in for TransformerEngine: conversion, recipe, modes, state, and the way back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_train import Accelerator, AutocastKwargs, IncompatibleOptionsError, TERecipeKwargs
from accel_train.precision.fp8 import te
from testkit.fp8 import Net, fake_transformer_engine, rows


@pytest.fixture
def engine():
    with fake_transformer_engine() as module:
        yield module


def prepared(recipe=None, **arguments):
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe or TERecipeKwargs()], **arguments
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, batch):
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_layers_are_replaced_and_parameters_stay_the_same_objects(engine):
    model = Net()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    accelerator.prepare(model, optimizer)
    kinds = {name: type(module) for name, module in model.named_modules() if not list(module.children())}
    assert {name for name, kind in kinds.items() if kind is engine.Linear} == {
        "first", "blocks.0.linear", "blocks.1.linear",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind is engine.LayerNorm} == {
        "blocks.0.norm", "blocks.1.norm",
    }  # fmt: skip
    assert kinds["odd"] is kinds["head"] is nn.Linear, "20 is not divisible by 16"
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert te.has_transformer_engine_layers(model)
    assert not te.has_transformer_engine_layers(Net())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"margin": 0, "interval": 1, "amax_history_len": 1024, "amax_compute_algo": "most_recent"}),
        (
            {"margin": 2, "interval": 4, "amax_history_len": 16, "amax_compute_algo": "max"},
            {"margin": 2, "interval": 4, "amax_history_len": 16, "amax_compute_algo": "max"},
        ),
        (
            {"fp8_format": "E4M3", "override_linear_precision": (True, False, True)},
            {"override_linear_precision": (True, False, True)},
        ),
    ],
)
def test_the_recipe_reaches_the_layers(engine, options, expected):
    from transformer_engine.common.recipe import DelayedScaling, Format

    accelerator, model, optimizer = prepared(TERecipeKwargs(**options))
    step(accelerator, model, optimizer, rows(1)[0])
    assert len(engine.calls) == 3
    recipe = engine.calls[0]["recipe"]
    assert type(recipe) is DelayedScaling
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert recipe.fp8_format is Format[options.get("fp8_format", "HYBRID")]
    assert all(call["fp8"] for call in engine.calls)


def test_block_scaling(engine):
    from transformer_engine.common.recipe import MXFP8BlockScaling

    wanted = TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="E4M3", margin=1)
    with pytest.raises(IncompatibleOptionsError, match=r"use_mxfp8_block_scaling.*compute capability 10.0"):
        prepared(wanted)
    engine.fp8.SUPPORT["mxfp8"] = (True, "")
    accelerator, model, optimizer = prepared(wanted)
    step(accelerator, model, optimizer, rows(1)[0])
    recipe = engine.calls[0]["recipe"]
    assert (type(recipe), recipe.margin) == (MXFP8BlockScaling, 1)


def test_options_that_a_newer_version_lacks(engine, monkeypatch):
    from transformer_engine.common import recipe as recipes

    class Newer:
        def __init__(self, margin, fp8_format, amax_history_len, amax_compute_algo):
            self.margin = margin

    monkeypatch.setattr(recipes, "DelayedScaling", Newer)
    accelerator, model, optimizer = prepared(TERecipeKwargs(margin=5))
    step(accelerator, model, optimizer, rows(1)[0])
    assert engine.calls[0]["recipe"].margin == 5
    with pytest.raises(IncompatibleOptionsError, match=r"interval=2.*no such option any more"):
        prepared(TERecipeKwargs(interval=2))


def test_what_the_engine_refuses_and_where_it_cannot_run(engine, monkeypatch):
    with pytest.raises(IncompatibleOptionsError, match=r"DelayedScaling refuses.*Pure E5M2"):
        prepared(TERecipeKwargs(fp8_format="E5M2"))
    engine.fp8.SUPPORT["fp8"] = (False, "Device compute capability 8.9 or higher required for FP8 execution.")
    with pytest.raises(IncompatibleOptionsError, match=r"compute capability 8.9.*Use 'bf16'"):
        prepared()
    monkeypatch.setattr(te, "DEVICE_TYPES", frozenset({"cuda"}))
    with pytest.raises(IncompatibleOptionsError, match=r"NVIDIA GPUs, and this device is 'cpu'.*torchao"):
        prepared()


@pytest.mark.parametrize("during_eval", [False, True])
def test_evaluation_computes_in_fp8_only_if_asked_to(engine, during_eval):
    _, model, _ = prepared(TERecipeKwargs(use_autocast_during_eval=during_eval))
    x, _ = rows(1)[0]
    model.eval()
    model(x)
    assert {call["fp8"] for call in engine.calls} == {during_eval}
    model.train()
    engine.calls.clear()
    model(x)
    assert {call["fp8"] for call in engine.calls} == {True}


def test_bf16_is_around_what_is_not_in_fp8(engine):
    accelerator, model, _ = prepared()
    seen = []
    model.odd.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    x, _ = rows(1)[0]
    assert model(x).dtype is torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    _, plain, _ = prepared()
    assert seen == [torch.bfloat16]
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(), AutocastKwargs(enabled=False)]
    )
    plain = accelerator.prepare(Net())
    plain.odd.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    engine.calls.clear()
    plain(x)
    assert seen[1:] == [torch.float32]
    assert all(call["fp8"] for call in engine.calls), "fp8 is no part of autocast"


def test_names_are_those_of_the_plain_model(engine):
    accelerator, model, _ = prepared()
    names = list(Net().state_dict())
    assert list(model.state_dict()) == names
    assert list(accelerator.get_state_dict(model)) == names
    model.load_state_dict(Net().state_dict())


def test_unwrapping_gives_the_plain_layers_back(engine):
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer, rows(1)[0])
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert te.has_transformer_engine_layers(accelerator.unwrap_model(model))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert not te.has_transformer_engine_layers(plain)
    assert [type(module) for module in plain.modules()] == [type(module) for module in Net().modules()]
    assert all(value is parameters[name] for name, value in plain.named_parameters())
    fresh = Net()
    fresh.load_state_dict(weights)
    x, _ = rows(1)[0]
    assert torch.equal(plain(x), fresh(x))
    assert torch.equal(pickle.loads(pickle.dumps(plain))(x), fresh(x))


def test_another_accelerator_gets_the_plain_layers(engine):
    _, model, _ = prepared()
    Accelerator(mixed_precision="no").prepare(model)
    assert not te.has_transformer_engine_layers(model)


def test_a_layer_in_two_places_stays_one(engine):
    model = Net()
    model.blocks[1].linear = model.blocks[0].linear
    te.convert_model(model)
    assert model.blocks[1].linear is model.blocks[0].linear
    te.convert_model(model, to_transformer_engine=False)
    assert type(model.blocks[0].linear) is nn.Linear
    assert model.blocks[1].linear.weight is model.blocks[0].linear.weight


def test_only_linear_layers_or_norms_are_converted_if_asked_to(engine):
    model = te.convert_model(Net(), _convert_ln=False)
    assert type(model.blocks[0].norm) is nn.LayerNorm
    assert type(model.blocks[0].linear) is engine.Linear
    model = te.convert_model(Net(), _convert_linear=False)
    assert type(model.blocks[0].norm) is engine.LayerNorm
    assert type(model.blocks[0].linear) is nn.Linear


def test_layers_of_others_stay(engine):
    class Mine(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(Mine(16, 16), nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm((2, 16)))
    kinds = [type(module) for module in model.modules()]
    te.convert_model(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_model_without_fitting_layers_is_named(engine, caplog):
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    accelerator.prepare(nn.Sequential(nn.Linear(5, 5)))
    assert "no linear layer of Sequential computes in fp8" in caplog.text


def test_a_checkpoint_continues_with_the_histories_of_the_layers(engine, tmp_path):
    data = rows(6)
    accelerator, model, optimizer = prepared()
    whole = [step(accelerator, model, optimizer, batch) for batch in data]

    accelerator, model, optimizer = prepared()
    before = [step(accelerator, model, optimizer, batch) for batch in data[:3]]
    accelerator.save_state(tmp_path / "state")
    histories = copy.deepcopy([block.linear.history for block in model.blocks])
    assert len(histories[0]) == 3

    accelerator, model, optimizer = prepared()
    accelerator.load_state(tmp_path / "state")
    assert [block.linear.history for block in model.blocks] == histories
    after = [step(accelerator, model, optimizer, batch) for batch in data[3:]]
    assert before + after == whole

    accelerator, model, optimizer = prepared()
    accelerator.load_state(tmp_path / "state")
    for block in model.blocks:
        block.linear.history.clear()
    assert [step(accelerator, model, optimizer, batch) for batch in data[3:]] != after, "histories matter"


def test_the_functions_for_scripts_that_convert_by_themselves(engine):
    model = te.convert_model(Net())
    x, _ = rows(1)[0]
    assert te.apply_fp8_autowrap(model, TERecipeKwargs(margin=3)) is model
    model(x)
    assert {(call["fp8"], call["recipe"].margin) for call in engine.calls} == {(True, 3)}
    engine.calls.clear()

    other = te.convert_model(Net())
    own = other.forward
    wrapped = te.contextual_fp8_autocast(own, "recipe")
    assert wrapped.__wrapped__ == own
    wrapped(other.eval(), x)
    wrapped(other.train(), x)
    assert [call["fp8"] for call in engine.calls] == [False] * 3 + [True] * 3


@pytest.mark.gpu
def test_the_real_engine_trains():
    """TransformerEngine on a GPU: a loss falls, names stay, and the plain layers come back."""
    module = pytest.importorskip(
        "transformer_engine.pytorch", reason="transformer-engine is not installed here"
    )
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    names = list(model.state_dict())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert any(isinstance(layer, module.Linear) for layer in model.modules())
    x = torch.randn(32, 64, device=accelerator.device)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert list(model.state_dict()) == names
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert not te.has_transformer_engine_layers(plain)
