"""Collectives under the names of `Accelerator`, against values that are written down."""

import torch

from accel_train import Accelerator
from testkit import worlds


def exchanged():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    values = torch.tensor([rank + 1.0])
    longer = torch.full((rank + 1,), rank + 1.0)
    return {
        "gather": accelerator.gather({"a": values})["a"].tolist(),
        "sum": accelerator.reduce(values).item(),
        "scaled": accelerator.reduce(values, "mean", 2.0).item(),
        "max": accelerator.reduce((values,), reduction="max")[0].item(),
        "padded": accelerator.pad_across_processes(longer, pad_index=-1).tolist(),
        "padded first": accelerator.pad_across_processes(longer, 0, 0, pad_first=True).tolist(),
    }


def test_what_two_ranks_get():
    common = {"gather": [1.0, 2.0], "sum": 3.0, "scaled": 3.0, "max": 2.0}
    assert worlds.run(exchanged, 2) == [
        common | {"padded": [1.0, -1.0], "padded first": [0.0, 1.0]},
        common | {"padded": [2.0, 2.0], "padded first": [2.0, 2.0]},
    ]


def test_a_process_by_itself_gets_its_own_values():
    assert worlds.run(exchanged, 1) == [
        {"gather": [1.0], "sum": 1.0, "scaled": 2.0, "max": 1.0, "padded": [1.0], "padded first": [1.0]}
    ]
