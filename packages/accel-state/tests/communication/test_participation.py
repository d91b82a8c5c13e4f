from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_state.errors import CollectiveMismatchError
from accel_state.operations import collectives
from accel_state.world.process import PartialState
from testkit import worlds

ROOT = Path(__file__).parents[4]


def launch(script: str, world: int) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of ranks that end as scripts end."""
    path = os.pathsep.join([str(ROOT / "packages/accel-state/src"), str(ROOT / "tools")])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(worlds.free_port()), "PYTHONPATH": path}
    place |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)}
    code = "from accel_state.world.process import PartialState\n" + textwrap.dedent(script)
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **place, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [process.communicate(timeout=40) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def meet_often() -> list[bool]:
    state = PartialState()
    found = [state.main_process_alone("work") for _ in range(20)]
    for _ in range(2):
        if state.is_main_process:
            found.append(state.main_process_alone("work"))
            found.append(state.main_process_alone("work"))
        state.wait_for_everyone()
        found.append(state.main_process_alone("work"))
    return found


def test_messages_that_are_signed_are_cleaned_up() -> None:
    main, other = worlds.run(meet_often, 2, environ={"ACCEL_STORE_SECRET": "5" * 32})
    assert main == [False] * 20 + [True, True, False] * 2
    assert other == [False] * 22


@pytest.mark.wide(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_or_the_main_process_alone(ranks: int) -> None:
    main, *others = worlds.run(meet_often, ranks)
    assert main == [False] * 20 + [True, True, False] * 2
    assert others == [[False] * 22] * (ranks - 1)


def test_a_world_of_one_is_complete() -> None:
    assert PartialState(cpu=True).main_process_alone("work") is False


def slow_ranks() -> bool:
    state = PartialState()
    time.sleep(0.7 * state.process_index)
    return state.main_process_alone("work")


@pytest.mark.wide
def test_a_rank_that_is_late_is_waited_for() -> None:
    assert worlds.run(slow_ranks, 3) == [False] * 3


def others_in_torch(kind: str) -> bool:
    """The others are in a collective, or a backward, that only torch knows of."""
    state = PartialState()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    state.wait_for_everyone()
    alone = state.is_main_process and state.main_process_alone("work")
    if kind == "backward":
        model(torch.ones(1, 2)).sum().backward()
    else:
        dist.all_reduce(torch.ones(1))
    assert state.main_process_alone("more") is False
    return alone


@pytest.mark.wide(but=["all_reduce"])
@pytest.mark.parametrize("kind", ["backward", "all_reduce"])
def test_collectives_of_torch_are_proof(kind: str) -> None:
    assert worlds.run(others_in_torch, 3, kind) == [True, False, False]


def messages() -> bool:
    """Messages of the dispatcher differ in number between ranks, and are no proof of anything."""
    from accel_state.operations.scatter import Scatterer

    state = PartialState()
    scatter = Scatterer()
    for _ in range(3):
        scatter([torch.ones(2)] * 3 if state.is_main_process else None)
    time.sleep(0.6 * state.process_index)
    return state.main_process_alone("work")


def test_scattered_batches_are_no_proof() -> None:
    assert worlds.run(messages, 3) == [False] * 3


def refused() -> tuple[str, bool]:
    state = PartialState()
    if state.is_main_process:
        assert state.main_process_alone("work")
        assert state.participation is not None
        with pytest.raises(ValueError, match="not like this") as caught:
            state.participation.refuse("work", ValueError("not like this"))
    else:
        with pytest.raises(CollectiveMismatchError) as caught:
            state.wait_for_everyone()
    return str(caught.value), state.main_process_alone("work")


def test_a_refusal_reaches_the_ranks_that_wait() -> None:
    main, other = worlds.run(refused, 2)
    assert main == ("not like this", False)
    assert "rank 0: work at " in other[0]
    assert "ValueError: not like this" in other[0]
    assert other[1] is False


def some_call(calling: list[int]) -> str:
    state = PartialState()
    calls = state.process_index in calling
    with pytest.raises(CollectiveMismatchError) as caught:
        state.main_process_alone("work") if calls else collectives.gather_object([1])
    return str(caught.value)


@pytest.mark.wide(but=["calling0"])
@pytest.mark.parametrize("calling", [[1], [0, 1], [1, 2], [0, 2]])
def test_some_ranks_are_a_mismatch_on_all(calling: list[int]) -> None:
    for error in worlds.run(some_call, 3, calling):
        assert "work" in error
        assert "gather_object" in error


@pytest.mark.full
def test_ranks_that_have_ended_do_not_take_part() -> None:
    script = """
        state = PartialState()
        state.wait_for_everyone()
        if state.is_main_process:
            print(state.main_process_alone("work"), state.main_process_alone("work"))
    """
    main, *others = launch(script, 3)
    assert main[0] == 0, main[2]
    assert (
        main[1].splitlines()[-1] == "True True"
    )  # gloo of torch before 2.13 prints a line of its own before
    assert [status for status, *_ in others] == [0, 0]


def test_a_rank_that_has_failed_is_an_error() -> None:
    script = """
        state = PartialState()
        state.wait_for_everyone()
        if not state.is_main_process:
            raise ValueError("no such file")
        state.main_process_alone("work")
    """
    main, _ = launch(script, 2)
    assert main[0] == 1
    assert "CollectiveMismatchError" in main[2]
    assert "rank 1 is gone (exited after ValueError: no such file at <string>:6)" in main[2]


def test_without_a_watchdog_every_rank_counts_as_calling() -> None:
    off = {"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0"}
    assert worlds.run(switched_on_later, 2, environ=off) == [[False, True], [False]]


def switched_on_later() -> list[bool]:
    state = PartialState()
    found = [state.main_process_alone("work")]
    collectives.set_collective_checks(report_after=30.0)
    if state.is_main_process:
        found.append(state.main_process_alone("work"))
    state.wait_for_everyone()
    return found


def test_the_store_is_kept_clean() -> None:
    sizes = worlds.run(count_keys, 2)[0]
    assert sizes[1] <= sizes[0] + 4  # not two hundred keys


def count_keys() -> list[int]:
    state = PartialState()
    sizes = []
    for rounds in (5, 200):
        for _ in range(rounds):
            state.main_process_alone("work")
        assert state.store is not None
        state.wait_for_everyone()
        sizes.append(state.store.num_keys())
        state.wait_for_everyone()
    return sizes
