"""Attention masks under context parallelism."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_train.strategies.context_parallel import attach_context_parallel_hooks


class Attention(nn.Module):
    def forward(self, x, attention_mask=None, is_causal=None):
        return attention_mask, is_causal


class Model(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention()})])


def test_self_attention_becomes_causal_and_other_attention_stays():
    model = Model(layer_types=["full_attention"])
    attach_context_parallel_hooks(model)
    layer, x, mask = model.layers[0], torch.ones(1), torch.ones(1)
    assert layer["self_attn"](x, attention_mask=mask) == (None, True)
    assert layer["self_attn"](x) == (None, None)
    assert layer["cross_attn"](x, attention_mask=mask) == (mask, None)


def test_the_hook_comes_before_others_and_leaves_the_callers_arguments():
    model, seen = Model(), []
    attention = model.layers[0]["self_attn"]
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    attach_context_parallel_hooks(model)
    arguments = {"attention_mask": torch.ones(1)}
    attention(torch.ones(1), **arguments)
    assert seen == [{"attention_mask": None, "is_causal": True}]
    assert arguments["attention_mask"] is not None


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]},
            "chunked_attention, sliding_attention",
        ),
        ({"sliding_window": 4096}, "sliding_attention"),
        ({"get_text_config": lambda: SimpleNamespace(layer_types=["linear_attention"])}, "linear_attention"),
    ],
)
def test_models_that_need_their_mask_are_refused(config, kinds):
    with pytest.raises(
        ValueError, match=f"Model has attention layers of type {kinds}, which need their mask"
    ):
        attach_context_parallel_hooks(Model(**config))


def test_models_without_a_configuration():
    model = nn.ModuleDict({"self_attn": Attention()})
    attach_context_parallel_hooks(model)
    assert model["self_attn"](1, attention_mask=2) == (None, True)
