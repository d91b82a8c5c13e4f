"""A small module for the tests of aligning hooks, and where its tensors are."""

import torch
from torch import nn


class Block(nn.Module):
    """Has parameters, both kinds of buffers, and submodules."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.full((4,), 3.0))
        self.register_buffer("table", torch.full((4,), 5.0), persistent=False)
        self.inner = nn.Linear(4, 4)

    def forward(self, x, fail=False, depth=0):
        if depth:
            self(x, depth=depth - 1)
        if fail:
            raise RuntimeError("on purpose")
        return x * self.scale + self.shift + self.table


def where(module):
    """The kind of device of each parameter and buffer."""
    return {
        name: tensor.device.type for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
