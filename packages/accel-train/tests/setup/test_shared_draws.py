"""Ranks that read the same samples draw the same random numbers."""

import random

import numpy as np
import pytest
import torch

from accel_state import PartialState, set_seed
from accel_train.ranks import Ranks
from accel_train.setup.shared_draws import share_draws
from testkit import worlds

PAIRS = (0, 0, 1, 1)


def draw():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]


def ranks_of(rank, index_of=PAIRS):
    return Ranks(max(index_of) + 1, index_of[rank], None, index_of, rank)


def test_pairs_that_were_seeded_by_rank_draw_alike():
    def body():
        rank = PartialState(cpu=True).process_index
        set_seed(7, device_specific=True)
        share_draws(ranks_of(rank))
        return draw()

    drawn = worlds.run(body, 4)
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_states_that_agree_stay():
    def body():
        rank = PartialState(cpu=True).process_index
        set_seed(7)
        torch.rand(5)
        share_draws(ranks_of(rank))
        mine = draw()
        set_seed(7)
        torch.rand(5)
        return mine == draw()

    assert worlds.run(body, 4) == [True] * 4


def test_only_what_differs_is_seeded():
    def body():
        rank = PartialState(cpu=True).process_index
        set_seed(7)
        np.random.seed(rank)
        share_draws(ranks_of(rank, (0, 0)))
        mine = draw()
        set_seed(7)
        fresh = draw()
        return mine[1], mine[0] == fresh[0], mine[2] == fresh[2]

    drawn = worlds.run(body, 2)
    assert drawn[0] == drawn[1]
    assert drawn[0][1:] == (True, True)


def test_ranks_that_read_different_samples_are_left_alone_without_a_collective():
    set_seed(3)
    mine = draw()
    set_seed(3)
    share_draws(Ranks.of_world(4, 2))
    assert draw() == mine


DEGREES = [
    ({"tp_size": 2}, True),
    ({"cp_size": 2, "dp_shard_size": 1}, True),
    ({"dp_shard_size": 2}, False),
]


@pytest.mark.parametrize(("degrees", "alike"), DEGREES)
def test_prepare_seeds_the_ranks_of_a_group_alike(degrees, alike):
    def body(degrees):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        from accel_train import Accelerator, ParallelismConfig

        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        if "tp_size" in degrees:
            parallelize_module(model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel()})
        set_seed(1, device_specific=True)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return draw()

    first, second = worlds.run(body, 2, degrees)
    assert (first == second) is alike


def test_loading_what_another_mesh_saved_seeds_alike(tmp_path):
    def body(folder, degrees):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        from accel_train import Accelerator, ParallelismConfig

        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        if "tp_size" in degrees:
            parallelize_module(model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel()})
        set_seed(1, device_specific=True)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if "tp_size" in degrees:
            accelerator.load_state(folder)
        else:
            accelerator.save_state(folder)
        return draw()

    saved = worlds.run(body, 2, str(tmp_path / "state"), {"dp_shard_size": 2})
    assert saved[0] != saved[1]
    first, second = worlds.run(body, 2, str(tmp_path / "state"), {"tp_size": 2})
    assert first == second
