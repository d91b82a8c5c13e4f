"""Which pairs of ranks are measured, and which links are slow."""

import itertools

import pytest

from accel_cli.doctor.links import ALL_PAIRS, Link, rounds, slow_links


@pytest.mark.parametrize("size", range(2, ALL_PAIRS + 1))
def test_every_pair_is_measured_once_and_no_rank_twice_at_a_time(size):
    plan = list(rounds(size))
    for pairs in plan:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert sorted(itertools.chain(*plan)) == list(itertools.combinations(range(size), 2))


@pytest.mark.parametrize("size", [17, 64, 100, 1000])
def test_large_worlds_measure_neighbours_in_few_rounds(size):
    plan = list(rounds(size))
    assert len(plan) <= 2 * size.bit_length()
    for pairs in plan:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    pairs = set(itertools.chain(*plan))
    assert len(pairs) == sum(map(len, plan))
    distances = {second - first for first, second in pairs}
    assert distances == {1 << bit for bit in range(size.bit_length()) if 1 << bit < size}
    assert all((rank, rank + 1) in pairs for rank in range(size - 1))


def link(first, second, latency=1e-4, worst=2e-4, bandwidth=1e9):
    return Link(first, second, latency, worst, bandwidth)


def test_a_link_that_differs_from_those_of_its_kind_is_slow():
    hosts = ["a", "a", "a", "a"]
    links = [link(*pair) for pair in itertools.combinations(range(4), 2)]
    assert slow_links(links, hosts) == []
    links[3] = link(1, 2, latency=0.01, bandwidth=1e7)
    (told,) = slow_links(links, hosts)
    assert told.startswith(
        "the link between rank 1 (a) and rank 2 (a) is slow: latency 10.0 ms (median 0.1 ms)"
    )
    assert "10.0 MB/s (median 1000.0 MB/s)" in told


def test_links_between_machines_have_limits_of_their_own():
    hosts = ["a", "b"]
    assert slow_links([link(0, 1, latency=1e-3, bandwidth=1e8)], hosts) == []
    (late,) = slow_links([link(0, 1, latency=6e-3, worst=1e-2)], hosts)
    assert "latency 6.0 ms" in late
    (lost,) = slow_links([link(0, 1, worst=0.21)], hosts)
    assert "a round trip took 210 ms: packets are lost" in lost
    (narrow,) = slow_links([link(0, 1, bandwidth=4e7)], hosts)
    assert "40.0 MB/s" in narrow
    assert slow_links([link(0, 1, latency=6e-3, bandwidth=4e7)], ["a", "a"]) == []
