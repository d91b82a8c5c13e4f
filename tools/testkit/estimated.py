"""Small models whose memory tests of estimates know."""

import torch
from torch import nn


class Mlp(nn.Module):
    """Linear layers, of which one is tied to an embedding, a frozen one, a norm and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 20)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(20, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long), persistent=False)

    def forward(self, ids, gain=1.0):
        hidden = self.frozen(self.drop(torch.nn.functional.gelu(self.first(self.embed(ids)))))
        return self.head(self.norm(hidden * self.scale) * gain)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, images):
        return self.head(self.layers(images).flatten(2).transpose(1, 2)).softmax(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def ids():
    return torch.randint(0, 11, (3, 5))
