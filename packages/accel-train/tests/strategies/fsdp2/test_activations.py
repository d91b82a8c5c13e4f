"""Recomputing blocks in backward."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.activations import CheckpointedForward, checkpoint_blocks, keep_products


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 64)
        self.narrow = nn.Linear(64, 8)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        hidden = nn.functional.dropout(torch.tanh(self.wide(x)), 0.5, self.training)
        return x + torch.tanh(self.narrow(hidden)) * scale


class Model(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def run(model):
    torch.manual_seed(1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = model(torch.ones(4, 8)).sum()
    out.backward()
    return out, [parameter.grad for parameter in model.parameters()], sum(kept)


@pytest.mark.parametrize("offload", [False, True])
def test_t42_blocks_are_recomputed_and_less_is_kept(offload):
    torch.manual_seed(0)
    plain = Model()
    saving = copy.deepcopy(plain)
    checkpoint_blocks(saving, saving.blocks, offload)
    expected, gradients, much = run(plain)
    out, same, little = run(saving)
    assert torch.equal(out, expected), "dropout included"
    assert all(torch.equal(a, b) for a, b in zip(same, gradients, strict=True))
    assert little < much / 3
    assert [block.calls for block in saving.blocks] == [2, 2, 2]
    assert list(saving.state_dict()) == list(plain.state_dict())


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return operation(*args, **(kwargs or {}))


def keep_wide(context, operation, *args, **kwargs):
    """A policy of a script: the result of the first layer alone."""
    wide = operation is torch.ops.aten.addmm.default and args[0].numel() == 64
    return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("policy", "again"), [(None, 2), (keep_wide, 1), (keep_products, 0)])
def test_t42_a_policy_keeps_results(policy, again):
    torch.manual_seed(0)
    plain = Model()
    saving = copy.deepcopy(plain)
    checkpoint_blocks(saving, saving.blocks, False, policy)
    with Products() as counted:
        expected, gradients, _ = run(plain)
    with Products() as products:
        out, same, _ = run(saving)
    assert torch.equal(out, expected), "dropout included"
    for gradient, wanted in zip(same, gradients, strict=True):
        assert torch.equal(gradient, wanted)
    # Of each block's two products.
    assert products.count - counted.count == again * len(saving.blocks)


class Cache:
    """As transformers' DynamicCache tells its length."""

    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        return self.length


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = []

    def forward(self, x, past_key_values=None, use_cache=None):
        self.seen.append((past_key_values, use_cache))
        return torch.tanh(self.linear(x))


def test_recomputed_blocks_append_to_no_cache():
    model = nn.ModuleList([Caching(), Caching()])
    checkpoint_blocks(model, model, offload=False)
    model[0](torch.ones(1, 2), past_key_values=Cache(0), use_cache=True).sum().backward()
    assert model[0].seen == [(None, False)] * 2
    with torch.no_grad():
        model[0](torch.ones(1, 2), past_key_values="kept", use_cache=True)
    assert model[0].seen[-1] == ("kept", True)
    for cache, held in ((Cache(5), "the keys and values of 5 positions"), (((1, 2),), "keys and values")):
        with pytest.raises(
            PrepareError, match=f"past_key_values holds {held}.*activation_checkpointing=False"
        ):
            model[1](torch.ones(1, 2), past_key_values=cache)


def test_a_cache_that_is_passed_by_position_is_left_out():
    model = nn.ModuleList([Caching(), Caching()])
    checkpoint_blocks(model, model, offload=False)
    model[0](torch.ones(1, 2), Cache(0), use_cache=True).sum().backward()
    assert model[0].seen == [(None, False)] * 2
    with pytest.raises(PrepareError, match="argument 2 holds the keys and values of 5 positions"):
        model[1](torch.ones(1, 2), Cache(5))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_gpt2_with_padding_has_the_gradients_that_it_has_without_checkpointing(attention):
    """Its blocks get the cache by position."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config).double().train()
    recomputed = copy.deepcopy(plain)
    checkpoint_blocks(recomputed, recomputed.transformer.h, offload=False)
    tokens = torch.randint(0, 20, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    for model in (plain, recomputed):
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_nothing_is_recomputed_without_gradients():
    model = Model()
    checkpoint_blocks(model, model.blocks, offload=False)
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert [block.calls for block in model.blocks] == [1, 1, 1]


def test_innermost_units_once_and_blocks_where_there_are_no_units():
    model = Model()
    checkpoint_blocks(model, [model.blocks[0].wide, *model.blocks], offload=False)
    assert isinstance(model.blocks[0].wide.forward, CheckpointedForward)
    assert not isinstance(model.blocks[0].forward, CheckpointedForward)
    other = Model()
    checkpoint_blocks(other, [], offload=False)
    checkpoint_blocks(other, [], offload=False)
    assert all(not isinstance(block.forward.forward, CheckpointedForward) for block in other.blocks)
    with pytest.raises(PrepareError, match="Linear has no repeated blocks"):
        checkpoint_blocks(nn.Linear(2, 2), [], offload=False)


def test_a_checkpointed_model_pickles():
    model = Model()
    checkpoint_blocks(model, model.blocks, offload=False)
    again = pickle.loads(pickle.dumps(model))
    again.eval(), model.eval()
    assert torch.equal(again(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_the_cache_under_its_newest_name_is_left_out_and_other_things_of_that_name_are_kept():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x, cache=None):
            self.seen.append(cache)
            return self.layer(x)

    model = nn.Sequential(Keeps())
    block = model[0]
    checkpoint_blocks(model, [block], offload=False)
    model[0](torch.ones(1, 2), cache=Cache(0)).sum().backward()
    assert block.seen == [None, None]
    model[0](torch.ones(1, 2), cache="a folder").sum().backward()
    assert block.seen[2:] == ["a folder"] * 2
    with pytest.raises(PrepareError, match="cache holds the keys and values of 3 positions"):
        model[0](torch.ones(1, 2), cache=Cache(3))
