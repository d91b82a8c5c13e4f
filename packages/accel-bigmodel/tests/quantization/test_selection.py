from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    BnbQuantizationConfig,
    ModelHook,
    QuantizationError,
    TorchAoQuantizationConfig,
    add_hook_to_module,
    get_keys_to_not_convert,
    init_empty_weights,
)
from accel_bigmodel.quantization.selection import is_named, kept_in_float32, select_layers, warn_of_unknown


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def names(model, **options):
    return [
        layer.names for layer in select_layers(model, BnbQuantizationConfig(load_in_8bit=True, **options))
    ]


INNER = [(f"blocks.{i}.{part}",) for i in range(2) for part in ("up", "down")]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_by_default_the_output_and_what_is_tied_are_kept(tied, meta):
    with init_empty_weights() if meta else torch.no_grad():
        model = Model(tied)
    assert get_keys_to_not_convert(model) == (["lm_head", "embed"] if tied else ["lm_head"])
    assert names(model) == INNER


def test_a_tied_weight_is_kept_whatever_is_skipped():
    assert names(Model(tied=True), skip_modules=[]) == INNER
    assert names(Model(), skip_modules=[]) == [*INNER, ("lm_head",)]


def test_two_linear_layers_that_are_tied_are_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [
        layer.names for layer in select_layers(model, TorchAoQuantizationConfig("int8", skip_modules=[]))
    ] == [("2",)]


def test_a_module_in_two_places_is_one_layer():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(4, 4), "c": shared})
    assert names(model, skip_modules=[]) == [("a", "c"), ("b",)]
    assert names(model, skip_modules=["c"]) == [("b",)]


def test_the_body_of_a_transformers_model_has_no_output_layer():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    config = transformers.LlamaConfig(**sizes)
    assert get_keys_to_not_convert(transformers.LlamaModel(config)) == []
    assert get_keys_to_not_convert(transformers.LlamaForCausalLM(config)) == ["lm_head"]
    with init_empty_weights():
        tied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    assert get_keys_to_not_convert(tied) == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("lm_head", ["lm_head"], True),
        ("model.lm_head", ["lm_head"], True),
        ("lm_head.proj", ["lm_head"], True),
        ("xlm_head", ["lm_head"], False),
        ("blocks.1.up", ["blocks.1"], True),
        ("blocks.10.up", ["blocks.1"], False),
        ("a.b.c", ["a.c"], False),
        ("a", [], False),
    ],
)
def test_names_match_whole_parts_between_dots(name, wanted, expected):
    assert is_named(name, wanted) is expected


def test_what_stays_in_float32_is_not_quantised():
    assert names(Model(), keep_in_fp32_modules=["down"]) == [("blocks.0.up",), ("blocks.1.up",)]


def test_what_transformers_lists_stays_in_float32():
    """T5 converts what goes into ``wo`` to the dtype of its weight, which is uint8 with 4 bits."""
    model = Model()
    model._keep_in_fp32_modules = ["down"]
    model._keep_in_fp32_modules_strict = {"attention"}
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert kept_in_float32(model, config) == ["attention", "down"]
    assert names(model) == [("blocks.0.up",), ("blocks.1.up",)]
    assert names(model, keep_in_fp32_modules=[]) == INNER


def test_subclasses_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert names(nn.ModuleDict({"a": Scaled(4, 4), "b": nn.Linear(4, 4)}), skip_modules=[]) == [("b",)]


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 4), nn.Sequential(nn.Conv1d(2, 2, 1)), nn.Sequential(nn.Linear(4, 4))]
)
def test_nothing_to_quantise_is_an_error(model):
    with pytest.raises(QuantizationError, match=r"has no layer to quantise.*skip_modules"):
        names(model)


@pytest.mark.parametrize(
    "hook",
    [
        lambda layer: layer.register_forward_hook(print),
        lambda layer: layer.register_full_backward_pre_hook(print),
        lambda layer: add_hook_to_module(layer, ModelHook()),
    ],
)
def test_hooks_would_be_lost(hook):
    model = Model()
    hook(model.blocks[1].up)
    with pytest.raises(QuantizationError, match=r"blocks\.1\.up have hooks.*after quantising"):
        names(model)


def test_a_name_that_nothing_has_is_said():
    config = TorchAoQuantizationConfig(
        "int8", skip_modules=["lm_head", "lm_haed"], keep_in_fp32_modules=["up"]
    )
    with pytest.warns(UserWarning, match="contain lm_haed, but no module of Model has such a name"):
        warn_of_unknown(Model(), config)
