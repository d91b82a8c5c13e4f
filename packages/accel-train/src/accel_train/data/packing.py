"""Packing: several short samples in one sequence of fixed length, kept apart by positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from accel_train.data.sampling.token_batches import Lengths, check_lengths, lengths_of
from accel_train.data.sampling.token_plan import first_fit_decreasing
from accel_train.errors import ArgumentTypeError, DataError

__all__ = ["PackedDataset", "PackingCollator", "cu_seqlens_of"]


class PackedDataset(Dataset[list[Any]]):
    """Packs short samples into sequences: a map-style dataset whose item i is the list of samples in sequence i.

    Packs are made once, by first-fit decreasing on samples in an order that depends on the seed, so a pack mixes
    samples from the whole dataset. Every sample is in one pack. A loader shuffles packs, divides them among ranks and
    continues inside an epoch as with any map-style dataset.

    Args:
        dataset: the samples, by index.
        lengths: number of tokens of each sample; see `TokenBatchSampler`.
        max_length: tokens per sequence.
        seed: seed of the order; None: the order of the dataset.
        window: number of samples that are packed together; None: all.

    Raises:
        DataError: a sample has no tokens, or more than `max_length`.
        ArgumentTypeError: lengths are not whole numbers.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Lengths,
        max_length: int,
        *,
        seed: int | None = 0,
        window: int | None = None,
    ) -> None:
        known = lengths_of(lengths, dataset)
        if max_length < 1 or (window is not None and window < 1):
            raise DataError(
                f"PackedDataset(max_length={max_length}, window={window}): both must be at least 1."
            )
        if len(known) != len(dataset):
            raise DataError(
                f"PackedDataset got {len(known)} lengths for a dataset of {len(dataset)} samples."
            )
        check_lengths(known, max_length, "max_length")
        self.dataset = dataset
        self.max_length = max_length
        order = np.arange(len(known), dtype=np.int64)
        if seed is not None:
            draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed % 2**64)))
            order = draw.permutation(order)
        step = window or max(len(order), 1)
        packs = np.empty(len(order), dtype=np.int64)
        count = 0
        for low in range(0, len(order), step):
            here = first_fit_decreasing(known[order[low : low + step]], max_length) + count
            packs[low : low + step] = here
            count = int(here.max()) + 1
        self._samples = order[np.argsort(packs, kind="stable")]
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(packs, minlength=count))])
        self.tokens = int(known.sum())

    @property
    def fill(self) -> float:
        """The share of the sequences' tokens that are tokens of samples, not padding: 0 to 1."""
        return self.tokens / (len(self) * self.max_length) if len(self) else 1.0

    def indices(self, pack: int) -> list[int]:
        """The dataset indices of the samples in a pack."""
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        pack %= len(self)
        found: list[int] = self._samples[self._bounds[pack] : self._bounds[pack + 1]].tolist()
        return found

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, pack: int) -> list[Any]:
        indices = self.indices(pack)
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self.dataset[index] for index in indices]


class PackingCollator:
    """Collate function that makes a batch of packs, each one row of `max_length` tokens.

    The result is a mapping of tensors with shape (packs, max_length) and dtype int64:

    - ``input_ids``: the tokens, then padding;
    - ``labels``: `labels` of the samples, or their tokens; the first token of each sample and the padding are
      `ignore_index`, so nothing is predicted across a boundary. ``(labels != ignore_index).sum()`` is the value for
      `backward(num_items=…)`, for losses that shift labels by one;
    - ``position_ids``: from 0 in each sample, and from 0 in the padding;
    - ``sequence_ids``: 1 for the first sample of a row, 2 for the second, …, 0 for padding. Tokens with equal values
      may attend to each other.

    Args:
        max_length: tokens per row.
        pad_token_id: token that fills up a row.
        ignore_index: label of tokens that are not predicted.
        cu_seqlens: also return ``cu_seqlens``, the boundaries of all samples and paddings in the flattened batch as
            int32, and ``max_seqlen``, a number, as kernels for sequences of variable length take them. They have no
            rows, so rank 0 cannot divide them: do not combine with `dispatch_batches=True`.
    """

    def __init__(
        self, max_length: int, *, pad_token_id: int = 0, ignore_index: int = -100, cu_seqlens: bool = False
    ) -> None:
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.ignore_index = ignore_index
        self.cu_seqlens = cu_seqlens

    def __call__(self, packs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Collate packs: lists of samples, which are mappings with ``input_ids``, or the tokens themselves.

        Raises:
            DataError: a pack has more tokens than a row, or a sample has more or fewer labels than tokens.
        """
        shape = (len(packs), self.max_length)
        ids = torch.full(shape, self.pad_token_id, dtype=torch.int64)
        labels = torch.full(shape, self.ignore_index, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        sequences = torch.zeros(shape, dtype=torch.int64)
        boundaries = [0]
        for row, pack in enumerate(packs):
            at = 0
            for number, sample in enumerate(pack, start=1):
                tokens, targets = _tokens_of(sample)
                end = at + len(tokens)
                if end > self.max_length:
                    raise DataError(
                        f"A pack of {len(pack)} samples has more than max_length={self.max_length} tokens. Give "
                        "PackedDataset the lengths that the samples really have, and both the same max_length."
                    )
                ids[row, at:end] = tokens
                labels[row, at + 1 : end] = targets[1:]
                positions[row, at:end] = torch.arange(len(tokens))
                sequences[row, at:end] = number
                boundaries.append(row * self.max_length + end)
                at = end
            if at < self.max_length:
                positions[row, at:] = torch.arange(self.max_length - at)
                boundaries.append((row + 1) * self.max_length)
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "sequence_ids": sequences,
        }
        if self.cu_seqlens:
            batch["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32)
            batch["max_seqlen"] = max(int(batch["cu_seqlens"].diff().max()), 0) if len(boundaries) > 1 else 0
        return batch


def cu_seqlens_of(position_ids: Tensor) -> Tensor:
    """Cumulative sequence lengths of a flattened batch, from position ids; int32, on the same device.

    A sequence begins where the position is 0. Waits for the device, because the number of sequences depends on the
    values.
    """
    flat = position_ids.reshape(-1)
    starts = torch.nonzero(flat == 0).reshape(-1)
    end = torch.tensor([flat.numel()], device=flat.device)
    return torch.cat([starts, end]).to(torch.int32)


def _tokens_of(sample: Any) -> tuple[Tensor, Tensor]:
    if isinstance(sample, Mapping):
        tokens = torch.as_tensor(sample["input_ids"])
        targets = torch.as_tensor(sample["labels"]) if "labels" in sample else tokens
    else:
        tokens = targets = torch.as_tensor(sample)
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ArgumentTypeError(
            f"A sample to be packed is a mapping with input_ids, or the tokens: whole numbers in one dimension; got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}."
        )
    if targets.shape != tokens.shape:
        raise DataError(
            f"A sample has {tuple(tokens.shape)} tokens and labels of shape {tuple(targets.shape)}."
        )
    return tokens, targets
