"""The verdict of ``accel doctor`` on the measurements of its ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from accel_cli.doctor.checks import Finding
from accel_cli.doctor.collectives import NOT_IN_BACKEND
from accel_cli.doctor.links import ALL_PAIRS, Link, slow_links

__all__ = ["judge"]

_CLOCK = 1.0
"""Seconds that clocks may differ: time stamps of logs and checkpoints then still compare; NTP keeps milliseconds."""
_SLOW_RANK = 3.0
"""A rank is slow if its product of matrices takes this many times the median of all."""
_SHOWN = 6

Facts = Mapping[int, Mapping[str, Any]]


def judge(arrived: Facts, results: Facts, clocks: Mapping[str, float]) -> list[Finding]:
    """Findings about a world.

    Args:
        arrived: host, process and versions of each rank.
        results: measurements of each rank.
        clocks: seconds by which a machine's clock is ahead, by its first rank.
    """
    hosts = [str(arrived[rank]["host"]) for rank in sorted(arrived)]
    found = [*_versions(arrived), *_clock(clocks, hosts), *_failures(results, hosts)]
    if results:
        found += [*_compute(results, hosts), *_collectives(results, hosts), *_links(results, hosts)]
    return found


def _versions(arrived: Facts) -> Iterator[Finding]:
    differing = []
    for name in ("python", "torch", "accel"):
        by_version: dict[str, list[str]] = {}
        for facts in arrived.values():
            hosts = by_version.setdefault(str(facts[name]), [])
            if facts["host"] not in hosts:
                hosts.append(str(facts["host"]))
        if len(by_version) > 1:
            parts = (f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
            differing.append(f"{name} is {'; '.join(parts)}")
    count = len({facts["host"] for facts in arrived.values()})
    if differing:
        yield Finding(
            "versions", "problem", "; ".join(differing), "install the same versions on all machines"
        )
    else:
        where = f"{len(arrived)} ranks on {count} host{'s' if count > 1 else ''}"
        yield Finding("versions", "ok", f"{where} have the same python, torch and accel")


def _clock(clocks: Mapping[str, float], hosts: list[str]) -> Iterator[Finding]:
    if len(clocks) < 2:
        return
    base = next(iter(clocks.values()))
    offsets = {hosts[int(rank)]: offset - base for rank, offset in clocks.items()}
    wrong = {host: offset for host, offset in offsets.items() if abs(offset) > _CLOCK}
    if wrong:
        text = ", ".join(
            f"{host} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {hosts[0]}"
            for host, offset in wrong.items()
        )
        yield Finding(
            "clocks",
            "warning",
            text,
            "synchronize them (chrony or systemd-timesyncd); timedatectl shows the state",
        )
    else:
        worst = max(map(abs, offsets.values()))
        yield Finding("clocks", "ok", f"machines differ by at most {worst * 1e3:.0f} ms")


def _failures(results: Facts, hosts: list[str]) -> Iterator[Finding]:
    for rank, result in sorted(results.items()):
        if "error" in result:
            yield Finding(
                "world", "problem", f"rank {rank} on {hosts[rank]} failed at {result['error']}",
                "a rank that does not answer is the cause, if one is named; else check the interface of the network "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall between ranks",
            )  # fmt: skip


def _compute(results: Facts, hosts: list[str]) -> Iterator[Finding]:
    times = {rank: result["compute"] for rank, result in sorted(results.items()) if "compute" in result}
    if len(times) < 2:
        return
    median = statistics.median_low(list(times.values()))
    slow = [rank for rank, seconds in times.items() if seconds > max(_SLOW_RANK * median, 1e-3)]
    for rank in slow:
        yield Finding(
            "slow rank", "warning",
            f"rank {rank} on {hosts[rank]} computes {times[rank] / median:.1f} times slower than the median",
            "all others wait for it in every step: look for other programs, a lower clock, or heat there",
        )  # fmt: skip
    if not slow:
        worst = max(times, key=lambda rank: times[rank])
        text = f"the slowest rank, {worst}, computes at {median / times[worst]:.0%} of the median"
        yield Finding("speed of ranks", "ok", text)


def _collectives(results: Facts, hosts: list[str]) -> Iterator[Finding]:
    backend = next((result["backend"] for result in results.values() if "backend" in result), "")
    timed: dict[str, float] = {}
    lacking: dict[str, None] = {}
    wrong = False
    for rank, result in sorted(results.items()):
        for name, outcome in result["collectives"].items():
            if outcome["problem"] == NOT_IN_BACKEND:
                lacking[name] = None
            elif outcome["problem"]:
                wrong = True
                yield Finding(
                    "collectives", "problem", f"{name} on rank {rank} ({hosts[rank]}) {outcome['problem']}",
                    "training there would be wrong: compare the versions of drivers and libraries, test the memory",
                )  # fmt: skip
            else:
                timed[name] = max(timed.get(name, 0.0), outcome["seconds"])
    if timed and not wrong:
        text = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in timed.items())
        gone = f"; {backend} has no {', '.join(lacking)}" if lacking else ""
        yield Finding("collectives", "ok", f"{len(timed)} are right by {backend}{gone}", f"1 MiB: {text}")


def _links(results: Facts, hosts: list[str]) -> Iterator[Finding]:
    links = [Link(**link) for result in results.values() for link in result["links"]]
    if not links:
        return
    slow = slow_links(links, hosts)
    for text in slow[:_SHOWN]:
        yield Finding(
            "links",
            "warning",
            text,
            "check cable, switch, interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
        )
    if len(slow) > _SHOWN:
        yield Finding("links", "warning", f"and {len(slow) - _SHOWN} more; --json has all")
    if not slow:
        plan = "every pair" if len(hosts) <= ALL_PAIRS else "neighbours at distances 1, 2, 4, …"
        low = min(links, key=lambda link: link.bandwidth)
        text = (
            f"{len(links)} measured ({plan}): latency up to {max(link.latency for link in links) * 1e3:.2f} ms, "
            f"at least {low.bandwidth / 1e6:.0f} MB/s (ranks {low.first} and {low.second})"
        )
        yield Finding("links", "ok", text)
