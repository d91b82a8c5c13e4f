"""The blocks of a tensor-parallel engine, against plain slices of whole weights."""

import pytest
import torch

from accel_ckpt import Part, TensorParallelLayout


def filled(wants, whole):
    """Fill what a rank wants from whole weights."""
    for name, part in wants.items():
        if not part.is_empty:
            part.tensor.copy_(whole[name][part.box.slices])


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_columns_rows_and_biases(degree):
    up, down, bias = torch.randn(8, 6), torch.randn(6, 8), torch.randn(8)
    for rank in range(degree):
        layout = TensorParallelLayout(rank, degree)
        own = torch.zeros(8 // degree, 6), torch.zeros(6, 8 // degree), torch.zeros(8 // degree)
        wants = {"up": layout.column(own[0]), "down": layout.row(own[1]), "bias": layout.column(own[2])}
        filled(wants, {"up": up, "down": down, "bias": bias})
        assert torch.equal(own[0], up.chunk(degree)[rank])
        assert torch.equal(own[1], down.chunk(degree, dim=1)[rank])
        assert torch.equal(own[2], bias.chunk(degree)[rank])


@pytest.mark.parametrize(
    ("degree", "kv_heads"), [(1, 2), (2, 2), (4, 2), (8, 2), (4, 1)], ids=lambda value: str(value)
)
def test_fused_attention_whose_keys_several_ranks_hold(degree, kv_heads):
    head, heads, width = 4, 8, 6
    whole = {
        "q": torch.randn(heads * head, width),
        "k": torch.randn(kv_heads * head, width),
        "v": torch.randn(kv_heads * head, width),
    }
    for rank in range(degree):
        layout = TensorParallelLayout(rank, degree)
        expected = [whole["q"].view(degree, -1, width)[rank]]
        for name in "kv":
            by_head = whole[name].view(kv_heads, head, width)
            first = rank * kv_heads // degree
            expected.append(by_head[first : first + max(1, kv_heads // degree)].reshape(-1, width))
        qkv = torch.zeros_like(torch.cat(expected))
        filled(layout.fused(qkv, {name: t.shape[0] for name, t in whole.items()}, head_size=head), whole)
        assert torch.equal(qkv, torch.cat(expected)), rank


def test_a_padded_vocabulary():
    vocabulary = torch.randn(10, 3)
    held = []
    for rank in range(4):
        own = torch.full((4, 3), -1.0)
        wants = {"embed": TensorParallelLayout(rank, 4).column(own, rows=10)}
        assert wants["embed"].shape == (10, 3)
        filled(wants, {"embed": vocabulary})
        held.append(own)
    padded = torch.cat(held)
    assert torch.equal(padded[:10], vocabulary)
    assert (padded[10:] == -1).all()


def test_what_is_wanted_are_views():
    tensor = torch.nn.Parameter(torch.zeros(4, 2))
    part = TensorParallelLayout(0, 2).column(tensor)
    assert isinstance(part, Part)
    part.tensor.fill_(3)
    assert (tensor == 3).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TensorParallelLayout(2, 2), "rank=2 is none of degree=2"),
        (
            lambda: TensorParallelLayout(0, 2).column(torch.zeros(4, 2), rows=9),
            "do not hold a weight of 9 rows",
        ),
        (
            lambda: TensorParallelLayout(0, 4).fused(torch.zeros(3, 2), {"q": 12}, head_size=4),
            "'q' has 12 rows",
        ),
        (lambda: TensorParallelLayout(0, 2).fused(torch.zeros(5, 2), {"q": 8}), "holds 4 rows of"),
        (lambda: TensorParallelLayout(0, 2).fused(torch.zeros(3, 2), {"q": 8}), "the tensor has 3"),
        (
            lambda: TensorParallelLayout(0, 2).fused(torch.zeros(5, 2), {"q": 10}, head_size=4),
            "cannot divide",
        ),
    ],
)
def test_what_cannot_be_divided(make, says):
    with pytest.raises(ValueError, match=says):
        make()
