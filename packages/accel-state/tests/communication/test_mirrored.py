"""A group whose other ranks say the same as this one, against gloo ranks that really do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from testkit import worlds

SIZE = 3


def collectives():
    """What a rank gets when all ranks give the same."""
    rank = dist.get_rank()
    given = torch.arange(6.0) + 1
    results = {}
    for name in ("SUM", "MAX", "MIN", "PRODUCT"):
        tensor = given.clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        results[name] = tensor
    gathered = torch.empty(SIZE * 6)
    dist.all_gather_into_tensor(gathered, given)
    parts = [torch.empty(6) for _ in range(SIZE)]
    dist.all_gather(parts, given)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, given)
    swapped = torch.empty(6)
    dist.all_to_all_single(swapped, given[2 * rank : 2 * rank + 2].repeat(SIZE))
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"a": 1})
    tensor = given.clone()
    dist.broadcast(tensor, 0)
    dist.barrier()
    pair = dist.new_group([0, 1])
    shared = torch.ones(1)
    if rank < 2:
        dist.all_reduce(shared, group=pair)
    return (
        results,
        gathered,
        parts,
        part,
        objects,
        tensor,
        shared,
        dist.get_process_group_ranks(dist.group.WORLD),
    )


def real():
    import os

    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=SIZE)
    found = collectives()
    dist.destroy_process_group()
    return found


def mirrored(rank):
    from accel_state.communication import mirrored

    calls = []
    mirrored.register(lambda ranks, call: calls.append((tuple(ranks), call)))
    dist.init_process_group(mirrored.BACKEND, store=dist.HashStore(), rank=rank, world_size=SIZE)
    return collectives(), calls


def test_results_are_those_of_ranks_that_give_the_same():
    wanted = worlds.run(real, SIZE)
    for rank in range(SIZE):
        [(found, calls)] = worlds.run(mirrored, 1, rank)
        torch.testing.assert_close(found[:4], wanted[rank][:4])
        assert found[4] == wanted[rank][4]
        torch.testing.assert_close(found[5:], wanted[rank][5:])
        assert calls[0] == ((0, 1, 2), ("all_reduce", "float32[6]", 24, None))
        assert ((0, 1) in [ranks for ranks, _ in calls]) == (rank < 2)
