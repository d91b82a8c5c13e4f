"""How unequal the ranks' batches of one step are, by tokens and by random batches; and how long planning takes.

Lengths are lognormal, clipped to 4,096 tokens, or uniform. Imbalance is the mean over rounds of the most expensive
batch's cost by the mean cost: 1 is perfect, 1.5 means that ranks wait for a third of the time. Random batches hold as
many samples as those by tokens do on average. Padding is the share of the batch that holds no tokens.

    hatch run bench:token-batches
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from measure import flags, table

from accel_train import TokenBatchSampler
from accel_train.data.sampling.token_plan import first_fit_decreasing

MAX_TOKENS = 16_384
LONGEST = 4_096


def lengths_of(kind: str, samples: int) -> Any:
    draw = np.random.RandomState(0)
    if kind == "uniform":
        return draw.randint(1, 2_049, samples)
    return np.clip(draw.lognormal(5.5, 1.0, samples).astype(np.int64), 1, LONGEST)


def measured(
    costs: Any, lengths: Any, samples: Any, bounds: Any, ranks: int, padded: bool
) -> tuple[float, float]:
    """Imbalance, and the share of padding."""
    counts = np.diff(bounds)
    whole = len(counts) // ranks * ranks
    here = costs[samples]
    batch = np.maximum.reduceat(here, bounds[:-1]) * counts if padded else np.add.reduceat(here, bounds[:-1])
    rounds = batch[:whole].reshape(-1, ranks)
    cells = (np.maximum.reduceat(lengths[samples], bounds[:-1]) * counts).sum()
    padding = 1 - lengths[samples].sum() / cells if padded else 0.0
    return float((rounds.max(axis=1) / rounds.mean(axis=1)).mean()), float(padding)


def main() -> None:
    samples = flags(__doc__, samples=1_000_000).samples
    rows, packed = [], []
    for kind in ("lognormal", "uniform"):
        lengths = lengths_of(kind, samples)
        for padded, quadratic, ranks in itertools.product((True, False), (0.0, 1 / 8_192), (8, 64)):
            costs = lengths + quadratic * lengths.astype(np.float64) ** 2
            sampler = TokenBatchSampler(lengths, MAX_TOKENS, padded=padded, quadratic=quadratic).for_ranks(
                ranks
            )
            began = time.perf_counter()
            plan = sampler.plan()
            took = time.perf_counter() - began
            assert np.array_equal(np.sort(plan.samples), np.arange(samples))
            ours, padding = measured(costs, lengths, plan.samples, plan.bounds, ranks, padded)
            order = np.random.RandomState(1).permutation(samples)
            bounds = np.linspace(0, samples, len(plan) + 1).astype(np.int64)
            plain, plain_padding = measured(costs, lengths, order, bounds, ranks, padded)
            how = ["padded" if padded else "joined", "yes" if quadratic else "no", ranks]
            of = [
                f"{took:.2f}",
                f"{ours:.4f}",
                f"{plain:.3f}",
                f"{padding:.1%} instead of {plain_padding:.1%}",
            ]
            rows.append([kind, *how, *of])
        began = time.perf_counter()
        packs = first_fit_decreasing(lengths, LONGEST)
        took = time.perf_counter() - began
        fill = lengths.sum() / ((int(packs.max()) + 1) * LONGEST)
        packed.append([kind, f"{took:.2f}", f"{fill:.2%}"])
    table(["lengths", "batches", "attention", "ranks", "plan s", "by tokens", "random", "padding"], rows)
    table(["lengths", "s", "full"], packed, f"Packed into sequences of {LONGEST}")


if __name__ == "__main__":
    main()
