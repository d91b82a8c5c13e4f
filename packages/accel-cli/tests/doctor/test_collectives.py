"""The collectives of the doctor on gloo ranks: right ones pass, and a wrong or missing one is said."""

import torch
import torch.distributed as dist

from accel_cli.doctor import collectives
from accel_cli.doctor.collectives import COLLECTIVES, NOT_IN_BACKEND, check_collective
from testkit import worlds


def checked():
    from accel_state import PartialState

    PartialState()
    collectives._TIMED = 1 << 8  # what is timed is not what is tested
    cpu = torch.device("cpu")
    right = {name: check_collective(name, cpu) for name in COLLECTIVES}
    plain, barrier = dist.all_reduce, dist.barrier

    def doubled(tensor, *args, **kwargs):
        plain(tensor, *args, **kwargs)
        tensor *= 2

    def absent():
        raise RuntimeError("Backend x does not support barrier")

    dist.all_reduce = doubled
    wrong = check_collective("all_reduce", cpu)[1]
    dist.all_reduce, dist.barrier = plain, absent
    missing = check_collective("barrier", cpu)
    dist.barrier = barrier
    return right, wrong, missing


def test_what_two_ranks_find():
    for right, wrong, missing in worlds.run(checked, 2):
        assert len(right) == 10
        assert {name: problem for name, (_, problem) in right.items() if problem} == {}
        assert all(0 < seconds < 60 for seconds, _ in right.values())
        # Ranks give 0, 1, 2, … and 10, 11, 12, …
        assert wrong == "gave [20, 24, 28, 32, 36, 40, …]; expected [10, 12, 14, 16, 18, 20, …]"
        assert missing == (0.0, NOT_IN_BACKEND)
