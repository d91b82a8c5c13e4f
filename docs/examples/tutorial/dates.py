"""Dates as people write them and their ISO form, and a small language model that learns to write the second."""

import datetime
import random

import torch
from torch import nn
from torch.nn import functional

FORMS = ("%d %b %Y", "%b %d %Y", "%d.%m.%Y")  # 14 Mar 2026, Mar 14 2026, 14.03.2026
SYMBOLS = " -.=0123456789ADFJMNOSabceglnoprtuvy"
PROMPT, ANSWER = 12, 10  # characters of "14 Mar 2026=" and of "2026-03-14"


def encode(question, answer=""):
    return torch.tensor([SYMBOLS.index(character) for character in f"{question}=".rjust(PROMPT) + answer])


def decode(tokens):
    return "".join(SYMBOLS[token] for token in tokens)


def make_dates():
    """1,600 lines such as "Mar 14 2026=2026-03-14" to learn from, and 501 of other days: (count, 22) integers."""
    draw = random.Random(0)
    first, last = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
    days = [datetime.date.fromordinal(day) for day in draw.sample(range(first, last + 1), 1600 + 501)]
    lines = torch.stack([encode(day.strftime(draw.choice(FORMS)), day.isoformat()) for day in days])
    return lines[:1600], lines[1600:]


class Block(nn.Module):
    """Attention to the characters before, then two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """From characters, (batch, length) integers, to scores for each next character, (batch, length, 36)."""

    def __init__(self, width=64, depth=2, heads=4):
        super().__init__()
        self.symbols = nn.Embedding(len(SYMBOLS), width)
        self.places = nn.Embedding(PROMPT + ANSWER, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(SYMBOLS), bias=False)

    def forward(self, tokens):
        x = self.symbols(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def predict(model, lines):
    """Scores for the ten characters of each answer, and these characters."""
    return model(lines[:, :-1])[:, PROMPT - 1 :], lines[:, PROMPT:]


def loss_of(model, lines):
    scores, answers = predict(model, lines)
    return functional.cross_entropy(scores.flatten(0, 1), answers.flatten())


@torch.no_grad()
def answer(model, question):
    """The model writes ten characters, one after another."""
    tokens = encode(question)[None].to(next(model.parameters()).device)
    for _ in range(ANSWER):
        best = model(tokens)[:, -1].argmax(dim=1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    return decode(tokens[0, PROMPT:].tolist())
