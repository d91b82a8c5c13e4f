"""The links between ranks: which pairs ``accel doctor`` measures, how, and which of them are slow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["ALL_PAIRS", "Link", "measure_link", "rounds", "slow_links"]

ALL_PAIRS = 16
"""Largest world in which every pair is measured."""
_TRIPS = 20
_SMALL = 2**16
_LARGE = 2**23
_SECONDS = 0.1
_SLOWER = 8.0
"""A link is slow if it is this many times slower than the median of its kind; ranks that share cores differ less."""
_WORST_LATENCY = 5e-3
_WORST_BANDWIDTH = 50e6
_LOST = 0.15
"""Seconds that one round trip takes if a packet is lost: Linux's TCP sends it again after at least 0.2 s (RFC 6298
advises 1 s; ``TCP_RTO_MIN`` is 200 ms)."""


@dataclass(frozen=True)
class Link:
    """A measured pair of ranks.

    Attributes:
        first, second: the ranks.
        latency: seconds of half a round trip of 8 bytes, median.
        worst: seconds of the longest round trip.
        bandwidth: bytes per second, one way after the other.
    """

    first: int
    second: int
    latency: float
    worst: float
    bandwidth: float


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, which are measured at once.

    Up to ``ALL_PAIRS`` ranks every pair is in one of ``size - 1`` rounds (a tournament by the circle method). Larger
    worlds measure neighbours at distances 1, 2, 4, …, in about 2 · log2(size) rounds, so that time grows with the
    logarithm.
    """
    if size <= ALL_PAIRS:
        seats = list(range(size + size % 2))
        for _ in range(len(seats) - 1):
            pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
            yield [(min(pair), max(pair)) for pair in pairs if max(pair) < size]
            seats = [seats[0], seats[-1], *seats[1:-1]]
        return
    distance = 1
    while distance < size:
        for odd in (0, 1):
            yield [(rank, rank + distance) for rank in range(size - distance) if rank // distance % 2 == odd]
        distance *= 2


def measure_link(pair: tuple[int, int], device: torch.device) -> Link:
    """Measure a pair; both of its ranks call this.

    Args:
        pair: the ranks, the smaller first.
        device: device of the tensors.
    """
    first, second = pair
    other = second if dist.get_rank() == first else first
    leads = dist.get_rank() == first
    token = torch.zeros(1, dtype=torch.int64, device=device)
    _round_trip(token, other, leads)  # connects
    times = sorted(_round_trip(token, other, leads) for _ in range(_TRIPS))
    small = _round_trip(torch.zeros(_SMALL, dtype=torch.uint8, device=device), other, leads)
    # The first rank decides how much to send, so that a slow link takes no longer than a fast one.
    token.fill_(int(min(_LARGE, max(_SMALL, _SMALL * _SECONDS / max(small, 1e-6)))))
    _round_trip(token, other, leads, back=False)
    nbytes = int(token.item())
    large = _round_trip(torch.zeros(nbytes, dtype=torch.uint8, device=device), other, leads)
    return Link(first, second, statistics.median(times) / 2, times[-1], 2 * nbytes / large)


def _round_trip(tensor: torch.Tensor, other: int, leads: bool, back: bool = True) -> float:
    began = time.perf_counter()
    steps = (dist.send, dist.recv) if leads else (dist.recv, dist.send)
    for step in steps if back else steps[:1]:
        step(tensor, other)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def slow_links(links: Sequence[Link], hosts: Sequence[str]) -> list[str]:
    """Problems of links: lost packets, long latency or little bandwidth; the links are named.

    A link is compared with the others of its kind (inside a machine, or between two), and links between machines with
    5 ms and 50 MB/s, which no network of a cluster should miss.

    Args:
        links: the measured links.
        hosts: host name of each rank.
    """
    found = []
    for inside in (True, False):
        kind = [link for link in links if (hosts[link.first] == hosts[link.second]) == inside]
        if not kind:
            continue
        latency = statistics.median(link.latency for link in kind)
        bandwidth = statistics.median(link.bandwidth for link in kind)
        for link in kind:
            reasons = []
            if not inside and link.worst > _LOST and link.worst > 5 * link.latency:
                reasons.append(f"a round trip took {link.worst * 1e3:.0f} ms: packets are lost")
            if link.latency > max(_SLOWER * latency, 2e-3) or (not inside and link.latency > _WORST_LATENCY):
                reasons.append(f"latency {link.latency * 1e3:.1f} ms (median {latency * 1e3:.1f} ms)")
            if link.bandwidth < bandwidth / _SLOWER or (not inside and link.bandwidth < _WORST_BANDWIDTH):
                reasons.append(f"{link.bandwidth / 1e6:.1f} MB/s (median {bandwidth / 1e6:.1f} MB/s)")
            if reasons:
                ends = (
                    f"rank {link.first} ({hosts[link.first]}) and rank {link.second} ({hosts[link.second]})"
                )
                found.append(f"the link between {ends} is slow: {', '.join(reasons)}")
    return found
