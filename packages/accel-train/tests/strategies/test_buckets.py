"""The memory of DDP's buckets, found without DDP's help."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel_train import Accelerator, DistributedDataParallelKwargs
from testkit import worlds


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


def found(options: dict[str, Any]) -> list[tuple[int, bool]]:
    """Bytes of buckets before each step and after the last, and whether gradients are in them."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    wrapped = accelerator.prepare(model())
    seen = []
    for _ in range(3):
        buckets = wrapped.buckets.tensors()
        seen.append((sum(t.nbytes for t in buckets), len({t.data_ptr() for t in buckets}) == len(buckets)))
        del buckets
        accelerator.backward(wrapped(torch.ones(2, 40)).sum())
        starts = {t.untyped_storage().data_ptr() for t in wrapped.buckets.tensors()}
        views = {p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()}
        assert (views <= starts) is options.get("gradient_as_bucket_view", True)
        wrapped.zero_grad()
    return seen


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.001}],
    ids=str,
)
def test_all_buckets_are_found_and_none_is_kept(options):
    size = sum(p.nbytes for p in model().parameters())
    for seen in worlds.run(found, 2, options):
        assert seen == [(size, True)] * 3


def copied() -> list[int]:
    accelerator = Accelerator()
    wrapped = accelerator.prepare(model())
    copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    found = [each.buckets.tensors() for each in (wrapped, *copies)]
    assert len({tensor.data_ptr() for tensors in found for tensor in tensors}) == 3
    return [len(tensors) for tensors in found]


def test_a_copied_wrapper_has_buckets_of_its_own():
    assert worlds.run(copied, 2) == [[1, 1, 1]] * 2
