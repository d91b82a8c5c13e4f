"""Plans of a step: every element is computed once, work is balanced, memory is bounded."""

from __future__ import annotations

import itertools

import pytest
import torch

from accel_ckpt.geometry import Box, first_gap
from accel_train.muon.newton_schulz import flops
from accel_train.muon.plan import matrices_of, plan_of

SHAPES = [(40, 16), (16, 40), (16, 16), (7, 3), (5, 16, 40), (4, 40, 16), (1, 2)]


def rows_of(shape, ranks, dim=0):
    """Boxes as `Shard(dim)` makes them."""
    boxes, start = [], 0
    step = -(-shape[dim] // ranks)
    for _ in range(ranks):
        size = max(0, min(step, shape[dim] - start))
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, size
        boxes.append([Box(tuple(offsets), tuple(sizes))] if size else [])
        start += size
    return boxes


def plan(ranks, copies, largest=1 << 20, dim=0):
    held = [rows_of(shape, ranks, dim if len(shape) > dim else 0) for shape in SHAPES]
    boxes = [[of_one[rank] for of_one in held] for rank in range(ranks)]
    matrices = [matrices_of(shape, flatten=False) for shape in SHAPES]
    return plan_of(matrices, SHAPES, boxes, copies, [5] * len(SHAPES), largest), boxes


@pytest.mark.parametrize(("ranks", "copies", "dim"), [(1, 1, 0), (3, 1, 0), (1, 3, 0), (2, 2, 0), (2, 1, 1)])
@pytest.mark.parametrize("largest", [1, 2000, 1 << 20])
def test_every_element_is_computed_once_and_comes_back(ranks, copies, dim, largest):
    found, boxes = plan(ranks, copies, largest, dim)
    seen = [torch.zeros(shape) for shape in SHAPES]
    for dealt in found.rounds:
        for owned in itertools.chain(*dealt):
            for item in owned:
                whole = torch.zeros(item.sizes)
                for rank, pieces in enumerate(item.pieces):
                    for piece in pieces:
                        whole[piece.within] += 1
                        box = boxes[rank][item.parameter][piece.part]
                        seen[item.parameter][box.slices][piece.where] += 1
                assert whole.eq(1).all()
                assert item.elements == whole.numel()
    assert all(values.eq(1).all() for values in seen)


def test_experts_that_a_rank_holds_whole_stay_there():
    found, _ = plan(2, 1)
    for dealt in found.rounds:
        for owner, owned in enumerate(dealt[0]):
            for item in owned:
                if len(item.sizes) == 3:
                    assert item.home == owner


def test_experts_that_are_divided_themselves_are_dealt_one_by_one():
    found, _ = plan(2, 1, dim=1)
    counts = [
        sum(item.sizes[0] for dealt in found.rounds for item in dealt[0][owner] if item.parameter == 4)
        for owner in (0, 1)
    ]
    assert sorted(counts) == [2, 3]


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (1, 2), (2, 2), (8, 1)])
def test_ranks_compute_about_as_much(ranks, copies):
    shapes = [(64, 64), (64, 256), (256, 64)] * 8 * ranks * copies
    boxes = [[[] for _ in shapes] for _ in range(ranks)]
    for place, shape in enumerate(shapes):
        for rank, held in enumerate(rows_of(shape, ranks)):
            boxes[rank][place] = held
    found = plan_of(
        [matrices_of(s, flatten=False) for s in shapes], shapes, boxes, copies, [5] * len(shapes), 1 << 20
    )
    loads = [0] * (ranks * copies)
    for dealt in found.rounds:
        for place, owned in enumerate(itertools.chain(*dealt)):
            loads[place] += sum(item.cost for item in owned)
    assert sum(loads) == sum(flops(*shape) for shape in shapes)
    assert max(loads) <= 1.02 * min(loads)


def test_a_round_holds_a_few_matrices_at_most():
    largest = 2 * 40 * 16 * 2
    found, _ = plan(1, 1, largest)
    for dealt in found.rounds:
        [owned] = dealt[0]
        assert sum(2 * item.elements for item in owned) <= largest or len(owned) == 1
    assert len(found.rounds) > 3


def test_parts_of_a_strided_division_form_the_matrix():
    """As FSDP over tensor parallelism leaves several boxes on a rank."""
    shape = (8, 4)
    boxes = [[[Box((start, 0), (2, 4)), Box((start + 4, 0), (2, 4))]] for start in (0, 2)]
    assert first_gap(shape, [box for rank in boxes for held in rank for box in held]) is None
    found = plan_of([matrices_of(shape, flatten=False)], [shape], boxes, 1, [5], 1 << 20)
    [[[owned, other]]] = found.rounds
    [item] = [*owned, *other]
    assert item.home is None
    assert [len(pieces) for pieces in item.pieces] == [2, 2]
    assert found.is_exchanged(0, 0)


def test_shapes_are_read_as_matrices():
    assert matrices_of((3, 4), flatten=False).count is None
    experts = matrices_of((5, 3, 4), flatten=False)
    assert (experts.count, experts.rows, experts.columns) == (5, 3, 4)
    convolution = matrices_of((3, 2, 5, 5), flatten=True)
    assert (convolution.count, convolution.rows, convolution.columns) == (None, 3, 50)
    assert matrices_of((3,), flatten=False) is None
    assert matrices_of((3, 2, 5, 5), flatten=False) is None
