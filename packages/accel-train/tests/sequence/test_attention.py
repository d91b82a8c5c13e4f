"""Attention over a divided sequence, against attention in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_train.errors import IncompatibleOptionsError
from accel_train.sequence import attention
from accel_train.sequence.attention import DividedAttention
from accel_train.sequence.batches import SequencePart
from accel_train.sequence.layout import SequenceLayout
from accel_train.sequence.ring import visible
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
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


def whole(is_causal, heads, kv_heads, dtype, documents=None):
    """What one process finds in float64, of the same values: output and gradients."""
    query, key, value, gradient = (each.double() for each in tensors(heads, kv_heads, dtype))
    leaves = [each.requires_grad_() for each in (query, key, value)]
    rows = []
    for row in range(len(query)):  # documents one by one
        lengths = (
            documents[row].unique_consecutive(return_counts=True)[1].tolist() if documents is not None else 24
        )
        pieces = zip(*(each[row : row + 1].split(lengths, 2) for each in leaves), strict=True)
        rows.append(
            torch.cat(
                [
                    F.scaled_dot_product_attention(*piece, is_causal=is_causal, enable_gqa=heads != kv_heads)
                    for piece in pieces
                ],
                2,
            )
        )
    output = torch.cat(rows)
    output.backward(gradient)
    return [output.detach(), *[leaf.grad for leaf in leaves]]


def groups(cp, sp):
    """Context parallelism is the outer dimension."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (cp, sp), mesh_dim_names=("cp", "sp"))
    return [mesh[name].get_group() if size > 1 else None for name, size in (("cp", cp), ("sp", sp))]


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 12 + [1] * 1 + [2] * 11])


def divided(cp, sp, rotation, balanced, packed):
    cp_group, sp_group = groups(cp, sp)
    layout = SequenceLayout(cp, balanced)
    attend = DividedAttention(sp_group, cp_group, rotation, layout)
    place = SequencePart(dist.get_rank(), cp * sp, "", layout=layout)
    worst = {}
    for case in CASES:
        is_causal, heads, kv_heads, dtype = case
        if packed and not is_causal:
            continue
        documents = DOCUMENTS if packed else None
        query, key, value, gradient = (place.cut(each, 2) for each in tensors(heads, kv_heads, dtype))
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        output = attend(*leaves, is_causal=is_causal, enable_gqa=heads != kv_heads, documents=documents)
        output.backward(gradient)
        expected = [place.cut(each, 2) for each in whole(*case, documents)]
        found = [output.detach(), *[leaf.grad for leaf in leaves]]
        assert all(each.dtype == dtype for each in found)
        worst[case] = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    whole_again = attend.gather(place.cut(torch.arange(48).view(2, 24), 1))
    assert torch.equal(whole_again, torch.arange(48).view(2, 24))
    return worst


@pytest.mark.parametrize(
    ("cp", "sp", "rotation", "balanced", "packed"),
    [
        (1, 2, "allgather", False, False),
        (1, 2, "allgather", False, True),
        (2, 1, "allgather", False, True),
        (2, 1, "allgather", True, False),
        (2, 1, "alltoall", False, False),
        (2, 1, "alltoall", True, False),
        (2, 2, "allgather", True, True),
        pytest.param(2, 1, "allgather", False, False, marks=pytest.mark.full),
        pytest.param(2, 2, "allgather", True, False, marks=pytest.mark.full),
        pytest.param(2, 2, "alltoall", True, False, marks=pytest.mark.full),
        pytest.param(4, 1, "alltoall", False, False, marks=pytest.mark.full),
        pytest.param(3, 1, "alltoall", True, False, marks=pytest.mark.full),
        pytest.param(4, 1, "allgather", True, True, marks=pytest.mark.full),
        pytest.param(1, 4, "allgather", False, False, marks=pytest.mark.full),
    ],
)
def test_divided_attention_is_attention(cp, sp, rotation, balanced, packed):
    for worst in worlds.run(divided, cp * sp, cp, sp, rotation, balanced, packed):
        assert worst
        for case, difference in worst.items():
            assert difference < (1e-12 if case[-1] is torch.float64 else 0.1), (case, difference)


def pairs(monkeypatch, ranks, balanced):
    """How many pairs of a query and a key the kernels of each rank compute."""
    attend = DividedAttention(None, "group", layout=SequenceLayout(ranks, balanced))
    counted = []
    monkeypatch.setattr(attention, "gather_sequence", lambda tensor, group: tensor.repeat(1, 1, ranks, 1))

    def count(query, key, value, **more):
        counted[-1] += query.shape[2] * key.shape[2]
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", count)
    for rank in range(ranks):
        counted.append(0)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        attend(*[torch.zeros(1, 1, 24 // ranks, 8)] * 3, is_causal=True)
    return counted


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_balanced_ranks_compute_the_same_share(monkeypatch, ranks):
    equal, unequal = (pairs(monkeypatch, ranks, balanced) for balanced in (True, False))
    assert len(set(equal)) == 1
    assert unequal == [(rank + 1) * unequal[0] for rank in range(ranks)]
    assert max(unequal) > 1.3 * max(equal)


def turns(ranks, balanced):
    """Which part of the pairs of a rank's queries and another's keys each rank computes, turn by turn, in quarters."""
    half = 4 if balanced else None
    found = []
    for turn in range(1, ranks):
        shares = []
        for rank in range(ranks):
            seen = visible(rank, (rank - turn) % ranks, True, half)
            positions = torch.arange(8)
            shares.append(
                0 if seen is None else len(positions[seen.queries]) * len(positions[seen.keys]) // 16
            )
        found.append(shares)
    return found


def test_each_turn_of_the_ring_is_balanced():
    """A turn takes as long as its slowest rank."""
    assert turns(4, True) == [[2, 2, 2, 2]] * 3
    assert turns(4, False) == [[0, 4, 4, 4], [0, 0, 4, 4], [0, 0, 0, 4]]


def refusals():
    group = groups(2, 1)[0]
    query = torch.zeros(2, 4, 12, 8)
    told = []
    for rotation, is_causal in (("alltoall", True), ("allgather", False)):
        with pytest.raises(IncompatibleOptionsError) as error:
            DividedAttention(None, group, rotation)(
                query, query, query, is_causal=is_causal, documents=DOCUMENTS
            )
        told.append(str(error.value))
    return told


def test_documents_that_cannot_be_kept_apart():
    for ring, not_causal in worlds.run(refusals, 2):
        assert "cp_comm_strategy 'alltoall' does not keep apart. Use 'allgather'" in ring
        assert "this attention is not causal" in not_causal
