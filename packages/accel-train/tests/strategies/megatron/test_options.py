"""Megatron-core's options from the plugin, as plain mappings: no megatron-core is needed."""

import dataclasses

import pytest
import torch
from torch import nn

from accel_train import MegatronLMPlugin
from accel_train.strategies.megatron.families import Architecture
from accel_train.strategies.megatron.options import (
    divide_other,
    gradient_options,
    optimizer_options,
    provided_options,
    transformer_options,
)


def architecture(**changed):
    transformer = {
        "num_layers": 4, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 2, "ffn_hidden_size": 12,
        "hidden_dropout": 0.1, "attention_dropout": 0.2, **changed,
    }  # fmt: skip
    gpt = {"position_embedding_type": "rope"}
    return Architecture(transformer, gpt, 10, {}, lambda number: {}, None, None)


def options(compute=None, model=None, **fields):
    return transformer_options(MegatronLMPlugin(**fields), model or architecture(), compute)


def test_every_field_reaches_megatron():
    found = options(
        tp_degree=2, pp_degree=2, sequence_parallelism=True, decoder_last_pipeline_num_layers=1,
        attention_dropout=0.0, hidden_dropout=0.3, attention_softmax_in_fp32=False, recompute_granularity="full",
        recompute_method="block", recompute_num_layers=1,
    )  # fmt: skip
    expected = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True,
        "num_layers_in_last_pipeline_stage": 1, "attention_dropout": 0.0, "hidden_dropout": 0.3,
        "attention_softmax_in_fp32": False, "recompute_granularity": "full", "recompute_method": "block",
        "recompute_num_layers": 1, "params_dtype": torch.float32, "bf16": False, "num_layers": 4,
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert found["context_parallel_size"] == 1
    assert options(context_parallel_size=3)["context_parallel_size"] == 3


def test_unset_fields_leave_the_model_and_megatron_alone():
    found = options()
    assert (found["hidden_dropout"], found["attention_dropout"]) == (0.1, 0.2)
    assert "attention_softmax_in_fp32" not in found
    assert "recompute_granularity" not in found
    assert options(recompute_activations=True)["recompute_granularity"] == "selective"
    low = options(torch.bfloat16)
    assert (low["bf16"], low["params_dtype"], low["pipeline_dtype"]) == (True, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "model", "message"),
    [
        ({"tp_degree": 3}, {}, "tp_degree=3 does not divide the model's 8 attention heads"),
        ({"tp_degree": 8}, {}, "tp_degree=8 does not divide the model's 4 heads of keys"),
        ({"tp_degree": 4}, {"ffn_hidden_size": 6}, "does not divide the model's 6 elements"),
        ({"pp_degree": 3}, {}, "4 layers cannot be divided evenly among pp_degree=3"),
        ({"pp_degree": 2, "decoder_last_pipeline_num_layers": 4}, {}, "of which the last stage has 4"),
        ({"use_rotary_position_embeddings": False}, {}, "the model has them"),
        ({}, {"embedding_dropout": 0.5}, r"drops 0.5 of its embedding and 0.1.*hidden_dropout="),
    ],
)
def test_what_does_not_fit_the_model(fields, model, message):
    with pytest.raises(ValueError, match=message):
        options(model=architecture(**model), **fields)


def test_of_a_model_of_the_scripts_own_only_what_is_set_must_agree():
    assert provided_options(MegatronLMPlugin(attention_dropout=0.5)) == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "attention_dropout": 0.5,
    }
    for name in ("eod_mask_loss", "return_logits", "use_rotary_position_embeddings"):
        with pytest.raises(ValueError, match=f"^{name}.*converted from transformers"):
            provided_options(MegatronLMPlugin(**{name: True}))


def optimizer(kind=torch.optim.AdamW, **more):
    return kind(nn.Linear(1, 1).parameters(), lr=0.5, **more)


def test_optimizers():
    plugin = MegatronLMPlugin(gradient_clipping=0.7, use_distributed_optimizer=True)
    found = optimizer_options(plugin, optimizer(weight_decay=0.1), torch.bfloat16)
    assert found == {
        "optimizer": "adam", "lr": 0.5, "weight_decay": 0.1, "clip_grad": 0.7, "use_distributed_optimizer": True,
        "bf16": True, "params_dtype": torch.bfloat16,
    }  # fmt: skip
    assert gradient_options(plugin)["use_distributed_optimizer"]
    plain = MegatronLMPlugin(gradient_clipping=0)
    assert optimizer_options(plain, optimizer(torch.optim.SGD), None)["optimizer"] == "sgd"
    assert optimizer_options(plain, optimizer(torch.optim.Adam), None)["clip_grad"] == 0
    with pytest.raises(ValueError, match=r"Adafactor.*treat every element alone"):
        optimizer_options(plain, optimizer(torch.optim.Adafactor), None)
    with pytest.raises(
        ValueError, match=r"divides the states of torch.optim.AdamW, and the optimizer is SGD"
    ):
        optimizer_options(plugin, optimizer(torch.optim.SGD), None)


@dataclasses.dataclass
class Layers:
    softmax_scale: float = 1.0
    deterministic_mode: bool = False


@dataclasses.dataclass
class Steps:
    adam_eps: float = 1e-8
    deterministic_mode: bool = False


def test_other_arguments_go_where_they_belong():
    kinds = {"transformer": Layers, "optimizer": Steps}
    other = {"softmax_scale": 2.0, "deterministic_mode": True}
    found = divide_other(MegatronLMPlugin(other_megatron_args=other), kinds)
    assert found == {"transformer": other, "optimizer": {"deterministic_mode": True}}
    with pytest.raises(ValueError, match=r"'softmax_scal'.*Did you mean 'softmax_scale'"):
        divide_other(MegatronLMPlugin(other_megatron_args={"softmax_scal": 1}), kinds)
    with pytest.raises(ValueError, match="'sequence_parallel', which sequence_parallelism decides"):
        divide_other(MegatronLMPlugin(other_megatron_args={"sequence_parallel": True}), kinds)
