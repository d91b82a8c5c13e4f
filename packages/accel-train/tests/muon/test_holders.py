"""Who holds a parameter, read from meshes and placements; on one rank of a world of 8 that sends nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from accel_train.errors import PrepareError
from accel_train.muon.holders import ALONE, holders_of, of_ranks, team_of
from accel_train.ranks import Ranks

RANK = 5


@pytest.fixture
def mesh():
    """Two replicas, each divided among two ranks, with two of tensor parallelism."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=RANK, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    dist.destroy_process_group()


def parameter(mesh, *placements):
    return DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)


def test_whole_parameters_are_copies(mesh):
    team = team_of(None)
    assert team.ranks == tuple(range(8))
    assert team.index == RANK
    found = holders_of(torch.zeros(2, 2), team)
    assert (found.parts, found.copies) == (ALONE, team)
    assert holders_of(torch.zeros(2, 2), ALONE).copies.size == 1


def test_a_dimension_of_a_mesh_divides_or_copies(mesh):
    found = holders_of(parameter(mesh["dp_replicate", "dp_shard"], Replicate(), Shard(0)), ALONE)
    assert found.parts.ranks == (5, 7)
    assert found.parts.index == 0
    assert found.copies.ranks == (1, 5)
    assert found.copies.index == 1


def test_two_dimensions_that_divide_are_one_group(mesh):
    found = holders_of(parameter(mesh["dp_shard", "tp"], Shard(0), Shard(1)), ALONE)
    assert found.parts.ranks == (4, 5, 6, 7)
    assert found.parts.index == 1
    assert found.copies == ALONE
    everything = holders_of(parameter(mesh, Replicate(), Shard(0), Shard(0)), ALONE)
    assert (everything.parts.ranks, everything.copies.ranks) == ((4, 5, 6, 7), (1, 5))


def test_ranks_of_the_strategy_are_copies_where_the_mesh_does_not_have_them(mesh):
    averaged = Ranks(2, 1, mesh["dp_replicate"].get_group(), (0, 0, 0, 0, 1, 1, 1, 1), RANK)
    team = of_ranks(averaged)
    assert team.ranks == (1, 5)
    assert holders_of(parameter(mesh["tp"], Shard(0)), team).copies == team
    sharded = parameter(mesh["dp_replicate", "tp"], Shard(0), Shard(1))
    found = holders_of(sharded, team)
    assert (found.parts.ranks, found.copies) == ((0, 1, 4, 5), ALONE)


def test_ranks_that_work_alone_are_no_team():
    assert of_ranks(None) == of_ranks(Ranks()) == ALONE
    assert ALONE.size == 1


def test_sums_over_ranks_are_refused(mesh):
    with pytest.raises(PrepareError, match=r"shape \[4, 4\] has the placement .*sum over ranks"):
        holders_of(parameter(mesh["tp"], Partial()), ALONE)


def test_a_mesh_without_names_that_divides_twice_is_refused(mesh):
    nameless = init_device_mesh("cpu", (4, 2))
    with pytest.raises(PrepareError, match="mesh_dim_names"):
        holders_of(parameter(nameless, Shard(0), Shard(1)), ALONE)
