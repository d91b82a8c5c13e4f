"""Recomputing blocks in backward."""

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.activations import CheckpointedForward, checkpoint_blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 64)
        self.narrow = nn.Linear(64, 8)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + self.narrow(nn.functional.dropout(torch.tanh(self.wide(x)), 0.5, self.training)) * scale


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
