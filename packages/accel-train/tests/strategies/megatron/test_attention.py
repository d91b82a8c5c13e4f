"""Attention in Megatron's layers by PyTorch's kernels, compared with scores that are written out."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_train.strategies.megatron.attention import FusedAttention, attended
from accel_train.strategies.megatron.context import ContextPart
from testkit import worlds

SCALE = 1 / math.sqrt(8)
CAUSAL, PADDING = SimpleNamespace(name="causal"), SimpleNamespace(name="padding")


def megatron_config(**changed):
    return SimpleNamespace(
        **{
            "kv_channels": 8,
            "attention_dropout": 0.0,
            "sequence_parallel": False,
            "window_size": None,
            **changed,
        }
    )


def attention(mask_type=CAUSAL, **changed):
    return FusedAttention(megatron_config(**changed), 1, mask_type, "self", None)


def inputs(length=6, samples=3, heads=4, groups=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def make(count):
        return torch.randn(length, samples, count, 8, dtype=dtype, generator=generator, requires_grad=True)

    return make(heads), make(groups), make(groups)


def written_out(query, key, value, masked, scale=SCALE):
    """Position by position and head by head; `masked`: (samples, positions, positions), True is not attended to."""
    length, samples, heads, _ = query.shape
    times = heads // key.shape[2]
    output = torch.zeros_like(query)
    for sample in range(samples):
        for head in range(heads):
            for place in range(length):
                seen = [other for other in range(length) if not masked[sample, place, other]]
                scores = (key[seen, sample, head // times] @ query[place, sample, head]) * scale
                output[place, sample, head] = scores.softmax(0) @ value[seen, sample, head // times]
    return output.flatten(2)


def compare(module, given, mask, masked, **how):
    found = module(*given, mask)
    torch.testing.assert_close(found, written_out(*given, masked, **how))
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), given)
    expected = torch.autograd.grad((written_out(*given, masked, **how) * weights).sum(), given)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_causal(groups):
    later = torch.ones(6, 6).triu(1).bool().expand(3, 6, 6)
    compare(attention(), inputs(groups=groups), None, later)


@pytest.mark.parametrize("groups", [4, 2])
def test_padding(groups):
    mask = torch.ones(6, 6).triu(1).bool() | torch.zeros(3, 1, 6, 6).bool()
    mask[1, :, :, 4:] = True
    mask[2, :, :, 1] = True
    compare(attention(), inputs(groups=groups), mask, mask[:, 0])


def test_padding_before_a_text_gives_numbers():
    mask = torch.ones(6, 6).triu(1).bool() | torch.zeros(3, 1, 6, 6).bool()
    mask[1, :, :, :2] = True
    kept = attended(mask)
    assert kept[1, 0, :2].all(), "what may attend to nothing attends to everything"
    assert torch.equal(kept[1, 0, 2:], ~mask[1, 0, 2:])
    given = inputs()
    found = attention()(*given, mask)
    compare(attention(), given, mask, ~kept[:, 0])
    for gradient in torch.autograd.grad(found[2:].sum(), given):
        assert not gradient[:2, 1].any(), "nothing attends to padding"


def test_without_a_mask_other_layers_attend_to_everything():
    compare(attention(PADDING), inputs(), None, torch.zeros(3, 6, 6))
    module = attention(PADDING)
    given = inputs()
    torch.testing.assert_close(module(*given, None, attn_mask_type=CAUSAL), attention()(*given, None))


def test_the_scale_that_megatron_gives():
    module = FusedAttention(megatron_config(), 1, CAUSAL, "self", None, softmax_scale=0.7)
    compare(module, inputs(), None, torch.ones(6, 6).triu(1).bool().expand(3, 6, 6), scale=0.7)


def test_dropout_only_in_training():
    # Ranks of sequence parallelism draw from generators of their own already.
    module = attention(attention_dropout=0.5, sequence_parallel=True)
    given = inputs()
    torch.testing.assert_close(module.eval()(*given, None), attention()(*given, None))
    torch.manual_seed(0)
    first = module.train()(*given, None)
    assert not torch.allclose(first, module(*given, None))
    torch.manual_seed(0)
    assert torch.equal(first, module(*given, None))
    torch.manual_seed(0)
    mean = torch.stack([module(*given, None) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, attention()(*given, None), atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_size", (4, 0)),
        ("softmax_type", "learnable"),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
        ("multi_latent_attention", True),
        ("attention_softmax_in_fp32", False),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"has {field}=.*Leave {field} out"):
        attention(**{field: value})


@pytest.mark.parametrize("name", ["attention_bias", "packed_seq_params"])
def test_arguments_of_other_kinds_of_attention_are_refused(name):
    with pytest.raises(TypeError, match=f"Attention was called with {name}"):
        attention()(*inputs(), None, **{name: torch.zeros(1)})


def divided(groups, mask, mask_type):
    """What this rank makes of its positions, and its summands of the gradients of all positions."""
    dist.init_process_group("gloo")
    part = ContextPart.of(dist.group.WORLD)
    module = FusedAttention(
        megatron_config(context_parallel_size=part.parts),
        1,
        mask_type,
        "self",
        pg_collection=SimpleNamespace(cp=part.group),
    )
    given = inputs(12, groups=groups)
    own = None if mask is None else part.cut(mask, 2)
    found = module(*(part.cut(tensor, 0) for tensor in given), own)
    weights = torch.arange(found.numel() * part.parts).sin().view(12, 3, 32).double()
    gradients = torch.autograd.grad((found * part.cut(weights, 0)).sum(), given)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return part.whole(found, 0).detach(), gradients


@pytest.mark.wide(only=["grouped-*", "padded-*"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("groups", "padded", "mask_type"),
    [(4, False, CAUSAL), (2, False, CAUSAL), (2, True, CAUSAL), (2, False, PADDING)],
    ids=["causal", "grouped", "padded", "everything"],
)
def test_ranks_that_divide_sequences(ranks, groups, padded, mask_type):
    later = torch.ones(12, 12).triu(1).bool() | torch.zeros(3, 1, 12, 12).bool()
    if padded:
        later[1, :, :, 7:] = True
        later[2, :, :, 3] = True
    masked = later[:, 0] if mask_type is CAUSAL else torch.zeros(3, 12, 12).bool()
    given = inputs(12, groups=groups)
    expected = written_out(*given, masked)
    weights = torch.arange(expected.numel()).sin().view(12, 3, 32).double()
    gradients = torch.autograd.grad((expected * weights).sum(), given)
    kind = SimpleNamespace(name=mask_type.name)
    for found, summed in worlds.run(divided, ranks, groups, later if padded else None, kind):
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(summed, gradients)
