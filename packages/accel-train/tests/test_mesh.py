"""Degrees of parallelism, and the ranks that follow from them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.mesh import DIMENSIONS, Mesh, batch_ranks
from accel_train.ranks import Ranks
from testkit import worlds

READ_ALIKE = {"pp", "cp", "sp", "tp"}
SAME_LOSS = {"pp", "tp"}

#: All ways to lay out four ranks in one or two dimensions.
LAYOUTS = [{name: 4} for name in DIMENSIONS] + [
    dict.fromkeys(pair, 2) for pair in itertools.combinations(DIMENSIONS, 2)
]


def indexes(degrees, alike):
    """The oracle: by coordinates, row by row."""
    shape = [degrees.get(name, 1) for name in DIMENSIONS]
    differing = [place for place, name in enumerate(DIMENSIONS) if name not in alike]
    places = [np.unravel_index(rank, shape) for rank in range(4)]
    kept = [tuple(place[axis] for axis in differing) for place in places]
    order = sorted(set(kept))
    return tuple(order.index(item) for item in kept)


def seen(layouts):
    process = PartialState(cpu=True)
    rank, found = process.process_index, []
    for degrees in layouts:
        mesh = Mesh(degrees, "cpu", 4, rank)
        parts = []
        for ranks in (mesh.batch, mesh.loss):
            members = None if ranks.group is None else dist.get_process_group_ranks(ranks.group)
            parts.append((ranks.size, ranks.index, ranks.index_of, ranks.rank, members))
        names = mesh.device_mesh.mesh_dim_names
        submesh = mesh.submesh("tp", "pp")
        found.append((parts, mesh.degrees, names, None if submesh is None else submesh.mesh_dim_names))
    return found


def test_ranks_of_every_layout_of_four():
    by_rank = worlds.run(seen, 4, LAYOUTS)
    for number, degrees in enumerate(LAYOUTS):
        for rank in range(4):
            parts, all_degrees, names, submesh = by_rank[rank][number]
            assert all_degrees == {name: degrees.get(name, 1) for name in DIMENSIONS}
            assert names == tuple(name for name in DIMENSIONS if name in degrees)
            assert (submesh or ()) == tuple(name for name in ("pp", "tp") if name in degrees)
            for (size, index, index_of, own, members), alike in zip(
                parts, (READ_ALIKE, SAME_LOSS), strict=True
            ):
                assert index_of == indexes(degrees, alike), degrees
                assert (size, index, own) == (max(index_of) + 1, index_of[rank], rank)
                if size in (1, 4):
                    assert members is None, "nobody, or everybody"
                else:
                    assert rank in members
                    assert sorted(index_of[member] for member in members) == list(range(size))


def test_one_rank_needs_no_process_group():
    mesh = Mesh({"tp": 1}, "cpu", 1, 0)
    assert mesh.device_mesh is None
    assert mesh.batch == mesh.loss == Ranks.of_world(1, 0)
    assert mesh.submesh("tp") is None
    assert Mesh({}, "cpu", 1, 0).degrees == dict.fromkeys(DIMENSIONS, 1)


def test_replicas_alone_need_no_process_group():
    mesh = Mesh.of_world(3, 2)
    assert mesh.degrees == {**dict.fromkeys(DIMENSIONS, 1), "dp_replicate": 3}
    assert mesh.batch == mesh.loss == Ranks.of_world(3, 2)
    assert (mesh.device_mesh, mesh.submesh("dp_replicate", "tp")) == (None, None)


@pytest.mark.parametrize(
    ("degrees", "error", "message"),
    [
        ({"ep": 2}, OptionError, "Unknown dimension 'ep' of a mesh; known: pp, dp_replicate, dp_shard, cp, sp, tp"),
        ({"tp": 0}, OptionError, "dimension tp has 0 ranks; it takes a number from 1"),
        ({"tp": -2}, OptionError, "dimension tp has -2 ranks"),
        ({"tp": True}, OptionError, "dimension tp has True ranks"),
        ({"tp": 2.0}, OptionError, r"dimension tp has 2\.0 ranks"),
        (
            {"dp_shard": 2, "tp": 3},
            IncompatibleOptionsError,
            "mesh dp_shard 2 x tp 3 needs 6 ranks, and 4 are running. Start 6 processes, or change a degree",
        ),
        ({}, IncompatibleOptionsError, "mesh 1 needs 1 ranks, and 4 are running"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_are_refused_before_ranks_talk(degrees, error, message):
    with pytest.raises(error, match=message):
        Mesh(degrees, "cpu", 4, 0)
    assert not dist.is_initialized()


def foreign(names, ranks):
    return SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=names)


@pytest.mark.parametrize(
    ("names", "ranks", "index_of"),
    [
        (("dp", "tp"), [[0, 1], [2, 3]], (0, 0, 1, 1)),
        (("tp", "dp"), [[0, 1], [2, 3]], (0, 1, 0, 1)),
        (("dp", "tp"), [[0, 2], [1, 3]], (0, 1, 0, 1)),  # ranks in an order of its own
        (("pp", "dp", "cp"), [[[3], [2]], [[1], [0]]], (1, 0, 1, 0)),
        (("a", "b"), [[0, 1], [2, 3]], (0, 1, 2, 3)),  # names that say nothing: all read for themselves
    ],
)
def test_the_batch_ranks_of_a_mesh_of_somebody_else(names, ranks, index_of):
    for rank in range(4):
        found = batch_ranks(foreign(names, ranks), 4, rank)
        assert found == Ranks(max(index_of) + 1, index_of[rank], None, index_of, rank)


def test_without_a_mesh_every_rank_reads_for_itself():
    assert batch_ranks(None, 3, 1) == Ranks.of_world(3, 1)


@pytest.mark.parametrize(
    ("names", "ranks"), [(None, [0, 1]), (("dp",), [0]), (("dp",), [0, 2]), (("dp", "tp"), [[0, 1], [0, 1]])]
)
def test_a_mesh_names_its_dimensions_and_holds_each_rank_once(names, ranks):
    with pytest.raises(OptionError, match="must name its dimensions and hold each of the 2 ranks once"):
        batch_ranks(foreign(names, ranks), 2, 0)


def groups_after(degrees, times):
    import torch.distributed as dist

    from accel_train import Accelerator, ParallelismConfig
    from accel_train.plugins import FullyShardedDataParallelPlugin

    counts = []
    for _ in range(times):
        config = ParallelismConfig(**degrees)
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), parallelism_config=config)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 2, "cp_size": 2},
        {"dp_shard_size": 4, "ep_size": 2},
    ],
)
def test_accelerators_of_one_process_share_the_groups_of_a_mesh(degrees):
    for counts in worlds.run(groups_after, 4, degrees, 4):
        assert counts[1:] == counts[:-1], counts
