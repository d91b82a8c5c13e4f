"""Degrees of a script or a launcher, as a mesh."""

from types import SimpleNamespace

import pytest
import torch

from accel_train import ParallelismConfig
from accel_train.errors import IncompatibleOptionsError
from accel_train.setup.meshes import asked_degrees, make_mesh, sequences
from accel_train.strategies.base import Strategy
from accel_train.strategies.ddp import DDPStrategy

PROCESS = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0)


@pytest.mark.parametrize("config", [None, ParallelismConfig()])
def test_without_degrees_the_strategy_makes_its_own_mesh(config):
    assert asked_degrees(config, 4) is None


def test_degrees_have_the_names_of_dimensions():
    degrees = asked_degrees(ParallelismConfig(tp_size=2, dp_shard_size=2), 4)
    assert {name: degree for name, degree in degrees.items() if degree > 1} == {"dp_shard": 2, "tp": 2}


def test_degrees_multiply_to_the_number_of_ranks():
    with pytest.raises(IncompatibleOptionsError, match=r"ParallelismConfig: .*3.*4"):
        asked_degrees(ParallelismConfig(tp_size=3), 4)


def test_a_strategy_takes_its_own_dimensions_only():
    degrees = asked_degrees(ParallelismConfig(dp_shard_size=2), 2)
    with pytest.raises(
        IncompatibleOptionsError, match=r"'ddp' cannot train with dp_shard_size=2; it takes .*'fsdp2'"
    ):
        make_mesh(DDPStrategy, None, PROCESS, degrees)


def test_the_strategy_is_asked_where_nobody_gives_degrees():
    class Own(Strategy):
        name = "own"

        @classmethod
        def make_mesh(cls, config, device, size, rank):
            return config, device.type, size, rank

    assert make_mesh(Own, "its plugin", PROCESS, None) == ("its plugin", "cpu", 1, 0)


@pytest.mark.parametrize("config", [None, ParallelismConfig(tp_size=2)])
def test_sequences_stay_whole_without_cp_and_sp(config):
    assert sequences(config, mesh=None) is None
