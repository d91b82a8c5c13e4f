"""Compiling prepared models: whole, or the repeated blocks of them."""

import torch
from torch import nn

from accel_train import Accelerator
from accel_train.setup.compile import compile_regions


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(3)])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return sum(head(x) for head in self.heads)


def test_regional_compilation_compiles_each_kind_of_block_once():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(3, 4)
    expected = model(x)
    names = list(model.state_dict())
    compiled = compile_regions(module=model, backend=backend)  # the name that accelerate gives it
    torch.testing.assert_close(compiled(x), expected)
    compiled(x)
    assert len(graphs) == 2
    assert list(compiled.state_dict()) == names
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in compiled.parameters())


def test_compiling_under_bf16_keeps_the_forward_wrapper():
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    model = accelerator.prepare(make().eval())
    x = torch.randn(2, 4)
    out = model(x)
    assert out.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(out, make().eval()(x).float())
