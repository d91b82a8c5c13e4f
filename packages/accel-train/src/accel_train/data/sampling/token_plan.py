"""Dividing samples of different lengths into batches of equal cost: arithmetic on arrays of lengths.

A *round* is one batch for each rank: what all ranks compute between two reductions, or in one micro-batch. The slowest
rank decides how long it takes, so the batches of a round are made equally expensive.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

__all__ = ["TokenPlan", "first_fit_decreasing", "plan_batches"]

_Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_BATCHES_PER_WINDOW = 64
"""Batches per rank whose samples are sorted together, by default: enough to balance, few enough to mix well."""


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """The batches of one epoch over all ranks, in rounds.

    Attributes:
        samples: indices of samples, batch after batch.
        bounds: where batches begin in it, and its length at the end.
    """

    samples: _Ints
    bounds: _Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1


def plan_batches(
    lengths: _Ints,
    max_tokens: int,
    ranks: int,
    *,
    order: _Ints,
    draw: np.random.RandomState | None,
    padded: bool,
    quadratic: float,
    window: int | None,
) -> TokenPlan:
    """Divide all samples into batches of at most `max_tokens`, a multiple of `ranks` if there are enough samples.

    Samples are taken in windows of the given order. Inside a window they are sorted by length. Padded batches are cut
    from the sorted samples; others are filled by the rule of the longest processing time first (Graham, 1969): the
    most expensive sample that is left goes to the cheapest batch. Batches of similar cost become a round.

    Args:
        lengths: tokens of each sample, 1 to `max_tokens`.
        max_tokens: most tokens in a batch; with `padded` those of the longest sample times the samples.
        ranks: batches in a round.
        order: the samples, each once.
        draw: shuffles rounds, and the ranks within one; None: neither.
        padded: samples of a batch are padded to the longest one.
        quadratic: the cost of a sample of n tokens is n + quadratic * n**2.
        window: samples in a window.
    """
    if not len(order):
        return TokenPlan(order, np.zeros(1, dtype=np.int64))
    windows = _windows(lengths, max_tokens, ranks, window)
    sizes = lengths[order]
    descending = np.lexsort((-sizes, windows))
    order, sizes = order[descending], sizes[descending]
    costs = sizes + quadratic * sizes.astype(np.float64) ** 2
    edges = np.flatnonzero(np.diff(windows, prepend=-1, append=windows[-1] + 1))
    batch_of = np.empty(len(order), dtype=np.int64)
    window_of: list[int] = []
    for number, (low, high) in enumerate(pairwise(edges.tolist())):
        here = slice(low, high)
        if padded:
            batch_of[here], count = _cut(sizes[here], _even_budget(sizes[here], max_tokens, ranks))
        else:
            batch_of[here], count = _fill(sizes[here], costs[here], max_tokens, ranks)
        batch_of[here] += len(window_of)
        window_of += [number] * count
    return _in_rounds(order, sizes, costs, batch_of, np.asarray(window_of), ranks, draw, padded)


def _windows(lengths: _Ints, max_tokens: int, ranks: int, window: int | None) -> _Ints:
    """The window of each place in the order; all of nearly the same size."""
    total = len(lengths)
    if window is None:
        window = int(_BATCHES_PER_WINDOW * ranks * max_tokens / max(float(lengths.mean()), 1.0))
    count = max(total // max(window, 1), 1)
    return np.arange(total, dtype=np.int64) * count // total


def _even_budget(sizes: _Ints, max_tokens: int, ranks: int) -> int:
    """Tokens of a padded batch with which no small one is left over, and many batches make whole rounds."""
    count = len(_starts(sizes.tolist(), max_tokens))
    if count >= 4 * ranks:
        count = -(-count // ranks) * ranks
    return _least_budget(sizes, max_tokens, count)


def _least_budget(sizes: _Ints, enough: int, most: int) -> int:
    """The fewest tokens that a padded batch needs if the number of batches is limited.

    Args:
        sizes: of sorted samples.
        enough: tokens with which there are not more batches.
        most: number of batches.
    """
    longest = sizes.tolist()
    low, high = max(longest[0], int(sizes.sum()) // most), enough
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_starts(longest, middle)) <= most else (middle + 1, high)
    return high


def _starts(longest: list[int], max_tokens: int) -> list[int]:
    """Where batches of sorted samples begin, each as long as it has room."""
    starts, at, end = [0], max_tokens // longest[0], len(longest)
    while at < end:
        starts.append(at)
        at += max_tokens // longest[at]
    return starts


def _cut(sizes: _Ints, max_tokens: int) -> tuple[_Ints, int]:
    """Runs of the sorted samples, as long as the padded batch has room; the batch of each sample, and their number."""
    starts = _starts(sizes.tolist(), max_tokens)
    batch_of = np.zeros(len(sizes), dtype=np.int64)
    batch_of[starts[1:]] = 1
    return np.cumsum(batch_of), len(starts)


def _fill(sizes: _Ints, costs: _Floats, max_tokens: int, ranks: int) -> tuple[_Ints, int]:
    """The cheapest batch takes the next sample; the batch of each sample, and their number, a multiple of `ranks`."""
    total = len(sizes)
    wanted = max(float(sizes.sum()) / max_tokens, float(np.count_nonzero(sizes * 2 > max_tokens)))
    # Costs as whole numbers: those of a heap entry share one number with the batch's, so that comparing is cheap.
    scale = 1.0 if float(costs.max()) >= 2**20 else 2**20 / float(costs.max())
    whole = np.maximum((costs * scale).astype(np.int64), 1)
    spare = 1.01
    while True:
        count = -(-int(np.ceil(wanted * spare)) // ranks) * ranks
        if count >= total:
            return np.arange(total, dtype=np.int64), total
        batch_of = _longest_first(whole, count)
        if np.bincount(batch_of, weights=sizes, minlength=count).max() <= max_tokens:
            return batch_of, count
        spare = max(spare * 1.03, (count + 1) / wanted)


def _longest_first(costs: _Ints, count: int) -> _Ints:
    bits = count.bit_length()
    mask = (1 << bits) - 1
    heap = list(range(count))
    heapify(heap)
    chosen: list[int] = []
    for cost in costs.tolist():
        cheapest = heap[0]
        chosen.append(cheapest & mask)
        heapreplace(heap, cheapest + (cost << bits))
    return np.asarray(chosen, dtype=np.int64)


def _in_rounds(
    order: _Ints,
    sizes: _Ints,
    costs: _Floats,
    batch_of: _Ints,
    window_of: _Ints,
    ranks: int,
    draw: np.random.RandomState | None,
    padded: bool,
) -> TokenPlan:
    """Order batches so that those of a round cost alike, and samples by batch."""
    batch_costs = _batch_costs(costs, batch_of, len(window_of), padded)
    missing = -len(window_of) % ranks
    if missing:
        batch_of, batch_costs = _split(batch_of, batch_costs, sizes, costs, ranks, padded)
        missing = -len(batch_costs) % ranks
        window_of = np.concatenate([window_of, np.full(len(batch_costs) - len(window_of), window_of[-1])])
    count = len(batch_costs)
    # Batches of a window were filled to be equal; padded ones find their like among all, and so do those of an epoch
    # whose windows hold no whole rounds.
    whole_windows = not padded and not (np.bincount(window_of) % ranks).any()
    by_cost = (
        np.lexsort((batch_costs, window_of)) if whole_windows else np.argsort(-batch_costs, kind="stable")
    )
    if draw is not None:
        rounds, left = divmod(count, ranks)
        full = by_cost[: rounds * ranks].reshape(rounds, ranks)[draw.permutation(rounds)]
        within = np.argsort(draw.random_sample(full.shape), axis=1)
        by_cost = np.concatenate([np.take_along_axis(full, within, axis=1).ravel(), by_cost[count - left :]])
    place = np.empty(count, dtype=np.int64)
    place[by_cost] = np.arange(count)
    places = place[batch_of]
    samples = order[np.argsort(places, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=count))])
    return TokenPlan(samples, bounds)


def _batch_costs(costs: _Floats, batch_of: _Ints, count: int, padded: bool) -> _Floats:
    if not padded:
        summed: _Floats = np.bincount(batch_of, weights=costs, minlength=count).astype(np.float64, copy=False)
        return summed
    largest = np.zeros(count)
    np.maximum.at(largest, batch_of, costs)
    return largest * np.bincount(batch_of, minlength=count)


def _split(
    batch_of: _Ints, batch_costs: _Floats, lengths: _Ints, costs: _Floats, ranks: int, padded: bool
) -> tuple[_Ints, _Floats]:
    """Make more of the cheapest batches, so that the number of all is a multiple of `ranks`.

    Padded ones are cut again, into batches of equal cost; of others the most expensive one is halved, again and again.
    Batches of the next round are taken in only if there are too few samples. With fewer in all than that takes, the
    last round stays incomplete.
    """
    cheapest = np.argsort(batch_costs, kind="stable")
    pool = len(batch_costs) % ranks
    missing = ranks - pool
    members = [np.flatnonzero(batch_of == batch) for batch in cheapest[:pool]]
    while sum(len(member) - 1 for member in members) < missing:
        if pool == len(cheapest):
            return batch_of, batch_costs
        members += [np.flatnonzero(batch_of == batch) for batch in cheapest[pool : pool + ranks]]
        pool = min(pool + ranks, len(cheapest))

    def cost(member: _Ints) -> float:
        return float(costs[member].max() * len(member) if padded else costs[member].sum())

    if padded:
        together = np.concatenate(members)
        together = together[np.argsort(-lengths[together], kind="stable")]
        sizes = lengths[together]
        numbers, _ = _cut(sizes, _least_budget(sizes, int(sizes[0]) * len(sizes), pool + missing))
        members = np.split(together, np.flatnonzero(np.diff(numbers)) + 1)
        missing_here = pool + missing - len(members)
    else:
        missing_here = missing
    for _ in range(missing_here):
        largest = max(range(len(members)), key=lambda place: (len(members[place]) > 1, cost(members[place])))
        member = members[largest]
        members[largest] = member[: len(member) // 2] if padded else member[::2]
        members.append(member[len(member) // 2 :] if padded else member[1::2])
    places = [*cheapest[:pool].tolist(), *range(len(batch_costs), len(batch_costs) + missing)]
    batch_of, batch_costs = batch_of.copy(), np.concatenate([batch_costs, np.zeros(missing)])
    for number, member in zip(places, members, strict=True):
        batch_of[member] = number
        batch_costs[number] = cost(member)
    return batch_of, batch_costs


def first_fit_decreasing(lengths: _Ints, capacity: int) -> _Ints:
    """The bin of each item by the rule of first-fit decreasing: the longest first, each into the first bin with room.

    Items of one length are placed together: bin after bin takes as many as it has room for.

    Args:
        lengths: whole numbers from 1 to `capacity`.
        capacity: of a bin.
    """
    descending = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    room = np.empty(0, dtype=np.int64)  # of the bins in use, in order of their numbers
    numbers = np.empty(0, dtype=np.int64)
    used = placed = 0
    smallest = int(values[0]) if len(values) else 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        open_bins = np.flatnonzero(room >= length)
        fits = room[open_bins] // length
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        room[open_bins] -= taken * length
        here = np.repeat(numbers[open_bins], taken)
        left = count - len(here)
        if left:
            each = capacity // length
            new = -(-left // each)
            held = np.full(new, each, dtype=np.int64)
            held[-1] = left - each * (new - 1)
            fresh = np.arange(used, used + new, dtype=np.int64)
            here = np.concatenate([here, np.repeat(fresh, held)])
            numbers, room = np.concatenate([numbers, fresh]), np.concatenate([room, capacity - held * length])
            used += new
        bins[descending[placed : placed + count]] = here
        placed += count
        keep = room >= smallest
        if np.count_nonzero(keep) < len(room) // 2:  # full bins are never looked at again
            numbers, room = numbers[keep], room[keep]
    return bins
