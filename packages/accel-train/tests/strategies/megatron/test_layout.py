"""Where Megatron's tensors hold the model's values, with plain tensors: the oracle cuts and joins as Megatron does."""

import itertools
import types

import pytest
import torch
from torch import Tensor

from accel_train.strategies.megatron.families import FAMILIES, architecture_of
from accel_train.strategies.megatron.layout import Dims, FusedHeads, Gated, Heads, Vocabulary, WholeTensor
from accel_train.strategies.megatron.state import run_parts

HIDDEN, GROUPS, QUERIES, HEAD, VOCABULARY = 6, 4, 2, 3, 7


def dims(rank: int, size: int) -> Dims:
    return Dims(rank, size, VOCABULARY, GROUPS, QUERIES, HEAD)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def interleaved(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Group by group: its queries, its key, its value."""
    rest = queries.shape[1:]
    pieces = (
        queries.reshape(GROUPS, QUERIES * HEAD, *rest),
        keys.reshape(GROUPS, HEAD, *rest),
        values.reshape(GROUPS, HEAD, *rest),
    )
    return torch.cat(pieces, dim=1).reshape(-1, *rest)


def joined(rule, shares: list[Tensor], flat_cuts: int | None = None) -> dict[str, Tensor]:
    """The model's tensors, put together from what the ranks hold; every element exactly once."""
    whole: dict[str, Tensor] = {}
    counted: dict[str, Tensor] = {}
    for rank, share in enumerate(shares):
        place = dims(rank, len(shares))
        if flat_cuts is None:
            found = [rule.parts(share, place)]
        else:  # runs of the flattened tensor, as a distributed optimizer has them
            flat = share.reshape(-1)
            edges = torch.linspace(0, flat.numel(), flat_cuts + 1).long().tolist()
            found = [
                run_parts(rule, place, share.shape, flat[start:end], start)
                for start, end in itertools.pairwise(edges)
            ]
        for named in found:
            for name, parts in named.items():
                for part in parts:
                    if part.is_empty:
                        continue
                    box = tuple(
                        slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True)
                    )
                    whole.setdefault(name, torch.zeros(part.shape))[box] = part.tensor
                    counted.setdefault(name, torch.zeros(part.shape))[box] += 1
    assert all(bool((count == 1).all()) for count in counted.values())
    return whole


@pytest.mark.parametrize("cuts", [None, 1, 5, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rest", [(HIDDEN,), ()], ids=["weight", "bias"])
def test_heads(rest, ranks, cuts):
    size = GROUPS * QUERIES * HEAD
    queries, keys, values = (
        numbered(size, *rest),
        1000 + numbered(size // 2, *rest),
        2000 + numbered(size // 2, *rest),
    )
    shares = list(interleaved(queries, keys, values).chunk(ranks))
    found = joined(Heads(("q", "k", "v")), shares, cuts)
    torch.testing.assert_close(found, {"q": queries, "k": keys, "v": values}, rtol=0, atol=0)
    if QUERIES == 1 or not rest:
        return
    one = joined(FusedHeads("c", transposed=True), shares, cuts)
    torch.testing.assert_close(one, {"c": torch.cat([queries, keys, values]).t()}, rtol=0, atol=0)


@pytest.mark.parametrize("cuts", [None, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gated(ranks, cuts):
    gate, up = numbered(8, HIDDEN), 100 + numbered(8, HIDDEN)
    shares = [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    torch.testing.assert_close(joined(Gated(("g", "u")), shares, cuts), {"g": gate, "u": up}, rtol=0, atol=0)


@pytest.mark.parametrize("cuts", [None, 3])
@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (1, 2), (None, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_whole(dim, ranks, transposed, cuts):
    values = numbered(8, HIDDEN)
    shares = [values] if dim is None else [piece.contiguous() for piece in values.chunk(ranks, dim)]
    expected = values.t() if transposed else values
    found = joined(WholeTensor("w", dim, transposed), shares, cuts)
    torch.testing.assert_close(found, {"w": expected}, rtol=0, atol=0)


@pytest.mark.parametrize("cuts", [None, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_of_the_vocabulary_is_nobodys(ranks, cuts):
    table = numbered(VOCABULARY, HIDDEN)
    padded = -(-VOCABULARY // ranks) * ranks
    shares = list(torch.cat([table, torch.full((padded - VOCABULARY, HIDDEN), -1.0)]).chunk(ranks))
    torch.testing.assert_close(joined(Vocabulary("t"), shares, cuts), {"t": table}, rtol=0, atol=0)


def test_parts_are_views():
    """What is written into them is in Megatron's tensor."""
    share = torch.zeros(GROUPS * (QUERIES + 2) * HEAD, HIDDEN)
    for parts in Heads(("q", "k", "v")).parts(share, dims(0, 1)).values():
        for part in parts:
            part.tensor.fill_(1)
    assert bool((share == 1).all())


# Configurations, without transformers


def llama(**changed):
    values = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": False, "vocab_size": 10, "eos_token_id": [7, 8],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    return types.SimpleNamespace(**{**values, **changed})


def test_an_architecture_in_megatrons_words():
    found = architecture_of(llama(mlp_bias=True, attention_bias=True))
    assert found.gpt["rotary_base"] == 500.0
    assert (found.transformer["add_bias_linear"], found.transformer["num_query_groups"]) == (True, 2)
    assert (found.heads, found.eod_token, found.tied) == ((2, 2, 4), 7, None)
    assert found.top["output_layer.weight"] == Vocabulary("lm_head.weight")
    assert found.layer(2)["mlp.linear_fc2.weight"] == WholeTensor(
        "model.layers.2.mlp.down_proj.weight", dim=1
    )
    tied = architecture_of(llama(tie_word_embeddings=True, eos_token_id=None))
    assert tied.top["output_layer.weight"] == Vocabulary("model.embed_tokens.weight")
    assert (tied.eod_token, tied.gpt["share_embeddings_and_output_weights"]) == (None, True)


def test_llama_3_rope():
    rope = {
        "rope_type": "llama3", "rope_theta": 1e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    found = architecture_of(llama(rope_parameters=rope)).gpt
    assert (found["rope_scaling"], found["rope_scaling_factor"], found["rotary_base"]) == (True, 4.0, 1e5)
    with pytest.raises(ValueError, match=r"rope_parameters.*expected rope_type 'default', or 'llama3'"):
        architecture_of(llama(rope_parameters={**rope, "low_freq_factor": 2.0}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "t5"}, "of type 't5'.*built for: gpt2, llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "no model of transformers"),
        ({"hidden_act": "quick_gelu"}, "activation is 'quick_gelu'.*known: silu"),
        ({"attention_bias": True}, "attention_bias=True.*mlp_bias"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
    ],
)
def test_what_megatron_cannot_compute_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        architecture_of(llama(**changed))


def test_another_family():
    from accel_train import add_model_config_to_megatron_parser

    @add_model_config_to_megatron_parser("llamoid")
    def parse(config):
        return FAMILIES["llama"](config)

    try:
        assert architecture_of(llama(model_type="llamoid")).vocabulary == 10
    finally:
        del FAMILIES["llamoid"]
