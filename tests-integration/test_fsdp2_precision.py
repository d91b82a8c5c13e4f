"""A `mixed_precision_policy` beside the setting of precision: dtypes inside and outside, and what contradicts it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.seen = x.dtype, self.linear.weight.dtype, torch.is_autocast_enabled(x.device.type)
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Its head is outside of all units."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def accelerator_of(precision, policy):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    return Accelerator(mixed_precision=precision, fsdp_plugin=plugin)


def made():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def train(precision, policy):
    accelerator = accelerator_of(precision, policy)
    model, optimizer = accelerator.prepare(*made())
    out = model(data())
    accelerator.backward(out.float().square().mean())
    optimizer.step()
    kept = {parameter.dtype for parameter in model.parameters()}
    return accelerator.unwrap_model(model).blocks[1].seen, out.dtype, kept, accelerator.get_state_dict(model)


BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    ("no", {"param_dtype": "bf16"}, (BF16, BF16, False), BF16),
    ("no", {"param_dtype": "bf16", "output_dtype": "fp32"}, (BF16, BF16, False), FP32),
    ("bf16", {"param_dtype": "bf16", "reduce_dtype": "bf16"}, (BF16, BF16, True), FP32),
    ("bf16", {"param_dtype": "fp32"}, (FP32, FP32, True), FP32),
]


@pytest.mark.parametrize(("precision", "policy", "inside", "outside"), CASES)
def test_a_policy_says_in_which_dtypes_units_compute(precision, policy, inside, outside):
    model, optimizer = made()
    model(data()).square().mean().backward()
    optimizer.step()
    for seen, dtype, kept, weights in worlds.run(train, 2, precision, policy):
        assert seen == inside
        assert dtype == outside
        assert kept == {FP32}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize(
    ("precision", "policy", "message"),
    [
        ("no", "fp16", "computes in float16.*mixed_precision='no' scales none.*mixed_precision='fp16'"),
        ("bf16", "fp16", "computes in float16.*mixed_precision='bf16' scales none"),
        ("fp16", "bf16", r"in torch\.bfloat16, and mixed_precision='fp16' computes in torch\.float16"),
    ],
)
def test_a_policy_that_contradicts_the_precision_is_refused(precision, policy, message):
    with pytest.raises(worlds.RankError, match=f"IncompatibleOptionsError.*{message}"):
        worlds.run(accelerator_of, 2, precision, policy)
