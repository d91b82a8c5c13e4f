"""A small causal language model with its data, optimizer and plan of tensor parallelism; scripts import it too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

__all__ = ["LENGTH", "Sentences", "divide", "losses_of", "make", "make_optimizer"]

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 20, 8


class Sentences(Dataset):
    """Sequences with a target and a weight for each position."""

    def __init__(self, size=20, length=LENGTH):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, WORDS, (size, length + 1), generator=generator)
        self.counts = torch.randint(0, 2, (size, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {
            "input_ids": self.ids[index, :-1],
            "targets": self.ids[index, 1:],
            "counts": self.counts[index],
        }


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = [
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        return self.o(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A causal language model."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)


def divide(model, mesh):
    """Tensor parallelism as Megatron has it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


def losses_of(model, batch, places):
    logits = model(batch["input_ids"], places)
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none").view_as(
        batch["counts"]
    )
