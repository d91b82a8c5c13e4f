"""A batch sampler for samples of different lengths: batches with a token limit, balanced between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from accel_train.data.sampling.token_plan import TokenPlan, plan_batches
from accel_train.errors import ArgumentTypeError, DataError

__all__ = ["TokenBatchSampler", "lengths_of"]

Lengths = Any  # a sequence of whole numbers, a function of the index, or the name of a column

_PIECE = 4096
"""Batches whose indices are made Python numbers at a time."""


class TokenBatchSampler(BatchSampler):
    """Batch sampler with at most `max_tokens` tokens per batch; `prepare` balances the batches of all ranks.

    Every sample comes once per epoch, and all ranks have the same number of batches; some batches are halved for that.
    Only if there are fewer samples than one round needs, the last round is completed with batches that are known as
    padding, or dropped, as `even_batches` says.

    The order depends on the seed and the epoch only. A loader continues inside the epoch as with any sampler; with
    another number of ranks it keeps the batches of the interrupted epoch, and balances the next one.

    Args:
        lengths: number of tokens of each sample: a sequence, array or tensor; a function of the index; or the name of a
            column of `dataset`, of numbers or of sequences.
        max_tokens: the most tokens in a batch of one rank.
        dataset: needed if `lengths` is a function (for the number of samples) or the name of a column.
        padded: a batch is padded to its longest sample, and padding counts for `max_tokens`. False: for collate
            functions that join samples without padding.
        quadratic: the cost of a sample of n tokens is n + quadratic * n**2, where the second term is attention. For a
            transformer use 2 L H Q / N, in the letters of `flops_per_token`, halved for causal kernels.
        shuffle: draw another order for every epoch.
        seed: seed of these orders.
        drop_last: drop a last round without a batch for every rank.
        window: number of samples that are sorted together; None: those of 64 batches per rank. A larger window balances
            better and mixes less.

    Raises:
        DataError: a sample has no tokens, or more than `max_tokens`.
        ArgumentTypeError: lengths are not whole numbers.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        dataset: Any = None,
        padded: bool = True,
        quadratic: float = 0.0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int | None = None,
    ) -> None:
        # BatchSampler.__init__ would require a sampler; this class only shares its type.
        if max_tokens < 1 or quadratic < 0 or (window is not None and window < 1):
            raise DataError(
                f"TokenBatchSampler(max_tokens={max_tokens}, quadratic={quadratic}, window={window}): max_tokens and "
                "window must be at least 1, and quadratic must not be negative."
            )
        self.lengths = lengths_of(lengths, dataset)
        check_lengths(self.lengths, max_tokens, "max_tokens")
        self.max_tokens = max_tokens
        self.padded = padded
        self.quadratic = quadratic
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.window = window
        self.batch_size: Any = None
        self.epoch = 0
        self.ranks = 1
        self._planned_for = 1  # ranks; those of an interrupted run until its epoch is over
        self._plan: tuple[tuple[int, int], TokenPlan] | None = None

    def for_ranks(self, ranks: int) -> TokenBatchSampler:
        """Return this sampler with batches balanced for a number of ranks; `prepare` calls it."""
        other = copy.copy(self)
        other.ranks = other._planned_for = ranks
        other._plan = None
        return other

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; prepared loaders call it."""
        if epoch != self.epoch:
            self.epoch, self._planned_for = epoch, self.ranks

    def plan(self) -> TokenPlan:
        """The batches of the epoch, of all ranks; computed at the first access."""
        key = (self.epoch, self._planned_for)
        if self._plan is None or self._plan[0] != key:
            draw = None
            order = np.arange(len(self.lengths), dtype=np.int64)
            if self.shuffle:
                # The only generator of NumPy whose numbers are the same in every version.
                bits = np.random.MT19937(np.random.SeedSequence([self.seed % 2**64, self.epoch]))
                draw = np.random.RandomState(bits)
                order = draw.permutation(order)
            plan = plan_batches(
                self.lengths,
                self.max_tokens,
                self._planned_for,
                order=order,
                draw=draw,
                padded=self.padded,
                quadratic=self.quadratic,
                window=self.window,
            )
            self._plan = key, plan
        return self._plan[1]

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan()
        for low in range(0, len(plan), _PIECE):
            bounds = plan.bounds[low : low + _PIECE + 1]
            first = int(bounds[0])
            samples: list[int] = plan.samples[first : bounds[-1]].tolist()
            ends = (bounds - first).tolist()
            for begin, end in pairwise(ends):
                yield samples[begin:end]

    def __len__(self) -> int:
        return len(self.plan())

    # State

    def state_dict(self) -> dict[str, Any]:
        """The values that determine the batches of the epoch."""
        return {
            "epoch": self.epoch,
            "ranks": self._planned_for,
            "seed": self.seed,
            "samples": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "options": [self.max_tokens, self.padded, self.quadratic, self.shuffle, self.window],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the batches of a saved epoch.

        Raises:
            DataError: see `check_state_dict`.
        """
        self.check_state_dict(state)
        self.epoch, self._planned_for = int(state["epoch"]), int(state["ranks"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the batches of a saved epoch are those of this sampler.

        Raises:
            DataError: the saved lengths or options differ, so that the batches would differ.
        """
        own = self.state_dict()
        for name, what in (
            ("samples", "number of samples"),
            ("tokens", "number of tokens"),
            ("seed", "seed"),
            ("options", "[max_tokens, padded, quadratic, shuffle, window]"),
        ):
            if state[name] != own[name]:
                raise DataError(
                    f"TokenBatchSampler: the saved epoch has {what} {state[name]!r}, and this sampler {own[name]!r}, "
                    "which gives other batches. Build it as it was, or do not load the state of its loader."
                )


def lengths_of(lengths: Lengths, dataset: Any = None) -> Any:
    """The lengths of all samples as an int64 array.

    Args:
        lengths: a sequence, array or tensor; a function of the index; or the name of a column.
        dataset: the dataset of the samples; needed for a function and a name.

    Raises:
        ArgumentTypeError: lengths are not whole numbers.
        DataError: a dataset is needed and missing, or it has no such column.
    """
    if isinstance(lengths, str):
        lengths = _column(dataset, lengths)
    elif callable(lengths):
        if dataset is None:
            raise DataError("If lengths is a function, pass `dataset` as well, for the number of samples.")
        measure: Callable[[int], int] = lengths
        lengths = [measure(index) for index in range(len(dataset))]
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.cpu().numpy()
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"Lengths must be whole numbers, one per sample; got an array of shape {array.shape} and dtype "
            f"{array.dtype}."
        )
    return array.astype(np.int64)


def _column(dataset: Any, name: str) -> Sequence[int]:
    known = getattr(dataset, "column_names", None)
    if dataset is None or not hasattr(dataset, "__getitem__") or (known is not None and name not in known):
        raise DataError(
            f"Lengths given as {name!r} name a column of `dataset`, and "
            + ("no dataset was given." if dataset is None else f"{type(dataset).__name__} has {known}.")
        )
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    values = list(plain[name])
    return [int(value) if isinstance(value, int | np.integer) else len(value) for value in values]


def check_lengths(lengths: Any, most: int, name: str) -> None:
    """Refuse samples that no batch can hold.

    Raises:
        DataError: names the first of them.
    """
    bad = np.flatnonzero((lengths < 1) | (lengths > most))
    if len(bad):
        first = int(bad[0])
        raise DataError(
            f"Sample {first} has {int(lengths[first])} tokens, and {len(bad)} of {len(lengths)} samples do not have 1 "
            f"to {name}={most} tokens. Truncate or drop these samples, or raise {name}."
        )
