"""The part of `Accelerator` that answers for the mesh: which kinds of parallelism run, and where this rank is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from accel_state.errors import StateError
from accel_state.log import get_logger
from accel_state.world.process import PartialState
from accel_train.data.loader import PreparedLoader
from accel_train.errors import PrepareError
from accel_train.loop.state import AcceleratorState
from accel_train.plugins import ParallelismConfig
from accel_train.setup.resolve import Plan

__all__ = ["MeshView"]

_logger = get_logger(__name__)


class MeshView:
    """Facts of the plan's mesh, under the names that Accelerate's scripts read."""

    state: AcceleratorState
    _plan: Plan
    _process: PartialState

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Ranks of each kind of parallelism; None if neither the script nor the launcher gave any."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """PyTorch's mesh of the dimensions with more than one rank; None for data parallelism alone."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with FSDP2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """The same as `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """True where a script calls what writes models: one process of each node, or all that hold parts."""
        return self.parallelism_config is not None or self._process.is_local_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among those that tensors are divided over; 0 without tensor parallelism."""
        return self._place("tp", "tensor_parallel_rank")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's place among those of context parallelism; 0 without it."""
        return self._place("cp", "context_parallel_rank")

    @property
    def sequence_parallel_rank(self) -> int:
        """This rank's place among those of sequence parallelism; 0 without it."""
        return self._place("sp", "sequence_parallel_rank")

    @property
    def data_parallel_rank(self) -> int:
        """This rank's replica; 0 if there is one."""
        return self._place("dp_replicate", "data_parallel_rank")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place among those that a replica is sharded over; 0 without sharding."""
        return self._place("dp_shard", "data_parallel_shard_rank")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's stage; always 0, as a parallelism configuration has no pipelines."""
        return self._place("pp", "pipeline_parallel_rank")

    def _place(self, dimension: str, name: str) -> int:
        if self.parallelism_config is None:
            raise StateError(
                f"accelerator.{name} is a place in a mesh, and there is none. Pass Accelerator(parallelism_config="
                "ParallelismConfig(…)), or launch with --use_parallelism_config."
            )
        return self._plan.mesh.index(dimension)

    def deepspeed_ulysses_dl_adapter(self, dl: DataLoader[Any], model: Any) -> DataLoader[Any]:
        """The loader whose batches hold this rank's positions of each sequence: a prepared loader is that itself.

        Args:
            dl: a loader.
            model: not used; kept for scripts that call this after they have prepared it.

        Raises:
            PrepareError: sequences are divided among ranks (`sp_size`, `cp_size`), and the loader is not prepared.
        """
        if self._plan.sequence is not None and not isinstance(dl, PreparedLoader):
            raise PrepareError(
                f"deepspeed_ulysses_dl_adapter() got a {type(dl).__name__} that is not prepared, so its batches hold "
                "whole sequences. Call accelerator.prepare(dataloader) first; what that returns divides them."
            )
        return dl

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Context in which tensors hold this rank's positions of each sequence; without divided sequences, nothing.

        Prepared loaders divide their batches already, and those stay as they are here. So this is for tensors from
        elsewhere, and for scripts that were written with it.

        Args:
            buffers: changed in place, and put back when the context ends.
            buffer_seq_dims: the dimension of the positions, for each buffer.
            no_restore_buffers: those that are not put back.

        Raises:
            OptionError: not as many dimensions as buffers.
            IncompatibleOptionsError: a size that cannot be divided.
        """
        sequence = self._plan.sequence
        if sequence is None:
            _logger.warning_once(
                "maybe_context_parallel() does nothing: no cp_size or sp_size above 1 was asked for"
            )
            return contextlib.nullcontext()
        return sequence.cut_buffers(buffers or (), buffer_seq_dims or (), list(no_restore_buffers or ()))
