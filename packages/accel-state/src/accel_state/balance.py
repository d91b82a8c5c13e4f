"""Dividing a list into runs of about equal weight, such as layers into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["balanced_starts"]


def balanced_starts(weights: Sequence[int], count: int) -> list[int]:
    """Where `count` runs of `weights` begin so that the heaviest is lightest; among such, the most even ones.

    Args:
        weights: at least `count`; no run is empty.
        count: number of runs.
    """
    total = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[k][i]: of the first i weights in k runs, the heaviest run, the sum of squares, and where the last run begins.
    infinite = (float("inf"), float("inf"), 0)
    best = [[infinite] * (total + 1) for _ in range(count + 1)]
    best[0][0] = (0, 0, 0)
    for runs in range(1, count + 1):
        for stop in range(runs, total + 1):
            for start in range(runs - 1, stop):
                heaviest, squares, _ = best[runs - 1][start]
                weight = sums[stop] - sums[start]
                found = (max(heaviest, weight), squares + weight**2, start)
                best[runs][stop] = min(best[runs][stop], found)
    starts, stop = [], total
    for runs in range(count, 0, -1):
        stop = best[runs][stop][2]
        starts.append(stop)
    return starts[::-1]
