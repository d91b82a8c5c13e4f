"""Local SGD: copies of models that ranks train without communication, and average now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_state.operations.collectives import broadcast, reduce
from accel_train.errors import AccumulationError, IncompatibleOptionsError, PrepareError
from accel_train.ranks import Ranks
from accel_train.strategies.equal_states import AveragesWeights, ShareScale
from accel_train.strategies.gradients import buckets
from accel_train.strategies.transparent_ddp import ddp_of, set_takes_buffers

__all__ = ["LocalTraining", "why_not_saved"]


class LocalTraining:
    """The models of which each rank trains a copy of its own.

    Args:
        ranks: the ranks whose copies are averaged.
        samples: how many ranks have samples of their own.
        averages: averages of the weights of prepared models, which follow the copies.
        share_scale: makes the loss scale of fp16 the same on all ranks.

    Attributes:
        trained_alone: the models, without wrappers, of which this rank trains a copy now; always the same list.
        joined: ranks are inside `join_uneven_inputs()`, where a model cannot be trained so.
    """

    def __init__(
        self, ranks: Ranks, samples: int, averages: Sequence[AveragesWeights], share_scale: ShareScale
    ) -> None:
        self.trained_alone: list[nn.Module] = []
        self.joined = False
        self._ranks = ranks
        self._samples = samples
        self._averages = averages
        self._share_scale = share_scale
        self._held: dict[DistributedDataParallel, tuple[bool, bool]] = {}  # and what DDP would do without
        self._left: dict[DistributedDataParallel, Any] = {}  # by an exception, and what refuses to train them

    def holds(self, wrapped: object) -> bool:
        """Whether the gradients of a model stay on this rank."""
        return wrapped in self._held

    @property
    def differing(self) -> nn.Module | None:
        """A model whose copies may differ between ranks; None: all ranks have the same."""
        return next((wrapped.module for wrapped in (*self._held, *self._left)), None)

    def check(self, model: nn.Module) -> DistributedDataParallel:
        """The wrapper of a prepared model of which ranks can train copies; changes nothing.

        Raises:
            PrepareError: DDP does not average its gradients.
            IncompatibleOptionsError: DDP does not average them over all ranks, or not in every backward.
        """
        wrapped = ddp_of(model)
        if wrapped is None:
            raise PrepareError(
                f"LocalSGD averages the copies of a model that ranks train, but {type(model).__name__} is not a model "
                "that ddp trains. Pass the model that prepare() returned, with parameters that are not frozen."
            )
        if wrapped.static_graph:
            raise IncompatibleOptionsError(
                "LocalSGD trains without reducing gradients, and DistributedDataParallelKwargs(static_graph=True) "
                "needs a reduction in the first backward. Leave static_graph out."
            )
        if self._ranks.size != self._samples:
            raise IncompatibleOptionsError(
                f"LocalSGD trains a copy of the model on each of {self._ranks.size} ranks, and these share sequences "
                f"(cp_size or sp_size): only {self._samples} have samples of their own. Leave one of both out."
            )
        self._check_not_joined()
        return wrapped

    def check_joinable(self, objects: Sequence[object]) -> None:
        """Refuse models for `join_uneven_inputs()` of which ranks train copies."""
        if any(self.holds(item) for item in objects):
            raise _not_joined()

    def begin(self, model: nn.Module) -> None:
        """From now on, backward reduces no gradients of a model, and forward takes over no buffers of rank 0."""
        wrapped = self.check(model)
        if self.holds(wrapped):
            raise AccumulationError(
                "LocalSGD was entered for a model inside another LocalSGD of the same model. Use one of them."
            )
        self.are_equal(wrapped.module)  # they will be, when it ends
        self._held[wrapped] = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
        wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = False
        self.trained_alone.append(wrapped.module)

    @torch.no_grad()
    def average(self, model: nn.Module, *, finished: bool) -> bool:
        """Replace all copies by their mean: trained parameters, averages of weights, and buffers that ranks share.

        Buffers without floating point are taken from rank 0, and the lowest loss scale of fp16 is that of all.

        Args:
            model: the prepared model.
            finished: this rank takes no more steps.

        Returns:
            Whether `finished` is true on all ranks.
        """
        self._check_not_joined()
        wrapped = ddp_of(model)
        assert wrapped is not None, "checked when it began"
        with contextlib.ExitStack() as stack:
            mean = [p for p in wrapped.module.parameters() if p.requires_grad]
            for average in self._averages:
                if average.plain is wrapped.module:
                    mean += stack.enter_context(average.shared())
            taken: list[Tensor] = []
            for buffer in _shared_buffers(wrapped):
                (mean if buffer.is_floating_point() or buffer.is_complex() else taken).append(buffer)
            flag = torch.tensor([float(finished)], device=mean[0].device)
            for bucket in buckets([flag, *mean]):
                means = reduce([tensor.detach() for tensor in bucket], group=self._ranks.group)
                for tensor, value in zip(bucket, means, strict=True):
                    tensor.copy_(value)
            if taken:
                broadcast(taken, group=self._ranks.group)
        self._share_scale(lambda values: reduce(values, "min", group=self._ranks.group))
        return bool(flag.item() == 1.0)

    def end(self, model: nn.Module, *, averaged: bool) -> None:
        """Reduce again. Without an average of all ranks, because of an exception, training the model is refused."""
        wrapped = ddp_of(model)
        assert wrapped is not None, "checked when it began"
        wrapped.require_backward_grad_sync, takes_buffers = self._held.pop(wrapped)
        set_takes_buffers(wrapped, takes_buffers)
        self.trained_alone[:] = [module for module in self.trained_alone if module is not wrapped.module]
        if not averaged:
            self._left[wrapped] = wrapped.register_forward_pre_hook(_refuse_training)

    def are_equal(self, module: nn.Module) -> None:
        """Called when all ranks have the same parameters of a model again, because they loaded them."""
        for wrapped in [wrapped for wrapped in self._left if wrapped.module is module]:
            self._left.pop(wrapped).remove()

    def clear(self) -> None:
        """Forget all models."""
        self.trained_alone.clear()
        self._held.clear()
        self._left.clear()

    def _check_not_joined(self) -> None:
        if self.joined:
            raise _not_joined()


def why_not_saved(model: nn.Module) -> str:
    """Why a state cannot be saved while the copies of a model may differ."""
    return (
        f"ranks train copies of {type(model).__name__} inside LocalSGD, each with optimizer states of its own, and a "
        "state has room for those of one rank. Save after the context"
    )


def _not_joined() -> IncompatibleOptionsError:
    return IncompatibleOptionsError(
        "LocalSGD and join_uneven_inputs() exclude each other: ranks that ran out of batches would shadow reductions "
        "that do not happen. Leave join_uneven_inputs() out; ranks with fewer batches wait at the end of LocalSGD."
    )


def _shared_buffers(wrapped: DistributedDataParallel) -> Iterator[Tensor]:
    """The buffers that DDP keeps equal on all ranks."""
    if wrapped.broadcast_buffers:
        for name, buffer in wrapped.module.named_buffers():
            if name not in wrapped.parameters_to_ignore:
                yield buffer


def _refuse_training(module: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled():
        raise PrepareError(
            "LocalSGD was left by an exception, so ranks have trained copies of the model that were not averaged: "
            "training on would mix their gradients. Load a checkpoint with load_state(), or enter LocalSGD again, "
            "which averages them."
        )
