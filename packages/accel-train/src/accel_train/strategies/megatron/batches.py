"""Converting a batch of the script for Megatron-core's models: micro-batches, shifted labels, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_train.errors import ArgumentTypeError, DataError
from accel_train.strategies.megatron.context import ContextPart

__all__ = ["Batch", "micro_batches", "shifted", "supplied", "weighted_mean"]

IGNORED = -100
"""Label of positions that do not count in the loss, as in transformers."""


@dataclass
class Batch:
    """Inputs of a model, and of its loss.

    If ranks divide sequences, everything except the loss mask covers only this rank's positions.

    Attributes:
        tokens: token of each position.
        labels: the next token at each position; None: there is no loss.
        loss_mask: 1 where a position counts in the loss; of the positions of all ranks.
        attention_mask: True where a position must not be attended to; None: only for later positions.
        positions: position numbers.
    """

    tokens: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    attention_mask: Tensor | None
    positions: Tensor

    @classmethod
    def of(cls, given: Mapping[str, Any], eod_token: int | None, context: ContextPart | None = None) -> Batch:
        """Make a batch from the arguments of a transformers model.

        Args:
            given: `input_ids`, and perhaps `labels`, `attention_mask` and `position_ids`.
            eod_token: positions with this token do not count in the loss; None: all with a label do.
            context: this rank's positions; None: all.
        """
        tokens = given["input_ids"]
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        labels = given.get("labels")
        mask = None
        if labels is not None:
            labels, mask = shifted(labels)
            if eod_token is not None:
                mask = mask * (tokens != eod_token)
        found = cls(tokens, labels, mask, None, positions).divided(context)
        found.attention_mask = _masked(given.get("attention_mask"), context)
        return found

    def divided(self, context: ContextPart | None) -> Batch:
        """The batch with the positions of this rank only."""
        if context is None:
            return self
        length = self.tokens.shape[1]
        mask = self.attention_mask
        if mask is not None and mask.shape[-2] == length:  # else it is of all positions alike
            mask = context.cut(mask, -2)
        labels = None if self.labels is None else context.cut(self.labels)
        return Batch(context.cut(self.tokens), labels, self.loss_mask, mask, context.cut(self.positions))


def weighted_mean(losses: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean loss of the positions that count, in fp32; 0 if none does. A script's mask may hold weights.

    Args:
        losses: loss of each position.
        mask: weight of each position, of the same shape.
        weight: divisor of the sum; None: the sum of the mask.
    """
    mask = mask.float()
    if weight is None:
        total = mask.sum()
        weight = torch.where(total == 0, 1.0, total)
    return (losses.float() * mask).sum() / weight


def supplied(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    context: ContextPart | None = None,
    check: Callable[[int], None] = lambda length: None,
) -> Batch:
    """Make a batch from a micro-batch with the script's `custom_get_batch_function`.

    Args:
        function: the script's function.
        given: the micro-batch.
        context: this rank's positions; None: all.
        check: called with the length of the sequences before they are cut.

    Raises:
        ArgumentTypeError: the function does not return five values.
    """
    found = function(iter([dict(given)]), False)
    if not isinstance(found, tuple | list) or len(found) != 5:
        raise ArgumentTypeError(
            f"custom_get_batch_function returned {type(found).__name__}; it must return tokens, labels, loss mask, "
            "attention mask and position ids."
        )
    batch = Batch(*found)
    check(batch.tokens.shape[1])
    return batch.divided(context)


def shifted(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Shift labels: at each position the label of the next one, and a mask of 1 where there is one."""
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    known = following != IGNORED
    return following.masked_fill(~known, 0), known.float()


def _masked(attention_mask: Tensor | None, context: ContextPart | None) -> Tensor | None:
    """Megatron's mask of a batch with padding, for the positions of this rank: what follows, and what is padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    follows = places > (places if context is None else context.cut(places, 0))[:, None]
    return follows[None, None] | (attention_mask == 0)[:, None, None, :]


def micro_batches(given: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Cut a batch into pieces of one size: `count`, or for a shorter batch as many as divide it.

    Raises:
        DataError: the tensors of the batch have different numbers of rows.
    """
    rows = {
        name: value.shape[0] for name, value in given.items() if isinstance(value, Tensor) and value.dim()
    }
    sizes = set(rows.values())
    if len(sizes) != 1:
        raise DataError(f"The tensors of a batch have different numbers of rows: {rows}.")
    count = math.gcd(count, sizes.pop())
    return list(_cut(given, count))


def _cut(given: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    pieces = {
        name: value.chunk(count) if isinstance(value, Tensor) and value.dim() else [value] * count
        for name, value in given.items()
    }
    for place in range(count):
        yield {name: found[place] for name, found in pieces.items()}
