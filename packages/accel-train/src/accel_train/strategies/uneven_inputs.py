"""Training in which ranks run out of data at different times, with torch's `Join`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from accel_state.operations.collectives import broadcast, reduce
from accel_train.errors import PrepareError
from accel_train.ranks import Ranks
from accel_train.strategies.equal_states import AveragesWeights, ShareScale, take_states
from accel_train.strategies.local_training import LocalTraining
from accel_train.strategies.wrappers import inside_compiled

__all__ = ["UnevenInputs"]


class UnevenInputs:
    """The contexts of `join_uneven_inputs()`.

    Args:
        ranks: the ranks that average gradients.
        device: of this rank.
        averages: averages of the weights of prepared models.
        share_scale: makes the loss scale of fp16 the same on all ranks.
        local: the models of which ranks train copies, which cannot be joined.

    Attributes:
        depth: how many of these contexts this rank is in.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        averages: Sequence[AveragesWeights],
        share_scale: ShareScale,
        local: LocalTraining,
    ) -> None:
        self.depth = 0
        self._ranks = ranks
        self._device = device
        self._averages = averages
        self._share_scale = share_scale
        self._local = local
        self._passes = 0  # backward passes of the context

    @contextmanager
    def join(self, joinables: Sequence[object]) -> Iterator[None]:
        """Context in which ranks that ran out of data take part in the collectives of the others.

        Args:
            joinables: prepared models and optimizers that support torch's `Join`.

        Raises:
            PrepareError: one of them does not.
            IncompatibleOptionsError: ranks train copies of one of them.
        """
        inner = [inside_compiled(item) if isinstance(item, nn.Module) else item for item in joinables]
        wrong = [type(item).__name__ for item in inner if not isinstance(item, Joinable)]
        if wrong:
            raise PrepareError(
                f"join_uneven_inputs() takes models and optimizers that support torch's Join; got {wrong[0]}. "
                "Pass the objects that prepare() returned."
            )
        self._local.check_joinable(inner)
        context = Join(cast("list[Joinable]", inner), enable=True)
        self.depth += 1
        self._passes = 0
        self._local.joined = True
        try:
            with context:
                yield
        finally:
            self.depth -= 1
            self._local.joined = self.depth > 0

    def saw_backward(self) -> None:
        """Called at each backward pass inside, by which is known who had data to the end."""
        self._passes += 1

    def end(self, owners: Sequence[Any]) -> None:
        """Give ranks that ran out of data what the last one with data has, as torch's `Join` does with parameters.

        A collective after the context.

        Args:
            owners: optimizers and schedulers, which have a `state_dict`.
        """
        ranks = self._ranks
        longest, shortest = reduce(
            torch.tensor([self._passes * ranks.size + ranks.index, -self._passes]), "max", group=ranks.group
        ).tolist()
        most, source = divmod(longest, ranks.size)
        if most == -shortest:
            return
        take_states(owners, source, ranks, self._device)
        for average in self._averages:
            with average.shared() as tensors:
                broadcast(tensors, source, group=ranks.group)
        self._share_scale(lambda values: broadcast(values, source, group=ranks.group))
