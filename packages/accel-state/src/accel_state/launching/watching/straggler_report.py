"""Time per phase of a step by rank, and which rank is slow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from accel_state.monitoring.heartbeat import DATA, FORWARD, PHASES, Pulse

__all__ = ["render_phases", "slowest"]

_OWN = (DATA, FORWARD)
"""Phases in which a rank usually waits for no other: in ``backward`` and in the step fast ranks wait for slow ones."""
_NOTABLE = 1.1


def slowest(pulses: Mapping[int, Pulse]) -> tuple[int, float, int] | None:
    """The rank that the others wait for.

    Returns:
        the rank, how many times the median rank's time it takes for data and forward, and the phase in which it loses
        most; None for fewer than two ranks that have trained.
    """
    own = {rank: sum(pulse.spent[phase] for phase in _OWN) for rank, pulse in pulses.items() if pulse.steps}
    if len(own) < 2 or not max(own.values()):
        return None
    rank = max(own, key=lambda rank: own[rank])
    typical = {phase: median(pulses[other].spent[phase] for other in own if other != rank) for phase in _OWN}
    phase = max(_OWN, key=lambda phase: pulses[rank].spent[phase] - typical[phase])
    others = median(spent for other, spent in own.items() if other != rank)
    return rank, own[rank] / max(1.0, others), phase


def render_phases(pulses: Mapping[int, Pulse], hosts: Mapping[int, str] | None = None) -> str:
    """A table of milliseconds per step, one line for each rank, and the slowest rank.

    Args:
        pulses: the progress that each rank has reported.
        hosts: the machine of each rank, where there are several.

    Returns:
        the table; empty if no rank has made an optimizer step.
    """
    trained = {rank: pulse for rank, pulse in pulses.items() if pulse.steps}
    if not trained:
        return ""
    names = [name if name != "save" else "save (s)" for name in PHASES.values()]
    hosts = hosts or {}
    width = max(map(len, ["machine", *hosts.values()])) + 1 if hosts else 0
    head = f"{'machine' if hosts else '':<{width}}{'rank':>6} {'steps':>7} "
    head += " ".join(f"{name:>10}" for name in names)
    lines = ["time per step in each phase, in milliseconds (saves: seconds in all):", head]
    for rank, pulse in sorted(trained.items()):
        cells = []
        for phase, name in PHASES.items():
            value = pulse.spent[phase] / 1e9 if name == "save" else pulse.spent[phase] / 1e6 / pulse.steps
            cells.append(f"{value:>10.2f}")
        lines.append(f"{hosts.get(rank, ''):<{width}}{rank:>6} {pulse.steps:>7} " + " ".join(cells))
    found = slowest(pulses)
    if found is not None:
        rank, ratio, phase = found
        on = f" on {hosts[rank]}" if rank in hosts else ""
        lines.append(
            f"slowest: rank {rank}{on}, {ratio:.2f} times the others' time for data and forward, mostly {PHASES[phase]}"
            if ratio >= _NOTABLE
            else f"no rank is slow: the slowest, rank {rank}{on}, takes {ratio:.2f} times the others' time"
        )
    return "\n".join(lines)
