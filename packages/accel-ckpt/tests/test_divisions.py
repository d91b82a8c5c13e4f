"""Divisions of tensors among ranks: each element has one holder, and who holds a box is found without asking all."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from accel_ckpt.divisions import Division, RankMesh
from accel_ckpt.geometry import Box


def random_mesh(draw: random.Random) -> torch.Tensor:
    """Ranks as ``DeviceMesh`` has them: in order, a part of a larger mesh, transposed, or in any order."""
    shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((1, 2, 3)))]
    whole = torch.arange(2 * torch.Size(shape).numel()).view(2, *shape)
    mesh = draw.choice(
        [whole[1], whole.movedim(0, -1)[..., 1], whole[0].permute(*reversed(range(len(shape))))]
    )
    return mesh if draw.random() < 0.7 else mesh.reshape(-1)[torch.randperm(mesh.numel())].view(mesh.shape)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_and_positions_of_a_mesh(seed: int) -> None:
    torch.manual_seed(seed)
    ranks = random_mesh(random.Random(seed))
    mesh = RankMesh.of(ranks)
    assert list(mesh.members) == ranks.reshape(-1).tolist()
    assert mesh.last == int(ranks.max())
    for position in itertools.product(*map(range, mesh.shape)):
        assert mesh.rank(position) == int(ranks[position])
        assert mesh.coordinate(int(ranks[position])) == position
    others = set(range(2 * ranks.numel())) - set(mesh.members)
    assert all(mesh.coordinate(rank) is None for rank in others)


@pytest.mark.parametrize(
    "ranks",
    [
        torch.arange(4096),
        torch.arange(4096).view(64, 64),
        torch.arange(4096).view(64, 64).t(),
        torch.arange(4096).view(8, 8, 64)[:, 3],
    ],
    ids=["one", "two", "transposed", "part"],
)
def test_what_a_mesh_costs_does_not_grow_with_its_ranks(ranks: torch.Tensor) -> None:
    mesh = RankMesh.of(ranks)
    assert not mesh.ranks
    assert list(mesh.members) == ranks.reshape(-1).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_each_element_has_one_holder_for_each_copy(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    mesh = RankMesh.of(random_mesh(draw))
    shape = tuple(draw.choice((1, 2, 5, 6, 7, 12)) for _ in range(draw.choice((1, 2, 3))))
    splits = tuple(
        None if draw.random() < 0.3 else (draw.randrange(len(shape)), draw.choice((1, 1, 1, 2, 3)))
        for _ in mesh.shape
    )
    division = Division(mesh, splits, 0)
    held = {
        position: division.boxes(shape, position) for position in itertools.product(*map(range, mesh.shape))
    }
    count = torch.zeros(shape, dtype=torch.int64)
    for position, boxes in held.items():
        copy = division.copy_of(position)
        assert division.rank_of(position, copy) == mesh.rank(position)
        for box in boxes:
            count[box.slices] += 1
    assert torch.equal(count, torch.full(shape, division.copies))
    for _ in range(10):
        offsets = tuple(draw.randrange(size) for size in shape)
        wanted = Box(offsets, tuple(draw.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)))
        right = {
            position
            for position, boxes in held.items()
            if division.copy_of(position) == 0 and any(box.meet(wanted) for box in boxes)
        }
        found = list(division.holders(shape, wanted))
        assert sorted(found) == sorted(right)


@pytest.mark.parametrize("seed", range(30))
def test_each_element_of_a_flat_division_has_one_holder(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 3, 5))
    shape = tuple(draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((1, 2, 3))))
    begin, size = draw.choice((0, 3, 7)), draw.randint(1, 12)
    while ranks * size < begin + torch.Size(shape).numel():
        size += 1
    division = Division(RankMesh.of(torch.arange(ranks)), ((0, 1),), 0, (size, begin))
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(ranks):
        for box in division.boxes(shape, (rank,)):
            count[box.slices] += 1
    assert torch.equal(count, torch.ones_like(count))
    for offsets in itertools.product(*map(range, shape)):
        wanted = Box(offsets, tuple(draw.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)))
        right = [
            (rank,) for rank in range(ranks) if any(b.meet(wanted) for b in division.boxes(shape, (rank,)))
        ]
        assert list(division.holders(shape, wanted)) == right
