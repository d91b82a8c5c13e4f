"""Attention over a divided sequence, against attention in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_train.sequence.attention import DividedAttention
from testkit import worlds

CASES = [
    (is_causal, heads, kv_heads, dtype)
    for is_causal in (False, True)
    for heads, kv_heads in ((4, 4), (8, 2), (4, 1), (12, 6))
    for dtype in (torch.float64, torch.bfloat16)
]


def tensors(heads, kv_heads, dtype, length=24):
    made = torch.Generator().manual_seed(1)
    shapes = [
        (2, heads, length, 8),
        (2, kv_heads, length, 8),
        (2, kv_heads, length, 8),
        (2, heads, length, 8),
    ]
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(is_causal, heads, kv_heads, dtype):
    """What one process finds in float64, of the same values: output and gradients."""
    query, key, value, gradient = (each.double() for each in tensors(heads, kv_heads, dtype))
    leaves = [each.requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=heads != kv_heads)
    output.backward(gradient)
    return [output.detach(), *[leaf.grad for leaf in leaves]]


def groups(cp, sp):
    """Context parallelism is the outer dimension."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (cp, sp), mesh_dim_names=("cp", "sp"))
    return [mesh[name].get_group() if size > 1 else None for name, size in (("cp", cp), ("sp", sp))]


def divided(cp, sp, rotation):
    cp_group, sp_group = groups(cp, sp)
    attend = DividedAttention(sp_group, cp_group, rotation)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worst = {}
    for case in CASES:
        is_causal, heads, kv_heads, dtype = case
        query, key, value, gradient = (each.chunk(ranks, 2)[rank] for each in tensors(heads, kv_heads, dtype))
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        output = attend(*leaves, is_causal=is_causal, enable_gqa=heads != kv_heads)
        output.backward(gradient)
        expected = [each.chunk(ranks, 2)[rank] for each in whole(*case)]
        found = [output.detach(), *[leaf.grad for leaf in leaves]]
        assert all(each.dtype == dtype for each in found)
        worst[case] = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst


@pytest.mark.parametrize(
    ("cp", "sp", "rotation"),
    [
        (1, 2, "allgather"),
        (2, 1, "allgather"),
        (2, 1, "alltoall"),
        (2, 2, "allgather"),
        (2, 2, "alltoall"),
        (4, 1, "alltoall"),
        (1, 4, "allgather"),
    ],
)
def test_divided_attention_is_attention(cp, sp, rotation):
    for worst in worlds.run(divided, cp * sp, cp, sp, rotation):
        for case, difference in worst.items():
            assert difference < (1e-12 if case[-1] is torch.float64 else 0.1), (case, difference)
