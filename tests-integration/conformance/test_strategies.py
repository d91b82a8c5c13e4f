"""Every registered strategy holds what the seam promises; a class in the registry brings its tests.

`hatch run conformance` prints strategy x property.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from accel_train.precision.registry import PRECISIONS
from accel_train.strategies.registry import STRATEGIES
from testkit import worlds
from testkit.conformance import Case, Record, oracle, train, use_installed

use_installed()
MEMBERS = STRATEGIES.names()
TOLERANCE = {"no": 1e-12, "bf16": 2e-2, "fp16": 5e-3}


def ranks_of(name: str) -> list[int]:
    return [2, 4] if STRATEGIES.get(name).capabilities.needs_process_group else [1]


def precisions_of(name: str) -> list[str]:
    declared = STRATEGIES.get(name).capabilities.precisions
    return [precision for precision in PRECISIONS.names() if declared is None or precision in declared]


CELLS = [(name, ranks) for name in MEMBERS for ranks in ranks_of(name)]
cells = pytest.mark.parametrize(("name", "ranks"), CELLS)
smallest = pytest.mark.parametrize(("name", "ranks"), [(name, ranks_of(name)[0]) for name in MEMBERS])


def run(case: Case, ranks: int) -> tuple[list[Record], Record]:
    records = worlds.run(train, ranks, case)
    return records, oracle(case, records)


def check(case: Case, records: list[Record], expected: Record) -> None:
    """Losses, weights after every step, and norms, on every rank."""
    bound = TOLERANCE[case.precision]
    for record in records:
        index, size = record.batch
        torch.testing.assert_close(record.losses, expected.losses[index::size], rtol=bound, atol=bound)
        torch.testing.assert_close(record.norms, expected.norms, rtol=bound, atol=bound)
        assert len(record.weights) == len(expected.weights) > 0
        for here, there in zip(record.weights, expected.weights, strict=True):
            torch.testing.assert_close(here, there, rtol=bound, atol=bound)


@cells
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training(name, ranks, accumulation):
    for precision in precisions_of(name):
        case = Case(name, precision, accumulation)
        check(case, *run(case, ranks))


@smallest
def test_short_window(name, ranks):
    """5 batches in windows of 4: the second window holds one."""
    case = Case(name, accumulation=4, optimizer="SGD")
    records, expected = run(case, ranks)
    assert [len(window) for window in records[0].windows] == [4, 1, 4, 1]
    check(case, records, expected)


@cells
@pytest.mark.parametrize("accumulation", [1, 3])
def test_items(name, ranks, accumulation):
    case = Case(name, accumulation=accumulation, items=True)
    if STRATEGIES.get(name).capabilities.num_items:
        check(case, *run(case, ranks))
    else:
        with pytest.raises(worlds.RankError, match=f"AccumulationError.*{name}.*cannot weigh micro-batches"):
            worlds.run(train, ranks, case)


@smallest
def test_clip_norm(name, ranks):
    case = Case(name, accumulation=2, clip_norm=0.3)
    records, expected = run(case, ranks)
    assert max(expected.norms) > 0.3, "something is clipped"
    check(case, records, expected)


@smallest
def test_clip_value(name, ranks):
    case = Case(name, accumulation=2, clip_value=0.02, optimizer="SGD")
    check(case, *run(case, ranks))


@smallest
def test_frozen(name, ranks):
    case = Case(name, accumulation=2, frozen=True)
    records, expected = run(case, ranks)
    check(case, records, expected)
    first, last = records[0].weights[0], records[0].weights[-1]
    assert torch.equal(first["first.weight"], last["first.weight"])


@smallest
def test_evaluation(name, ranks):
    """An evaluation inside an epoch changes nothing in it; as with plain loaders, it moves torch's generator."""
    case = Case(name, accumulation=2, evaluate=True, epochs=1)
    records, expected = run(case, ranks)
    check(case, records, expected)
    plain = worlds.run(train, ranks, dataclasses.replace(case, evaluate=False))
    torch.testing.assert_close(records[0].weights, plain[0].weights, rtol=0, atol=0)


@cells
def test_shuffling(name, ranks):
    """Ranks with one batch index read and draw the same, all others read different samples."""
    case = Case(name, dropout=True)
    records = worlds.run(train, ranks, case)
    readers: dict[int, list[Record]] = {}
    for record in records:
        readers.setdefault(record.batch[0], []).append(record)
    assert len(readers) == records[0].batch[1]
    seen: list[int] = []
    for alike in readers.values():
        for record in alike:
            assert record.windows == alike[0].windows
            torch.testing.assert_close(record.masks, alike[0].masks, rtol=0, atol=0)
        first_epoch = [micro for window in alike[0].windows for micro in window][: case.rounds]
        seen += [sample for micro in first_epoch for sample in micro]
    assert sorted(seen) == list(range(case.rounds * case.batch * len(readers)))
