"""Small models for the tests of streaming, and an engine attached to one beside an equal model without."""

import copy

import torch
from torch import nn

from accel_bigmodel.streaming.groups import plan_groups
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import HostTransfer

SIZE = 16


class Block(nn.Module):
    """Notes, while it runs, where its weights are."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.randn(size))
        self.seen = []
        self.fail = None

    def forward(self, x):
        self.seen.append(self.linear.weight.data_ptr())
        if self.fail is not None:
            raise self.fail
        return torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    def __init__(self, blocks=4, size=SIZE):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.order = list(range(blocks))

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


class Tied(nn.Module):
    """The first group and the last have one weight in common."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(70, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(SIZE, 70)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_BYTES = 512 * 4  # weight of 1024 bytes, bias and scale of 64 each, aligned to 512


def poison_released(streamer):
    """Overwrite every slot that is given back: who still reads it, reads NaN."""
    give_back = streamer._pool.give_back

    def poisoned(slot):
        slot.last_copy.settle()
        slot.buffer.fill_(255)
        give_back(slot)

    streamer._pool.give_back = poisoned


class Attached:
    """A model, an equal one that nothing is attached to, and an engine."""

    def __init__(self, model, *, streamed=("",), offload_buffers=False, before_copy=None, **options):
        self.plain = copy.deepcopy(model)
        self.model = model
        self.homes = {name: tensor.data_ptr() for name, tensor in self.weights()}
        self.groups = plan_groups(model, streamed, offload_buffers=offload_buffers)
        self.streamer = Streamer(model, self.groups, HostTransfer(before_copy), **options)
        self.streamer.attach()
        poison_released(self.streamer)

    def weights(self):
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def check(self, *inputs, **options):
        with torch.no_grad():
            expected = self.plain(*inputs, **options)
            found = self.model(*inputs, **options)
        same(found, expected)
        self.check_home()
        return found

    def check_home(self):
        assert {name: tensor.data_ptr() for name, tensor in self.weights()} == self.homes
        for (name, tensor), (_, other) in zip(
            [*self.plain.named_parameters(), *self.plain.named_buffers()], self.weights(), strict=True
        ):
            assert torch.equal(tensor, other), name

    @property
    def stats(self):
        return self.streamer.stats()


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


def x(rows=3, size=SIZE):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(7))
