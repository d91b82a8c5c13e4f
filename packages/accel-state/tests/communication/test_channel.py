"""The channel of a group: fingerprints, mismatches, settings of the checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_state.communication import collectives
from accel_state.errors import CollectiveMismatchError, DistributedOperationException
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
