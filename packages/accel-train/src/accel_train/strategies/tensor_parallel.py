"""Tensor parallelism: models whose tensors the script has divided among ranks that read the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_ckpt.parts import fsdp_modules, is_sharded
from accel_train.errors import IncompatibleOptionsError, PrepareError
from accel_train.mesh import Mesh
from accel_train.optimizer_parameters import parameters_of
from accel_train.plugins import TorchTensorParallelPlugin
from accel_train.ranks import Ranks
from accel_train.strategies.base import ModelSteps, Parts, Strategy, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.fsdp2.initial_values import share_values
from accel_train.strategies.gradients import average, divide_like_parameter
from accel_train.strategies.relink import step_both_kinds
from accel_train.strategies.shared_buffers import saved_buffers, share_in_evaluation
from accel_train.strategies.wrappers import check_division, check_is_divided, reduced_by_fsdp

__all__ = ["TensorParallelStrategy", "complete_gradients"]


class TensorParallelStrategy(Strategy):
    """Tensor parallelism of a model that the script has divided: gradients are averaged over groups of ranks.

    The strategy itself divides and wraps nothing. Which ranks read the same samples is decided with the `Accelerator`,
    before the model is built; a model that is divided in another way is refused. `fully_shard` reduces the gradients of
    parts that the script has passed to it.
    """

    name: ClassVar[str] = "tp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_stages=True,
        precisions=frozenset({"no", "bf16", "fp16"}),
        needs_process_group=True,
        dimensions=frozenset({"dp_replicate", "cp", "sp", "tp"}),
    )

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self._known: list[tuple[nn.Module, set[int]]] = []  # prepared models, and their parameters by `id`
        self._holds_back = False

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """Neighbours by number read the same samples."""
        plugin: TorchTensorParallelPlugin = config or TorchTensorParallelPlugin()
        size = plugin.tp_size or world_size
        if world_size % size:
            raise IncompatibleOptionsError(
                f"tp_size={size} does not divide the {world_size} processes into groups of one size. Start a multiple "
                f"of {size} processes, or change tp_size."
            )
        return Mesh({"dp_replicate": world_size // size, "tp": size}, device.type, world_size, rank)

    @classmethod
    def check_degrees(cls, config: Any, degrees: Mapping[str, int]) -> None:
        """`tp_size` of the plugin and of the degrees are the same, if both are given."""
        size = (config or TorchTensorParallelPlugin()).tp_size
        if size not in (None, degrees["tp"]):
            raise IncompatibleOptionsError(
                f"TorchTensorParallelPlugin(tp_size={size}) and a parallelism configuration with "
                f"tp_size={degrees['tp']} contradict each other. Leave the plugin out."
            )

    # Preparing

    def prepare(self, parts: Parts, steps: ModelSteps) -> Parts:
        """Prepare the objects of one call; optimizers must be able to step what they hold."""
        for optimizer in parts.optimizers:
            step_both_kinds(optimizer)
        return super().prepare(parts, steps)

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Check how a model is divided, and start all groups with the values of the first."""
        model = steps.convert(model)
        plain = self.plain(model)
        check_division(plain, self.batch)
        check_is_divided(plain, self.options.requested_tp_size)
        model = steps.place(model)
        self._share_start(plain)
        self._known = [(known, ids) for known, ids in self._known if known is not plain]
        self._known.append((plain, set(map(id, plain.parameters()))))
        prepared = steps.compile(model)
        share_in_evaluation(plain, prepared, saved_buffers)
        return prepared

    def is_outdated(self, model: nn.Module) -> bool:
        """Whether parameters were added to a prepared model, which may have other values on other ranks."""
        plain = self.plain(model)
        return any(known is plain and self._first_added(plain, ids) for known, ids in self._known)

    def release(self) -> None:
        """Forget the prepared models."""
        super().release()
        self._known.clear()

    def _share_start(self, model: nn.Module) -> None:
        """Let all ranks begin with rank 0's values; what `fully_shard` has divided is left out."""
        named = [*model.named_parameters(), *model.named_buffers()]
        meta = [name for name, tensor in named if tensor.is_meta]
        if meta:
            raise PrepareError(
                f"{meta[0]!r} (of {len(meta)} tensors) has no storage (it is on the meta device). Load the weights "
                "before prepare()."
            )
        engine = reduced_by_fsdp(model)
        tensors = {id(tensor): tensor for _, tensor in named if id(tensor) not in engine}
        share_values([*tensors.values()], [self.loss.group] if self.loss.size > 1 else [])

    # One micro-batch

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Average gradients only in the last micro-batch of a window."""
        self._holds_back = not last and not self.options.sync_each_batch

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Average again."""
        self._holds_back = False

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, and average them over the groups."""
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        for model, ids in self._known:
            self._complete(model, ids)

    def replicas_of(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """All ranks that average gradients, unless it steps what is in no prepared model."""
        known = {key for _, ids in self._known for key in ids}
        own = all(is_sharded(p) or id(p) in known for p in parameters_of(optimizer) if p.requires_grad)
        return self.loss if own else None

    def _complete(self, model: nn.Module, ids: set[int]) -> None:
        added = self._first_added(model, ids)
        if added is not None:
            raise PrepareError(
                f"The parameter {added!r} was added to {type(model).__name__} after it was prepared, and ranks may "
                "have started with other values. Prepare the model again: `model = accelerator.prepare(model)`."
            )
        complete_gradients(model, None if self._holds_back else self.loss)

    def _first_added(self, model: nn.Module, ids: set[int]) -> str | None:
        if next(fsdp_modules(model), None) is not None:
            return None  # FSDP puts other parameters in the place of those that it gathers
        return next((name for name, parameter in model.named_parameters() if id(parameter) not in ids), None)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context in which backward passes keep each group's own gradients."""
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Context in which backward passes average gradients, even under `no_sync`."""
        before, self._holds_back = self._holds_back, False
        try:
            yield
        finally:
            self._holds_back = before


def complete_gradients(model: nn.Module, ranks: Ranks | None) -> None:
    """Divide gradients like their parameters, and average them, except those that `fully_shard` reduces.

    Args:
        model: the model, or stages of one.
        ranks: to average over; None: a later micro-batch does.
    """
    engine = reduced_by_fsdp(model)
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in engine]
    for parameter in parameters:
        divide_like_parameter(parameter)
    if ranks is not None and ranks.size > 1:
        average(parameters, ranks)
