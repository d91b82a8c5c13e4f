"""Local SGD: copies of one model that ranks train separately, and average now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accel_ckpt
from accel_ckpt.modules.named_model import NamedModel
from accel_state.operations.collectives import broadcast, reduce
from accel_train.errors import PrepareError
from accel_train.ranks import Ranks
from accel_train.state_part import Groups, SavedTrees, StatePart, Trees
from accel_train.strategies.equal_states import take_states
from accel_train.strategies.gradients import buckets
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.transparent_ddp import set_takes_buffers

__all__ = ["LocalCopies", "LocalCopy", "LocalOptimizerStates"]


class LocalCopy:
    """This rank's copy of a model inside DDP's wrapper.

    Args:
        wrapped: the wrapper; its gradients are not reduced until `release`.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.wrapped = wrapped
        self.changed = False  # an optimizer stepped since the last average
        self._parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
        self._held: tuple[bool, bool] | None = None
        self._guard: Any = None

    def hold(self) -> None:
        """From now on, backward reduces no gradients, and forward takes over no buffers of rank 0."""
        self._held = self.wrapped.require_backward_grad_sync, self.wrapped.require_forward_param_sync
        self.wrapped.require_backward_grad_sync = self.wrapped.require_forward_param_sync = False
        self.unguard()

    def release(self) -> None:
        """Reduce again; while the copies differ, training is refused."""
        assert self._held is not None, "it was held"
        self.wrapped.require_backward_grad_sync, takes_buffers = self._held
        set_takes_buffers(self.wrapped, takes_buffers)
        self._held = None
        if self.changed:
            self._guard = self.wrapped.register_forward_pre_hook(_refuse_training)

    @property
    def is_held(self) -> bool:
        """Whether gradients stay on this rank."""
        return self._held is not None

    def unguard(self) -> None:
        """Allow training: the copies are equal again, or will be."""
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    @torch.no_grad()
    def average(self, ranks: Ranks, *, finished: bool, along: Sequence[Tensor] = ()) -> bool:
        """Replace all copies by their mean: trained parameters, and buffers unless ranks keep their own.

        Args:
            ranks: the ranks that have a copy.
            finished: this rank takes no more steps.
            along: further tensors that are replaced by their mean.

        Returns:
            Whether `finished` is true on all ranks.
        """
        mean: list[Tensor] = [*self._parameters, *along]
        taken: list[Tensor] = []
        for name, buffer in self._buffers():
            if name not in self.wrapped.parameters_to_ignore:
                (mean if buffer.is_floating_point() or buffer.is_complex() else taken).append(buffer)
        flag = torch.tensor([float(finished)], device=mean[0].device)
        for bucket in buckets([flag, *mean]):
            means = reduce([tensor.detach() for tensor in bucket], group=ranks.group)
            for tensor, value in zip(bucket, means, strict=True):
                tensor.copy_(value)
        if taken:
            broadcast(taken, group=ranks.group)
        self.changed = False
        return bool(flag.item() == 1.0)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.wrapped.module.named_buffers() if self.wrapped.broadcast_buffers else iter(())


class LocalCopies:
    """The copies of all models that ranks train, or have trained, separately.

    Attributes:
        trained_alone: the models, without wrappers, of which this rank trains a copy at this time.
        in_use: whether there are copies, or optimizers whose states may differ between ranks.
    """

    def __init__(self) -> None:
        self.trained_alone: list[nn.Module] = []
        self.in_use = False
        self._copies: dict[DistributedDataParallel, LocalCopy] = {}
        # Optimizers that have equal states again. A rank without batches does not see which ones the others stepped.
        self._equal: dict[int, torch.optim.Optimizer] = {}

    def optimizers_differ(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the states of one of these optimizers may differ between ranks."""
        return self.in_use and any(id(optimizer) not in self._equal for optimizer in optimizers)

    def of(self, wrapped: DistributedDataParallel) -> LocalCopy:
        """The copy of a model, current or former."""
        self.in_use = True
        return self._copies.setdefault(wrapped, LocalCopy(wrapped))

    def holds(self, wrapped: DistributedDataParallel | None) -> bool:
        """Whether the gradients of a model stay on this rank."""
        copy = None if wrapped is None else self._copies.get(wrapped)
        return copy is not None and copy.is_held

    def hold(self, wrapped: DistributedDataParallel) -> None:
        """From now on, this rank trains its copy of a model."""
        self.of(wrapped).hold()
        self.trained_alone.append(wrapped.module)

    def release(self, wrapped: DistributedDataParallel) -> None:
        """Reduce the gradients of a model again, and forget its copy if that equals the others."""
        copy = self._copies[wrapped]
        copy.release()
        self.trained_alone[:] = [model for model in self.trained_alone if model is not wrapped.module]
        if not copy.changed:
            del self._copies[wrapped]

    def before_step(self, optimizer: torch.optim.Optimizer, ranks: Ranks, device: torch.device) -> None:
        """Called when an optimizer steps, whatever models its parameters belong to.

        With the gradients of all ranks it continues from the states of rank 0, so that ranks do not drift apart.
        """
        held = [copy for copy in self._copies.values() if copy.is_held]
        for copy in held:
            copy.changed = True
        if held:
            self._equal.clear()
        elif id(optimizer) not in self._equal:
            self._equal[id(optimizer)] = optimizer
            take_states([optimizer], 0, ranks, device)

    def changed(self) -> list[nn.Module]:
        """The models whose parameters may differ between ranks."""
        return [copy.wrapped for copy in self._copies.values() if copy.changed]

    def loaded(self, *, optimizers_differ: bool) -> None:
        """Called after all ranks have loaded the same parameters; optimizer states may differ."""
        self._equal.clear()
        for wrapped, copy in list(self._copies.items()):
            copy.changed = False
            copy.unguard()
            if not copy.is_held:
                del self._copies[wrapped]
        self.in_use = optimizers_differ or bool(self._copies)

    def clear(self) -> None:
        """Forget all copies."""
        self.trained_alone.clear()
        self._copies.clear()
        self._equal.clear()
        self.in_use = False


def _refuse_training(module: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled():
        raise PrepareError(
            "LocalSGD was left by an exception, so ranks have trained copies of the model that were not averaged: "
            "training on would mix their gradients. Load a checkpoint with load_state(), or enter LocalSGD again, "
            "which averages them."
        )


class LocalOptimizerStates(StatePart):
    """Optimizer states that differ between ranks, because ranks trained copies of a model (LocalSGD).

    Args:
        states: returns the states of optimizers.
        copies: know whether ranks have trained copies.
        optimizers: the prepared optimizers.
        named: the models with their canonical names; for a save.
    """

    def __init__(
        self,
        states: StateAdapter,
        copies: LocalCopies,
        optimizers: Sequence[Any],
        named: Sequence[NamedModel],
    ) -> None:
        self._states, self._copies, self._optimizers, self._named = states, copies, optimizers, named

    def is_wanted(self, groups: Groups, everything: Groups) -> bool:
        """Models are copies no more once one of them is loaded."""
        return "models" in groups or "optimizers" in groups

    def dump(self, trees: Trees) -> None:
        """A tree of this rank, where ranks have their own."""
        unaveraged = self._copies.changed()
        if unaveraged:
            name = type(self._states.strategy.plain(unaveraged[0])).__name__
            raise accel_ckpt.CheckpointSaveError(
                f"ranks train copies of {name} inside LocalSGD, and have stepped since these were averaged. Save after "
                "LocalSGD.average(), or after the context"
            )
        if self._differ():
            trees.own["optimizers"] = [
                self._states.optimizer_state(optimizer.optimizer, self._named)["state"]
                for optimizer in self._optimizers
            ]

    def _differ(self) -> bool:
        return self._copies.optimizers_differ([optimizer.optimizer for optimizer in self._optimizers])

    def read(self, saved: SavedTrees) -> bool:
        """Whether this rank continues with its own states, which replace the shared ones.

        If it does not, the part of the optimizers warns about it.
        """
        states = saved.known.get("optimizers")
        if states is None or "optimizers" not in saved.groups or not saved.same_ranks:
            return False
        for index, state in zip(range(len(self._optimizers)), states, strict=True):
            name = f"optimizer_{index}"
            saved.shared[name] = {**saved.shared[name], "state": state}
        saved.known = {name: tree for name, tree in saved.known.items() if name != "optimizers"}
        return True

    def load(self, taken: bool, saved: SavedTrees) -> None:
        """Record which states differ between ranks from now on."""
        if "models" in saved.groups:
            kept = "optimizers" not in saved.groups and self._differ()
            self._copies.loaded(optimizers_differ=kept or taken)
