from __future__ import annotations

import dataclasses
import sys
import types
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from accel_state.errors import CollectiveMismatchError, ConfigError
from accel_state.operations.scatter import Scatterer, scatter
from accel_state.world.process import PartialState
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    note: str


def values(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(shape, generator=generator) * 5).to(dtype)


def check(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got.float(), expected.float())
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            check(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            check(a, b)
    elif dataclasses.is_dataclass(expected):
        check(vars(got), vars(expected))
    else:
        assert got == expected


@pytest.mark.parametrize("source", [0, 1])
def test_each_rank_gets_its_part(source):
    def part(rank, step):
        """Structures, shapes, dtypes and values that do not depend on tensors change from step to step."""
        if step == 3:
            return None
        if step == 4:
            return {"words": ["a" * rank, step], "n": 3}
        rows = 4 if step < 3 else (rank + 2 * step) % 5
        return {
            "x": values(rank, step, rows, 3),
            "p": Pair(
                values(rank, step, rows, dtype=torch.int64), [values(rank, step, 1, dtype=torch.bfloat16)]
            ),
            "o": OrderedDict(z=values(rank, step), y=values(rank, step, 2, dtype=torch.bool)),
            "r": Record(values(rank, step, 5, dtype=torch.uint8), f"step {step % 2}"),
        }

    def body():
        # The classes of this module travel by reference, as those of a script do.
        home = types.ModuleType(Pair.__module__)
        home.Pair, home.Record = Pair, Record
        sys.modules[Pair.__module__] = home
        state = PartialState()
        stream = Scatterer(source)
        for step in range(12):
            mine = [part(rank, step) for rank in range(state.num_processes)]
            got = stream(mine if state.process_index == source else None)
            check(got, part(state.process_index, step))
        big = scatter(
            [values(r, 1, 500_000 + r) for r in range(3)] if state.process_index == source else None, source
        )
        check(big, values(state.process_index, 1, 500_000 + state.process_index))

    worlds.run(body, 3)


def test_t22_each_rank_receives_its_slice():
    """Bytes received stay within 1.1 times the local batch, with batches of any length."""

    def body():
        state = PartialState()
        rank, ranks = state.process_index, state.num_processes
        stream = Scatterer()
        useful = 0
        for step in range(40):
            rows = 32 if step < 20 else 17 + (7 * step) % 23
            batch = {
                "x": values(0, step, rows * ranks, 16),
                "y": values(0, step, rows * ranks, dtype=torch.int64),
            }
            parts = [{k: v[r * rows : (r + 1) * rows] for k, v in batch.items()} for r in range(ranks)]
            got = stream(parts if rank == 0 else None)
            check(got, parts[rank])
            useful += sum(v.nbytes for v in got.values())
        return stream.bytes_received, useful, stream.bytes_sent

    results = worlds.run(body, 4)
    assert results[0][0] == 0
    for received, useful, _ in results[1:]:
        assert useful <= received <= 1.1 * useful
    assert results[0][2] == sum(received for received, *_ in results)


def test_a_steady_stream_takes_one_message_per_part():
    def body():
        state = PartialState()
        stream = Scatterer()
        sizes = []
        for step in range(6):
            before = stream.bytes_received
            stream([values(r, step, 8, 4) for r in range(2)] if state.process_index == 0 else None)
            sizes.append(stream.bytes_received - before)
        return sizes

    sizes = worlds.run(body, 2)[1]
    assert sizes[0] > sizes[1] == sizes[5] == 8 * 4 * 4 + 32


def test_wrong_parts_are_errors_on_all_ranks():
    def body():
        state = PartialState()
        stream = Scatterer()
        found = []
        for wrong in ([1], None, [lambda: 0, lambda: 0], [torch.zeros(2).to_sparse()] * 2):
            try:
                stream(wrong if state.process_index == 0 else None)
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        good = stream([torch.tensor(r) for r in range(2)] if state.process_index == 0 else None)
        assert good.item() == state.process_index
        return found

    source, receiver = worlds.run(body, 2)
    assert [name for name, _ in source] == ["ConfigError", "ConfigError", "TypeError", "TypeError"]
    assert [name for name, _ in receiver] == ["CollectiveMismatchError"] * 4
    assert "2 are needed, got 1" in receiver[0][1]
    assert "got none" in receiver[1][1]
    assert "pickled" in receiver[2][1]
    assert "layout" in receiver[3][1]


def test_one_process():
    part = {"x": torch.zeros(2)}
    assert scatter([part]) is part
    with pytest.raises(ConfigError, match="1 are needed, got 2"):
        scatter([part, part])
    with pytest.raises(ConfigError, match="from_process is 1"):
        Scatterer(1)


def test_a_rank_that_begins_the_next_stream_early_gets_no_part_of_the_last():
    """As where one rank leaves a loop: its parts would be taken for those of the next loop, or end the process."""

    def body():
        state = PartialState()
        first, second = Scatterer(), Scatterer()
        parts = [torch.arange(8.0)] * 2 if state.process_index == 0 else None
        for _ in range(3):
            first(parts)
        with pytest.raises(CollectiveMismatchError) as caught:
            (second if state.process_index else first)(parts)
        return str(caught.value)

    for text in worlds.run(body, 2, environ={"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "0.5"}):
        assert "rank 0: in scatter (stream 1) (#4) at" in text
        assert "rank 1: in scatter (stream 2) (#4) at" in text
