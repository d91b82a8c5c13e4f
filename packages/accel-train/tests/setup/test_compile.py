"""Compiling prepared models: whole, or the repeated blocks of them."""

import copy

import pytest
import torch
from torch import nn

from accel_train import Accelerator, TorchDynamoPlugin
from accel_train.setup.compile import compile_model, compile_regions
from accel_train.setup.unwrap import has_compiled_regions
from accel_train.strategies.wrappers import is_compiled_module


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(3)])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return sum(head(x) for head in self.heads)


def test_regional_compilation_compiles_each_kind_of_block_once():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(3, 4)
    expected = model(x)
    names = list(model.state_dict())
    compiled = compile_regions(module=model, backend=backend)  # the name that accelerate gives it
    torch.testing.assert_close(compiled(x), expected)
    compiled(x)
    assert len(graphs) == 2
    assert list(compiled.state_dict()) == names
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in compiled.parameters())


def test_compiling_under_bf16_keeps_the_forward_wrapper():
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    model = accelerator.prepare(make().eval())
    x = torch.randn(2, 4)
    out = model(x)
    assert out.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(out, make().eval()(x).float())


class Recorder:
    """A backend that counts graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def test_nothing_is_compiled_without_a_backend():
    model = make()
    assert compile_model(model, TorchDynamoPlugin()) is model
    assert not has_compiled_regions(model)


def test_options_are_handed_to_torch(monkeypatch):
    handed = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: handed.append(options) or model)
    compile_model(make(), TorchDynamoPlugin(backend="EAGER"))
    plugin = TorchDynamoPlugin(
        backend="inductor", mode="max-autotune", fullgraph=True, dynamic=True, disable=True
    )
    compile_model(make(), plugin)
    assert handed[0]["backend"] == "eager"
    assert handed[1] == {
        "backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": True, "disable": True,
    }  # fmt: skip


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("how", ["whole", "in place", "a part"])
def test_what_the_script_compiled_stays_as_it_is(how, regional):
    model = Blocks()
    if how == "whole":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.embed = torch.compile(model.embed, backend="eager")
    calls = [getattr(module, "_compiled_call_impl", None) for module in model.modules()]
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    assert compile_model(model, plugin) is model
    assert calls == [getattr(module, "_compiled_call_impl", None) for module in model.modules()]


def test_a_regional_plugin_compiles_blocks_and_returns_the_model_itself():
    model = Blocks()
    x = torch.randn(3, 4)
    expected = model(x)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    assert compile_model(model, plugin) is model
    assert not is_compiled_module(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == [
        *(f"blocks.{number}" for number in range(5)),
        *(f"heads.{number}" for number in range(3)),
    ]
    assert torch.equal(model(x), expected)


class Plain(nn.Module):
    """A class of the script's own, without blocks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("build", [make, Plain, lambda: nn.Linear(4, 1)], ids=["Sequential", "own", "Linear"])
def test_a_model_without_repeated_blocks_is_compiled_whole_and_in_place(build):
    torch._dynamo.reset()
    model, backend = build().eval(), Recorder()
    names, x = list(model.state_dict()), torch.randn(2, 4)
    expected = model(x)
    assert compile_regions(model, backend=backend) is model
    assert torch.equal(model(x), expected)
    assert backend.graphs == 1
    assert list(model.state_dict()) == names
    assert not has_compiled_regions(copy.deepcopy(model)), "copies and pickles leave the compiler behind"


def test_two_models_of_one_kind_do_not_share_weights():
    torch._dynamo.reset()
    backend = Recorder()
    models = [Blocks(), Blocks()]
    x = torch.randn(3, 4)
    expected = [model(x) for model in models]
    for model in models:
        compile_regions(model, backend=backend)
    assert all(torch.equal(model(x), out) for model, out in zip(models, expected, strict=True))
