"""Whether degrees multiply to the ranks, and what would."""

import pytest

from accel_state.config.parallel_degrees import DIMENSIONS, degrees_of, misfit
from accel_state.config.sections.parallelism import ParallelismSection


def degrees(**sizes):
    return {name: sizes.get(name, 1) for name in DIMENSIONS}


def test_unset_degrees_are_1():
    assert degrees_of(ParallelismSection(tp_size=2)) == degrees(tp=2)


@pytest.mark.parametrize(("sizes", "ranks"), [({}, 8), ({"tp": 2, "cp": 4}, 8), ({"dp_shard": 1}, 1)])
def test_what_fits(sizes, ranks):
    assert misfit(degrees(**sizes), ranks) is None


def test_what_does_not_fit_is_named_with_ways_out():
    assert misfit(degrees(tp=2), 8) == (
        "the degrees tp 2 multiply to 2, and there are 8 processes; start 2 processes, or set dp_replicate_size to 4, "
        "or set dp_shard_size to 4"
    )
    assert misfit(degrees(tp=3), 8).endswith("there are 8 processes; start 3 processes")
    assert "set dp_shard_size to 4" in misfit(degrees(dp_shard=2, cp=2), 8)
