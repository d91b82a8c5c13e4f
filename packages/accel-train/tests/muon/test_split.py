"""Which parameters go to Muon, in plain models and in those of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_train import split_for_muon
from accel_train.errors import IncompatibleOptionsError, OptionError


def small():
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(12, 6),
            "layers": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(6, 9), "norm": nn.LayerNorm(9), "output": nn.Linear(9, 6)})
                for _ in range(2)
            ),
            "conv": nn.Conv1d(3, 6, 2),
            "gate": nn.Linear(6, 1),
            "lm_head": nn.Linear(6, 12),
        }
    )


def of(split):
    return {item.name for item in split.muon}


HIDDEN = {f"layers.{n}.{name}.weight" for n in range(2) for name in ("up", "output")}


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw():
    model = small()
    split = split_for_muon(model)
    assert of(split) == HIDDEN
    reasons = {item.name: (item.reason, item.is_vector) for item in split.adamw}
    assert reasons["embed.weight"] == ("embedding", False)
    assert reasons["lm_head.weight"] == ("output head", False)
    assert reasons["conv.weight"] == ("convolution", False)
    assert reasons["gate.weight"] == ("vector", True)
    assert reasons["layers.0.norm.weight"] == ("vector", True)
    assert {id(item.parameter) for item in split.parameters} == {id(p) for p in model.parameters()}


def test_the_table_joins_layers():
    lines = str(split_for_muon(small())).splitlines()
    assert any(line.split() == ["Muon", "2", "layers.*.up.weight", "9", "x", "6", "matrix"] for line in lines)
    assert any(
        line.split() == ["AdamW", "1", "lm_head.weight", "12", "x", "6", "output", "head"] for line in lines
    )


def test_a_head_tied_to_the_embedding_goes_with_it():
    model = small()
    model["tail"] = nn.Linear(6, 12)
    model["tail"].weight = model["embed"].weight
    split = split_for_muon(model)
    assert of(split) == HIDDEN
    assert sum(item.reason == "embedding" for item in split.parameters) == 1


def test_frozen_parameters_are_left_out():
    model = small()
    model["layers"][0].requires_grad_(False)
    assert of(split_for_muon(model)) == {name for name in HIDDEN if ".1." in name}


def test_names_and_functions_choose_otherwise():
    model = small()
    assert of(split_for_muon(model, exclude="layers.0.*")) == {n for n in HIDDEN if ".1." in n}
    assert of(split_for_muon(model, include=["lm_head.weight", "embed.*"])) == HIDDEN | {
        "lm_head.weight", "embed.weight",
    }  # fmt: skip
    wide = split_for_muon(model, exclude=lambda name, parameter: parameter.shape[0] == 9)
    assert of(wide) == {name for name in HIDDEN if "output" in name}
    assert next(item for item in wide.adamw if item.name == "layers.0.norm.weight").is_vector


def test_convolutions_are_matrices_if_asked():
    convolutions = split_for_muon(small(), convolutions=True)
    assert of(convolutions) == HIDDEN | {"conv.weight"}
    assert next(item for item in convolutions.muon if item.name == "conv.weight").flatten


def test_wrappers_do_not_change_names():
    compiled = torch.compile(small())
    assert of(split_for_muon(compiled)) == HIDDEN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "layer.*"}, r"exclude='layer\.\*' matches no trained parameter"),
        ({"include": "*norm.weight"}, r"include= names 'layers\.0\.norm\.weight' of shape \[9\]"),
    ],
)
def test_a_name_that_means_nothing_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        split_for_muon(small(), **options)


def test_a_parameter_in_both_is_refused():
    with pytest.raises(
        IncompatibleOptionsError, match=r"'embed\.weight' is named by include= and by exclude="
    ):
        split_for_muon(small(), include="embed.*", exclude="*.weight")


def transformers_model(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "head_dim": 8,
    }  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
        return transformers.GPT2LMHeadModel(config)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=3, **sizes))
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(num_experts=3, moe_intermediate_size=12, **sizes)
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=3, **sizes))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_models_of_transformers(kind):
    split = split_for_muon(transformers_model(kind))
    transposed = {item.name.rpartition("mlp.")[2] for item in split.muon if item.transposed}
    stacked = {item.name.rpartition(".")[2] for item in split.muon if item.parameter.dim() == 3}
    vectors = {
        item.name.rpartition(".")[2] for item in split.adamw if item.is_vector and item.parameter.dim() > 1
    }
    assert {item.reason for item in split.adamw} <= {"embedding", "output head", "vector"}
    if kind == "gpt2":
        assert {"c_fc.weight", "c_proj.weight"} <= transposed
        assert not stacked
    else:
        assert stacked == {"gate_up_proj", "down_proj"}
        assert transposed == ({"experts.gate_up_proj", "experts.down_proj"} if kind == "gpt_oss" else set())
    assert vectors == ({"gate_up_proj_bias", "down_proj_bias"} if kind == "gpt_oss" else set())
