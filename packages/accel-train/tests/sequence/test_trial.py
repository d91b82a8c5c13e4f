"""Whether the trial of a model tells that it takes the part of a sequence for a whole one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accel_train.errors import PrepareError
from accel_train.sequence.trial import try_turned


class Model(nn.Module):
    """`kind` says where positions come from, and what joins them."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.tokens, self.places = nn.Embedding(30, 16), nn.Embedding(16, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 30)
        self.near = nn.Conv1d(16, 16, 3, padding=1)
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))
        if kind == "zeros":
            nn.init.zeros_(self.places.weight)

    def forward(self, ids, places=None, labels=None):
        self.calls += 1
        x, counted = self.tokens(ids), torch.arange(ids.shape[1])
        if self.kind in ("counted", "zeros", "loss alone"):
            x = x + self.places(counted)
        elif self.kind == "given":
            x = self.norm((x + self.places(places)).transpose(1, 2)).transpose(1, 2)
        elif self.kind == "conv":
            x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "random":
            x = x + torch.randn_like(x)
        query, key, value = self.qkv(self.dropout(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if self.kind == "rotary":
            query, key = (each * torch.cos(counted / 5)[:, None] for each in (query, key))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(x)
        if self.kind == "loss alone":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "mean": x.mean(1), "hidden": [x, "no tensor"]}


def tried(kind, **options):
    model = Model(kind).train()
    ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(0))
    named = {"places": torch.arange(4, 12).expand(2, 8), "labels": ids.flip(0)}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    try:
        with options.pop("context", torch.enable_grad()):
            try_turned(model, (ids,), named, "cp_size 2", losses=options.get("losses", True))
    finally:
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["counted", "rotary", "conv", "loss alone"])
def test_what_counts_positions_or_joins_neighbours_is_refused(kind):
    with pytest.raises(PrepareError, match=r"Model computes something else .* cp_size 2 gives each rank"):
        tried(kind)


@pytest.mark.parametrize("kind", ["given", "none", "random", "zeros"])
def test_what_takes_positions_or_has_none_or_cannot_tell_passes(kind):
    tried(kind)


def test_losses_may_be_left_out():
    tried("loss alone", losses=False)


@pytest.mark.parametrize("kind", ["given", "counted"])
def test_low_precision_makes_no_difference(kind):
    context = torch.autocast("cpu", torch.bfloat16)
    if kind == "given":
        tried(kind, context=context)
    else:
        with pytest.raises(PrepareError):
            tried(kind, context=context)


def test_nothing_to_turn_is_left_alone():
    try_turned(nn.Linear(1, 1), (torch.ones(3, 1),), {}, "sp_size 2", losses=True)
