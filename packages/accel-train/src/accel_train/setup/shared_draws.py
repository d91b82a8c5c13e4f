"""Random numbers of ranks that run the same program on the same samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import torch

from accel_state.log import get_logger
from accel_state.operations.collectives import gather
from accel_state.seeding import get_rng_state
from accel_state.trees import recursively_apply
from accel_train.ranks import Ranks

__all__ = ["share_draws"]

_logger = get_logger(__name__)
_SEEDS = 2**32  # NumPy's range


def share_draws(ranks: Ranks) -> None:
    """Make ranks with the same index draw the same random numbers: ranks whose states differ are seeded alike.

    Tensor-parallel ranks apply dropout to activations that all of them hold. If they dropped different elements, their
    activations would differ, and nothing would report it. Ranks that read the same samples must also augment them in
    the same way. A collective of all ranks, unless no two ranks have the same index.

    Args:
        ranks: the ranks that may draw different numbers.
    """
    if not ranks.repeats:
        return
    state = get_rng_state()
    torch_state = [state["torch"], *state.get("device", {"states": []})["states"]]
    own = [_digest(part) for part in (torch_state, state["numpy"], state["python"])]
    of_ranks = gather(torch.tensor([own])).tolist()
    group = [row for row, index in zip(of_ranks, ranks.index_of, strict=True) if index == ranks.index]
    differ = [len(set(of_one)) > 1 for of_one in zip(*group, strict=True)]
    seeds: tuple[Callable[[int], object], ...] = (torch.manual_seed, np.random.seed, random.seed)
    for seed, differs, digest in zip(seeds, differ, group[0], strict=True):
        if differs:
            seed(digest % _SEEDS)
    if differ[0]:
        _logger.warning(
            "Ranks that read the same samples had different random states of PyTorch, as after "
            "set_seed(…, device_specific=True); they are seeded alike now, so that they drop the same values."
        )


def _digest(state: object) -> int:
    plain = recursively_apply(torch.Tensor.tolist, state)
    return int.from_bytes(hashlib.sha256(repr(plain).encode()).digest()[:8], "big", signed=True)
