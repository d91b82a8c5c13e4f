"""Replicas are compared by samples; what differs is named."""

import warnings

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, save_training_state
from accel_ckpt.saving.drift import replica_marks, warn_of_drift
from accel_state.world.process import PartialState
from testkit import worlds

KINDS = {
    "plain": torch.randn(300, 7),
    "small": torch.randn(2),
    "scalar": torch.tensor(2.0),
    "bfloat16": torch.randn(9).bfloat16(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(40, 30).t(),
    "complex": torch.randn(5, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_equal_where_tensors_are_and_differ_where_they_differ(kind):
    tensor = nn.Parameter(KINDS[kind])
    same = nn.Parameter(KINDS[kind].clone(memory_format=torch.preserve_format))
    other = nn.Parameter(KINDS[kind] * 1.5)
    assert replica_marks([tensor, tensor]) == replica_marks([same, same])
    marks, changed = replica_marks([tensor, tensor]), replica_marks([tensor, other])
    assert len(marks) == 16
    assert marks[:8] == changed[:8]
    assert marks[8:] != changed[8:]


def test_what_has_no_values_is_not_compared():
    assert len(replica_marks([torch.empty(3, device="meta"), torch.empty(0), torch.ones(1)])) == 24
    assert replica_marks([]) == ""


def test_the_first_tensor_that_differs_is_named():
    names = ["a", "b", "c"]
    tensors = [torch.zeros(3), torch.zeros(4), torch.zeros(5)]
    marks = replica_marks(tensors)
    others = replica_marks([tensors[0], tensors[1] + 1, tensors[2] + 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_drift("net", names, [marks, marks])
    with pytest.warns(
        UserWarning, match=r"of net .*: b \(the first of 2 tensors\) has other values on rank 1, 3 than"
    ):
        warn_of_drift("net", names, [marks, others, marks, others])
    with pytest.warns(UserWarning, match="ranks 1 do not hold the same tensors"):
        warn_of_drift("net", names, [marks, marks[:16]])


def test_shared_tensors_that_ranks_do_not_hold_alike_are_named(tmp_path):
    def work(folder, drifts):
        rank = PartialState().process_index
        moment = torch.ones(200, 200) + (rank if drifts else 0)
        tree = {"a": torch.ones(200, 200), "exp_avg": moment}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save_training_state(
                folder, models=[], shared={"optimizer": tree}, per_rank={}, replicated=["optimizer"]
            )
        return [str(warning.message) for warning in said]

    assert worlds.run(work, 2, str(tmp_path / "c"), False) == [[], []]
    [said], others = worlds.run(work, 2, str(tmp_path / "c"), True)
    assert "optimizer.exp_avg (the first of 1 tensors) has other values on rank 1 than on rank 0" in said
    assert others == []


def test_a_checkpointer_names_the_module_whose_replicas_drift(tmp_path):
    def work(folder, drifts):
        rank = PartialState().process_index
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        if drifts:
            with torch.no_grad():
                model.module.bias.add_(rank)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Checkpointer(folder).save(int(drifts), {"net": {"body": model, "plain": nn.Linear(2, 2)}})
        return [str(warning.message) for warning in said]

    assert worlds.run(work, 2, str(tmp_path / "c"), False) == [[], []]
    [said], others = worlds.run(work, 2, str(tmp_path / "c"), True)
    assert "the replicas of net.body (DistributedDataParallel) have drifted apart: module.bias" in said
    assert others == []
