"""Data parallelism on XLA devices (TPUs), with torch_xla."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_state.enums import DistributedType
from accel_state.errors import NotAvailableError
from accel_state.host.xla import seed_as_torch
from accel_state.operations.collectives import broadcast
from accel_state.trees import recursively_apply
from accel_train.errors import IncompatibleOptionsError
from accel_train.mesh import Mesh
from accel_train.plugins.xla import XlaPlugin
from accel_train.strategies.base import ModelSteps, Strategy, StrategyOptions
from accel_train.strategies.capabilities import Capabilities
from accel_train.strategies.gradients import average
from accel_train.strategies.state_adapter import StateAdapter

__all__ = ["XlaStates", "XlaStrategy"]


class XlaStates(StateAdapter):
    """Saves and loads the states of replicas on XLA devices."""

    strategy: XlaStrategy

    def keeps_replicas(self, model: nn.Module) -> bool:
        """True for the models that the strategy prepared."""
        return any(model is known for known in self.strategy.models)


class XlaStrategy(Strategy):
    """Each process has one XLA device, or in SPMD mode one process has all of them.

    Operations on XLA devices are recorded, and compiled and run as one program where the step is marked
    (`torch_xla.sync`). It is marked after every optimizer step and before every batch.

    Each process has its own runtime, which does not know the devices of the others, so gradients are averaged through
    host memory, after the last backward of a window. In SPMD mode XLA puts the reductions into the program.
    """

    name: ClassVar[str] = "xla"
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "bf16"}),
        device_types=frozenset({"xla"}),
        requires=("torch_xla[tpu]>=2.9",),
    )
    distributed_type: ClassVar[DistributedType | None] = DistributedType.XLA
    adapter: ClassVar[type[StateAdapter]] = XlaStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self._xla: Any = importlib.import_module("torch_xla")
        self.models: list[nn.Module] = []
        self._reduces = True
        self._devices = _device_mesh(options.config or XlaPlugin(), self.batch.size)
        seed_as_torch()

    # Preparing

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Give all ranks rank 0's values, and move the model."""
        model = steps.convert(model)
        if self.loss.size > 1:
            plain = self.plain(model)
            broadcast([tensor.data for tensor in (*plain.parameters(), *plain.buffers())])
        model = steps.compile(steps.place(model))
        self.models.append(model)
        return model

    def release(self) -> None:
        """Forget the models whose gradients it averages."""
        self.models.clear()

    # One micro-batch

    def shard_batch(self, batch: Any) -> Any:
        """Run the operations recorded before this batch; in SPMD mode divide the batch among the devices."""
        self._xla.sync()
        return batch if self._devices is None else recursively_apply(self._divide, batch)

    def _divide(self, leaf: Tensor) -> Tensor:
        if leaf.device.type == "xla" and leaf.dim() > 0:
            rows = ("data", *[None] * (leaf.dim() - 1))
            _spmd().mark_sharding(leaf, self._devices, rows)
        return leaf

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Gradients are reduced in the last one only."""
        self._reduces = last or self.options.sync_each_batch

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """A backward outside of windows reduces."""
        self._reduces = True

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Record backward; the last one of a window is run here if there are ranks to average with.

        So gradients are averaged once, before anything can use them: clipping, a step, or the script itself.
        """
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        if self._reduces and self.loss.size > 1:
            trained = (p for model in self.models for p in model.parameters() if p.requires_grad)
            average(list(dict.fromkeys(trained)), self.loss)

    # Complete gradients

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step, and run all recorded operations."""
        result = super().step(optimizer, closure)
        self._xla.sync()
        return result

    # State

    def check_offload(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kinds: Collection[str],
    ) -> None:
        """Refuse: the runtime of XLA owns the memory below tensors, and recorded programs refer to it."""
        raise NotAvailableError(
            "offload_states() is not available under the strategy 'xla': torch_xla's runtime owns the memory of "
            "devices. Save the state with save_state(), end the process, and load it again."
        )

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """All ranks read different samples; in SPMD mode there is one."""
        if world_size > 1 and (config or XlaPlugin()).spmd:
            raise _not_both(world_size)
        return Mesh.of_world(world_size, rank)


def _device_mesh(plugin: XlaPlugin, ranks: int) -> Any:
    """All devices of this process in one dimension, "data", in SPMD mode; else None."""
    runtime: Any = importlib.import_module("torch_xla.runtime")
    if runtime.process_count() > 1 or runtime.world_size() > 1:
        raise IncompatibleOptionsError(
            f"torch_xla has {runtime.world_size()} ranks in {runtime.process_count()} processes of its own, and the "
            "strategy 'xla' trains with one process on all devices of a machine, or with processes that `accel launch` "
            "starts. Start one process, without torch_xla.launch, and pass strategy=XlaPlugin(spmd=True)."
        )
    if not (plugin.spmd or runtime.is_spmd()):
        return None
    if ranks > 1:
        raise _not_both(ranks)
    if not runtime.is_spmd():
        runtime.use_spmd()
    return _spmd().get_1d_mesh("data")


def _spmd() -> Any:
    return importlib.import_module("torch_xla.distributed.spmd")


def _not_both(ranks: int) -> IncompatibleOptionsError:
    return IncompatibleOptionsError(
        f"{ranks} processes were started, and in SPMD mode one process uses all XLA devices. Start one process, "
        "or leave out spmd=True and torch_xla.runtime.use_spmd()."
    )
