"""Which ranks differ in one respect."""

import dataclasses

import pytest

from accel_train.ranks import Ranks


def test_alone_there_is_nobody_to_differ_from():
    ranks = Ranks()
    assert (ranks.size, ranks.index, ranks.group, ranks.world_size) == (1, 0, None, 1)
    assert ranks.is_first
    assert not ranks.repeats
    assert ranks == Ranks.of_world(1, 0)


@pytest.mark.parametrize("rank", range(3))
def test_in_a_world_of_replicas_every_rank_differs(rank):
    ranks = Ranks.of_world(3, rank)
    assert (ranks.size, ranks.index, ranks.rank, ranks.world_size) == (3, rank, rank, 3)
    assert ranks.index_of == (0, 1, 2)
    assert ranks.is_first
    assert not ranks.repeats


@pytest.mark.parametrize(
    ("index_of", "first"),
    [((0, 0, 1, 1), [0, 2]), ((0, 1, 0, 1), [0, 1]), ((1, 0, 0, 1), [0, 1]), ((0, 0, 0, 0), [0])],
)
def test_of_those_with_one_index_one_is_the_first(index_of, first):
    seen = [Ranks(max(index_of) + 1, index, None, index_of, rank) for rank, index in enumerate(index_of)]
    assert [ranks.rank for ranks in seen if ranks.is_first] == first
    assert all(ranks.repeats for ranks in seen)
    assert {ranks.world_size for ranks in seen} == {4}


def test_ranks_are_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ranks().size = 2
    assert hash(Ranks.of_world(2, 1)) == hash(Ranks.of_world(2, 1))
