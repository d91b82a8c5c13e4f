"""FLOPs of a step: the formula against torch's counter, and the counter against arithmetic by hand."""

import pytest
import torch
from torch import nn

from accel_train import OptionError, flops_per_token, measured_flops


def llama(tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_agrees_with_torchs_count_of_a_llama(tied):
    model, rows, length = llama(tied), 2, 64
    ids = torch.randint(0, 97, (rows, length))
    counted = measured_flops(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert flops_per_token(model, length) * rows * length == pytest.approx(counted, rel=0.02)


def test_a_linear_layer_is_counted_by_hand():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    backward = 2 * 5 * (8 * 16 + 2 * 16 * 4)  # the input needs no gradient
    assert measured_flops(lambda: model(x).sum().backward()) == forward + backward


def test_sizes_can_be_given_and_causal_attention_counts_half():
    model = nn.Linear(10, 10, bias=False)
    sizes = {"layers": 3, "heads": 2, "head_size": 4}
    assert flops_per_token(model, 7, **sizes) == 6 * 100 + 12 * 3 * 2 * 4 * 7
    assert flops_per_token(model, 7, causal=True, **sizes) == 6 * 100 + 6 * 3 * 2 * 4 * 7
    assert flops_per_token(model, 7, parameters=50, **sizes) == 6 * 50 + 12 * 3 * 2 * 4 * 7


def test_missing_sizes_are_named():
    with pytest.raises(OptionError, match=r"needs layers .* got None from Linear.config.num_hidden_layers"):
        flops_per_token(nn.Linear(2, 2), 8)
    with pytest.raises(OptionError, match="sequence_length must be positive, got 0"):
        flops_per_token(nn.Linear(2, 2), 0, layers=1, heads=1, head_size=1)
    with pytest.raises(OptionError, match="found no operation whose FLOPs torch knows"):
        measured_flops(lambda: torch.ones(3).sum())
