"""The choice of the source of each batch, at random by a hash of the step.

It touches no random generator, so all ranks choose alike, and any number of ranks chooses what one does.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right

from accel_train.data.mixing.weights import Shares

__all__ = ["chosen", "uniform"]

_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    number &= _BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _BITS
    return number ^ (number >> 31)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on the seed and the step alone: output `step` of a SplitMix64 generator."""
    return (_mixed(_mixed(seed) + (step + 1) * _STEP) >> 11) * 2.0**-53


def chosen(seed: int, step: int, shares: Shares) -> int:
    """The place of the source of batch number `step`: the one whose part of [0, 1) `uniform` falls into."""
    bounds = list(itertools.accumulate(shares))
    # A product that is rounded up to the sum belongs to the last source with a share.
    last = bisect_left(bounds, bounds[-1])
    return bisect_right(bounds, uniform(seed, step) * bounds[-1], hi=last)
