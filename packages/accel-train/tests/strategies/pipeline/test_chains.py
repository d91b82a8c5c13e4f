"""A forward that does more than call its modules one after the other is refused, without data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_train.errors import PrepareError
from accel_train.strategies.pipeline.chains import check_chain

NAMES = ["embed", "blocks.0", "blocks.1", "head"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 2)

    def forward(self, x, scale=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Pairs(Net):
    def forward(self, x):
        first, second = self.embed(x)
        return self.head(self.blocks[1](*self.blocks[0](first, second)))


class Between(Net):
    def forward(self, x):
        x = self.embed(x) * 3.0
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Dropped(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5, self.training)
        return self.head(x)


class Skips(Net):
    def forward(self, x):
        start = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(start + x)


class Reversed(Net):
    def forward(self, x):
        return self.head(self.blocks[0](self.blocks[1](self.embed(x))))


class Twice(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Short(Net):
    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.embed(x)))


class Parallel(Net):
    def forward(self, x):
        x = self.embed(x)
        self.blocks[0](x)
        return self.head(self.blocks[1](x))


class Scaled(Net):
    def forward(self, x):
        return super().forward(x) / 10


class InMapping(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}


class Shape(Net):
    def forward(self, x):
        return super().forward(x.flatten(1))


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 5


def own():
    return Own(*(nn.Linear(2, 2) for _ in range(3)))


@pytest.mark.parametrize("kind", [Net, Recomputed, Pairs])
def test_a_chain(kind):
    model = kind()
    before = dict(model.named_modules())
    check_chain(model, NAMES)
    assert dict(model.named_modules()) == before
    if kind is not Pairs:
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_sequence():
    check_chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["0", "1"])


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (Between, r"of Between does something with what 'embed' returns \(unsupported operand"),
        (Dropped, r"does something with what 'blocks\.0' returns \(dropout"),
        (Skips, r"does something with what 'blocks\.1' returns \(unsupported operand"),
        (Reversed, r"calls 'blocks\.1' where 'blocks\.0' would be called"),
        (Twice, r"calls 'blocks\.0' where 'head' would be called"),
        (Short, "ends where 'head' would be called"),
        (Parallel, r"calls 'blocks\.1' with something else than what 'blocks\.0' returns"),
        (Scaled, "does something with what 'head' returns"),
        (InMapping, r"returns something else than 'head' \(dict\)"),
        (Shape, "does something with its input .*flatten"),
        (own, r"of Own does something with what '2' returns"),
    ],
)
def test_what_a_pipeline_would_leave_out(build, cause):
    model = build()
    before = dict(model.named_modules())
    names = ["0", "1", "2"] if build is own else NAMES
    with pytest.raises(PrepareError, match=cause):
        check_chain(model, names)
    assert dict(model.named_modules()) == before
