"""Whether degrees multiply to the ranks, and what would."""

import pytest

from accel_state.config.parallel_degrees import DIMENSIONS, degrees_of, experts_misfit, misfit, stages_misfit
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


@pytest.mark.parametrize(
    ("sizes", "experts"),
    [
        ({"tp": 2}, 1),
        ({"dp_shard": 8}, 4),
        ({"dp_replicate": 3, "dp_shard": 2, "cp": 2}, 4),
        ({"dp_shard": 2, "tp": 2}, 4),
    ],
)
def test_experts_fit_the_ranks_of_a_replica(sizes, experts):
    assert experts_misfit(degrees(**sizes), experts) is None


def test_experts_that_do_not_fit_are_named_with_ways_out():
    assert experts_misfit(degrees(dp_replicate=3, dp_shard=4), 3) == (
        "ep_size=3 does not divide the 4 ranks of a replica (dp_shard_size x cp_size x sp_size x tp_size); choose a "
        "divisor of 4"
    )
    assert "ep_size=2 and pp_size=2 cannot be combined" in experts_misfit(degrees(dp_shard=2, pp=2), 2)


@pytest.mark.parametrize("name", ["cp", "sp"])
def test_stages_pass_on_whole_sequences(name):
    assert stages_misfit(degrees(pp=2, dp_shard=2, tp=2)) is None
    assert stages_misfit(degrees(**{name: 2})) is None
    assert stages_misfit(degrees(pp=4, **{name: 2})) == (
        f"{name}_size=2 and pp_size=4 cannot be combined; leave out one of them: stages of a pipeline pass on whole "
        "sequences"
    )
