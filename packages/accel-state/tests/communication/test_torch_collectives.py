"""Collectives that torch runs without this project's: how ranks find out that they wait in different ones."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from accel_state.communication.torch_collectives import (
    PendingCollective,
    Waits,
    break_connections,
    cannot_meet,
    issued,
    not_begun,
)
from accel_state.errors import CollectiveMismatchError
from accel_state.world.process import PartialState
from testkit import worlds

recorded = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="gloo is not recorded before torch 2.13",
)
REDUCE, GATHER = PendingCollective(4, "all_reduce", "Float 3"), PendingCollective(4, "all_gather", "Float 3")


def test_a_collective_that_this_rank_has_begun_too_proves_nothing():
    assert not_begun({"0": REDUCE}, {"0": 4}) == []
    assert not_begun({"0": REDUCE}, {"0": 3}) == [REDUCE]
    assert not_begun({"1": REDUCE}, {"0": 3}) == []  # a group without this rank


def test_ranks_that_wait_for_each_other_cannot_meet():
    assert cannot_meet({"0": GATHER}, {"0": 4}, {"0": REDUCE}, {"0": 4})
    assert not cannot_meet({"0": REDUCE}, {"0": 4}, {"0": REDUCE}, {"0": 4})
    # In different groups: each has begun one that the other has not; or one rank is merely late.
    assert cannot_meet({"0": REDUCE}, {"0": 4, "1": 3}, {"1": GATHER}, {"0": 3, "1": 4})
    assert not cannot_meet({"0": REDUCE}, {"0": 4, "1": 3}, {"1": GATHER}, {"0": 4, "1": 4})


@recorded
def test_what_a_rank_waits_in_is_found_once_nothing_begins():
    def body():
        PartialState()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.5)  # the recorder notes the end of one in a thread of its own
        waits = Waits(tuple)
        begun = issued()
        work = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(5), async_op=True)
        now = time.monotonic()
        early = waits.look(now, 1.0)
        late = dict(waits.look(now + 1.1, 1.0))
        if work is None:
            time.sleep(0.5)
            work = dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()
        return early, late, begun

    (early, late, begun), (_, other, _) = worlds.run(body, 2)
    assert early == {}
    assert late == {"0": PendingCollective(begun["0"] + 1, "all_reduce", "Float 5")}
    assert other == {}


def test_broken_connections_end_a_collective():
    def body():
        PartialState()
        if dist.get_rank() == 0:
            threading.Timer(0.3, break_connections, [dist.group.WORLD]).start()
            begin = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1))
            return time.monotonic() - begin
        time.sleep(0.6)
        return 0.0

    assert 0.2 < worlds.run(body, 2)[0] < 5


@recorded
def test_a_collective_of_torch_on_one_rank_is_named_on_the_other():
    def body():
        state = PartialState()
        dist.all_reduce(torch.ones(1))
        try:
            if state.process_index:
                dist.all_gather_into_tensor(torch.empty(2 * 40), torch.ones(40))
            else:
                state.wait_for_everyone()
        except (CollectiveMismatchError, RuntimeError) as error:
            return str(error)
        return ""

    text, other = worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "1"})
    assert other  # it does not wait for ever
    assert re.search(
        r"rank 1 waits in torch's all_gather \(Float 40\) at .*test_torch_collectives.py:\d+", text
    )
    assert "rank 0: in wait_for_everyone (#1) at" in text


@pytest.mark.wide
@recorded
def test_different_collectives_of_torch_are_reported_and_ended():
    def body():
        state = PartialState()
        dist.all_reduce(torch.ones(1))
        begin = time.monotonic()
        collective = (
            (lambda: dist.all_gather_into_tensor(torch.empty(2 * 3), torch.ones(3)))
            if state.process_index
            else (lambda: dist.all_reduce(torch.ones(3)))
        )
        with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(RuntimeError):
            collective()
        return errors.getvalue(), time.monotonic() - begin

    results = worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "1"})
    text = "".join(said for said, _ in results)
    assert text.count("cannot complete") == 1
    assert "rank 0: in torch's all_reduce (Float 3) at" in text
    assert "rank 1: in torch's all_gather (Float 3) at" in text
    assert all(seconds < 15 for _, seconds in results)


@recorded
@pytest.mark.full
def test_a_rank_that_is_late_for_a_collective_of_torch_is_reported_and_waited_for():
    def body():
        state = PartialState()
        dist.all_reduce(torch.ones(1))
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            if state.process_index:
                time.sleep(4)
            total = torch.ones(3)
            dist.all_reduce(total)
            time.sleep(0.2)
        return errors.getvalue(), total.tolist()

    (said, total), (silent, _) = worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "1"})
    assert total == [2.0] * 3
    assert silent == ""
    assert re.search(r"rank 0 has been waiting for \d\.\d s in torch's all_reduce \(Float 3\) at", said)
    assert "not arrived: rank 1: in no collective" in said
    assert "time.sleep(4)" in said
