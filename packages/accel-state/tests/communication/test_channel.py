"""The channel of a group: fingerprints, mismatches, settings of the checks."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import pytest
import torch

from accel_state.communication.channel import Channel
from accel_state.errors import CollectiveMismatchError, DistributedOperationException
from accel_state.operations import collectives
from accel_state.world.process import PartialState
from testkit import worlds


def start(mode: str = "auto") -> tuple[int, int]:
    state = PartialState()
    collectives.set_collective_checks(mode)
    return state.process_index, state.num_processes


def errors_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def test_t20_unequal_shapes_are_named():
    def body():
        import time

        rank, ranks = start()
        wrong: list[tuple[Any, Any]] = [
            (torch.zeros(3, 2), torch.zeros(2, 2)),
            (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
            ([torch.zeros(2)], (torch.zeros(2),)),
            ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
            ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
            (torch.zeros(2), [torch.zeros(2)]),
            (torch.zeros(500_000), torch.zeros(400_000)),
        ]
        begin = time.monotonic()
        found = []
        for function in (collectives.gather, collectives.reduce, collectives.broadcast):
            for usual, odd in wrong:
                found.append(errors_of(function, odd if rank == ranks - 1 else usual))
        assert collectives.gather(torch.tensor([rank])).tolist() == list(range(ranks))
        return found, time.monotonic() - begin

    for found, seconds in worlds.run(body, 3):
        assert {name for name, _ in found} == {"CollectiveMismatchError"}
        assert "rank 0: gather at " in found[0][1]
        assert "test_channel.py:" in found[0][1]
        assert "float32[3, 2]" in found[0][1]
        assert "rank 2: gather at " in found[0][1]
        assert "float32[2, 2]" in found[0][1]
        assert "ragged=True" in found[0][1]
        assert "float64[2]" in found[1][1]
        assert "[float32[2], float32[2]]" in found[3][1]
        assert "{'b': float32[2]}" in found[4][1]
        assert "rank 1: reduce" in found[7][1]
        assert "rank 1: broadcast" in found[14][1]
        assert seconds < 2
    assert issubclass(CollectiveMismatchError, DistributedOperationException)


def test_t20_other_arguments_and_operations_are_named():
    def body():
        rank, _ = start()
        x = torch.ones(2)
        found = [
            errors_of(collectives.reduce, x, "sum" if rank else "mean"),
            errors_of(collectives.broadcast, x, rank),
            errors_of(collectives.gather if rank else collectives.reduce, x),
            errors_of(PartialState().wait_for_everyone) if rank else errors_of(collectives.gather, x),
            errors_of(collectives.gather, x if rank else "text"),
            errors_of(collectives.gather, x.to_sparse() if rank else x),
        ]
        assert collectives.reduce(x, "sum").tolist() == [2.0, 2.0]
        return found

    first, second = worlds.run(body, 2)
    assert [name for name, _ in first] == ["CollectiveMismatchError"] * 4 + [
        "TypeError",
        "CollectiveMismatchError",
    ]
    assert [name for name, _ in second] == ["CollectiveMismatchError"] * 5 + ["TypeError"]
    assert "rank 0: gather at" in first[3][1]
    assert "rank 1: wait_for_everyone at" in first[3][1]
    assert "same order" in first[3][1]
    assert "found str at the top" in second[4][1]
    assert "layout" in first[5][1]


def test_t20_debug_mode_checks_everything():
    def body():
        channel = PartialState().channel()
        assert channel.check_device
        assert channel.check_cpu
        return errors_of(collectives.gather, torch.zeros(1 + channel.rank))[0]

    assert worlds.run(body, 2, environ={"ACCELERATE_DEBUG_MODE": "true"}) == ["CollectiveMismatchError"] * 2


def test_checks_are_switched_by_the_environment():
    def body():
        channel = PartialState().channel()
        return channel.check_cpu, channel.check_device, channel.settings.report_after

    def settings(**environ):
        return worlds.run(body, 2, environ={k.upper(): v for k, v in environ.items()})[0]

    assert settings() == (True, False, 30.0)
    assert settings(accelerate_collective_checks="off") == (False, False, 30.0)
    assert settings(accelerate_collective_checks="ON", accelerate_collective_timeout_report="5")[1:] == (
        True,
        5.0,
    )
    with pytest.raises(worlds.RankError, match="'maybe'"):
        settings(accelerate_collective_checks="maybe")
    with pytest.raises(worlds.RankError, match=r"TIMEOUT_REPORT is 'soon'"):
        settings(accelerate_collective_timeout_report="soon")


def test_values_in_the_fingerprint_do_not_depend_on_the_process():
    from accel_state.communication.channel import fingerprint

    assert fingerprint((1, "a")) == fingerprint((True, "a")) == fingerprint((1.0, "a"))
    assert fingerprint((1, "a")) != fingerprint((2, "a"))
    assert fingerprint(torch.Size([2])) == fingerprint((2,))

    class Key:
        pass

    assert fingerprint((Key(),)) == fingerprint((Key(),))


def test_two_threads_in_one_group_are_named():
    """They would take each other's data: ranks pair collectives by their order."""

    def body():
        import threading
        import time

        from accel_state.errors import StateError

        rank, _ = start()
        state = PartialState()
        if rank:
            time.sleep(1)  # rank 0 waits meanwhile, with one of its threads
            return collectives.gather(torch.tensor([rank])).tolist(), ""
        found = []
        thread = threading.Thread(
            target=lambda: found.append(collectives.gather(torch.tensor([rank])).tolist()), name="prefetch"
        )
        thread.start()
        while not state.channels.in_progress():
            time.sleep(0.01)
        with pytest.raises(StateError) as caught:
            collectives.reduce(torch.ones(1))
        thread.join()
        return found[0], str(caught.value)

    (first, text), (second, _) = worlds.run(body, 2)
    assert first == second == [0, 1]
    assert "thread 'MainThread' calls reduce at" in text
    assert "thread 'prefetch' is in gather (#1) at" in text
    assert text.count("test_channel.py:") == 2
    assert "new_group" in text


def test_threads_with_groups_of_their_own_do_not_mix():
    def body():
        import threading

        import torch.distributed as dist

        rank, ranks = start()
        groups = [dist.new_group(), dist.new_group()]
        found = [[], []]

        def work(index):
            for step in range(30):
                value = torch.tensor([100 * index + 10 * step + rank])
                found[index].append(collectives.gather(value, group=groups[index]).tolist())

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[[100 * i + 10 * s + r for r in range(ranks)] for s in range(30)] for i in range(2)]

    worlds.run(body, 2)


def test_collectives_that_are_done_are_released_up_to_the_first_that_is_not():
    """Their works hold tensors, on devices, where the host only issues collectives."""
    works = [types.SimpleNamespace(is_completed=lambda done=done: done) for done in (True, True, False, True)]
    channel = types.SimpleNamespace(_pending=deque((n, "gather", work) for n, work in enumerate(works)))
    Channel.release_completed(channel)
    assert [number for number, _, _ in channel._pending] == [2, 3]
    works[2].is_completed = lambda: True
    Channel.release_completed(channel)
    Channel.release_completed(channel)
    assert not channel._pending
