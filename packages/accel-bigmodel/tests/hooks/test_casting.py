"""Small dtypes between calls, larger ones during them."""

import copy
import warnings

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    OffloadError,
    SequentialHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

SMALL, LARGE = torch.float8_e4m3fn, torch.bfloat16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.query(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(8, 2)
        self.embedding = nn.Embedding(4, 8)

    def forward(self, x):
        x = self.conv(x.mT).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().to(LARGE).eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(LARGE)


def cast(model):
    return {name for name, tensor in model.named_parameters() if tensor.dtype == SMALL}


def both(*names):
    return {f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")}


def rounded(model):
    """What the model computes when linear and convolutional layers hold what the small dtype can say."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(SMALL).to(parameter.dtype)
    return model


def test_weights_are_small_between_calls_and_large_during_them(model, x):
    expected, own = rounded(model)(x), dict(model.named_parameters())
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    assert cast(model) == both("conv", "blocks.0.query", "blocks.1.query", "head")
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert cast(model) == both("conv", "blocks.0.query", "blocks.1.query", "head")
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"skip_modules_pattern": ["blocks"]}, ["conv", "head"]),
        ({"skip_modules_pattern": "blocks"}, ["conv", "head"]),
        ({"skip_modules_pattern": (r"^blocks\.1\.", "conv|head")}, ["blocks.0.query"]),
        ({"skip_modules_pattern": "x"}, ["conv", "blocks.0.query", "blocks.1.query", "head"]),
        ({"skip_modules_classes": (nn.Conv1d, Attention)}, ["head"]),
        ({"skip_modules_classes": nn.Linear}, ["conv"]),
        ({"skip_modules_classes": (Model,)}, []),
    ],
)
def test_what_is_left_alone(model, options, names):
    attach_layerwise_casting_hooks(model, SMALL, LARGE, **options)
    assert cast(model) == both(*names)


@pytest.mark.parametrize(
    "kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
)
def test_all_convolutions(kind):
    module = kind(2, 2, 1)
    attach_layerwise_casting_hooks(module, torch.float16, torch.float32)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float16}
    size = (1, 2) + (3,) * int(kind.__name__[-2])
    assert module(torch.ones(size)).dtype == torch.float32


def test_weights_are_small_again_after_an_exception(model, x):
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    expected = model(x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.head(torch.ones(1, 3, dtype=LARGE))
    assert model.head.weight.dtype == SMALL
    assert torch.equal(model(x), expected)


def test_removing_gives_the_dtypes_back(model, x):
    expected = rounded(model)(x)
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    remove_hook_from_submodules(model)
    assert {tensor.dtype for tensor in model.parameters()} == {LARGE}
    assert torch.equal(model(x), expected)


def test_gradients_pass_to_the_inputs_and_are_refused_for_the_weights(model, x):
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(rounded(model)(x).sum(), x)
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)
    with pytest.raises(OffloadError, match="gradient was computed for"):
        model(x).sum().backward()


def test_a_layer_that_calls_itself(x):
    class Twice(nn.Linear):
        def forward(self, x, again=True):
            return super().forward(self(x, again=False) if again else x)

    module = Twice(8, 8).to(LARGE)
    expected = rounded(module)(x)
    add_hook_to_module(module, LayerwiseCastingHook(SMALL, LARGE, non_blocking=False))
    assert torch.equal(module(x), expected)
    assert module.weight.dtype == SMALL


def test_a_layer_that_is_tied_to_one_left_alone_is_left_alone(model):
    model.head = nn.Linear(8, 4).to(LARGE)
    model.head.weight = model.embedding.weight
    with pytest.warns(UserWarning, match="head keep their dtype, because they share parameters"):
        attach_layerwise_casting_hooks(model, SMALL, LARGE)
    assert model.head.weight is model.embedding.weight
    assert model.embedding(torch.tensor([1])).dtype == LARGE
    assert model.conv.weight.dtype == SMALL


def test_layers_tied_to_each_other_stay_tied(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(LARGE)
    model[1].weight = model[0].weight
    expected = rounded(model)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_layerwise_casting_hooks(model, SMALL, LARGE)
    assert torch.equal(model(x), expected)
    remove_hook_from_submodules(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype == LARGE


def test_layers_that_torch_never_calls_are_left_alone():
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(4, 4)).eval()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    assert model[1].weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        assert model(torch.ones(1, 3, 4)).dtype == torch.float32


def test_only_floating_tensors_are_cast():
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.ones(1, dtype=torch.int64))
    module.register_buffer("mean", torch.ones(1))
    attach_layerwise_casting_hooks(module, torch.float16, torch.float32)
    assert (module.count.dtype, module.mean.dtype) == (torch.int64, torch.float16)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((torch.int8, LARGE), "storage_dtype must be a floating-point dtype"),
        ((SMALL, "bfloat16"), "compute_dtype must be a floating-point dtype"),
        ((torch.float4_e2m1fn_x2, LARGE), "storage_dtype: PyTorch cannot convert weights to"),
    ],
)
def test_dtypes_that_weights_cannot_have_are_refused(model, dtypes, message):
    with pytest.raises(ValueError, match=message):
        attach_layerwise_casting_hooks(model, *dtypes)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("first", ["cast", "offload"])
def test_offloaded_and_cast(x, first):
    module = nn.Linear(8, 8).to(LARGE)
    plain, expected, own = module(x), rounded(module)(x), module.weight
    hooks = [LayerwiseCastingHook(SMALL, LARGE, False), AlignDevicesHook("cpu", offload=True)]
    for hook in hooks if first == "cast" else hooks[::-1]:
        add_hook_to_module(module, hook, append=True)
    for _ in range(2):
        assert torch.equal(module(x), expected)
        assert module.weight.is_meta
        assert module.weight.dtype == SMALL
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3, dtype=LARGE))
    assert module.weight.is_meta
    remove_hook_from_module(module)
    assert module.weight is own
    assert module.weight.dtype == LARGE
    # What was put aside before it was cast has kept its digits.
    assert torch.equal(module(x), expected if first == "cast" else plain)


def test_other_hooks_are_kept(model):
    add_hook_to_module(model.head, ModelHook())
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    assert isinstance(model.head._hf_hook, SequentialHook)


def test_copies_are_independent(model, x):
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    expected = model(x)
    other = copy.deepcopy(model)
    other.head.weight.data.zero_()
    assert torch.equal(model(x), expected)
    assert torch.equal(other(x), other.head.bias.to(LARGE).expand(2, 3, 2))


def test_gradients_that_are_there_follow():
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    attach_layerwise_casting_hooks(module, torch.float16, torch.float32)
    assert module.weight.grad.dtype == torch.float16


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_around(model, x):
    attach_layerwise_casting_hooks(model, SMALL, LARGE)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    assert model.head.weight.dtype == SMALL


def test_one_hook_for_several_layers(x):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(LARGE)
    hook = LayerwiseCastingHook(SMALL, LARGE, False)
    expected = rounded(layers)(x)
    for layer in layers:
        add_hook_to_module(layer, hook)
    assert cast(layers) == both("0", "1")
    assert torch.equal(layers(x), expected)
    remove_hook_from_module(layers[0])
    assert cast(layers) == both("1")
    assert torch.equal(layers(x), expected)


def test_tensors_that_come_and_go(x):
    layer = nn.Linear(8, 8, bias=False).to(LARGE)
    expected = rounded(nn.Sequential(layer))(x)
    add_hook_to_module(layer, LayerwiseCastingHook(SMALL, LARGE, False))
    layer.bias = nn.Parameter(torch.zeros(8, dtype=SMALL))
    assert torch.equal(layer(x), expected)
    layer.bias = None
    assert torch.equal(layer(x), expected)
    remove_hook_from_module(layer)
    assert layer.weight.dtype == LARGE
