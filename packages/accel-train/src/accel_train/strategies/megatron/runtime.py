"""Runtime support for Megatron-core: its process groups, and its random states."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from accel_state.operations.collectives import broadcast
from accel_state.world.process_group import leave_at_exit
from accel_train.strategies.megatron.plugin import MegatronLMPlugin

__all__ = ["Groups", "draws", "random_states", "restore_random_states", "start"]


class Groups:
    """This rank's index in each of Megatron's process groups, and their sizes.

    Attributes:
        tp_rank, tp_size: index and size in tensor parallelism.
        pp_rank, pp_size: index and size in pipeline parallelism.
        cp_rank, cp_size: index and size in context parallelism.
        dp_size: number of ranks that read different samples.
    """

    def __init__(self, state: Any) -> None:
        self.tp_rank: int = state.get_tensor_model_parallel_rank()
        self.tp_size: int = state.get_tensor_model_parallel_world_size()
        self.pp_rank: int = state.get_pipeline_model_parallel_rank()
        self.pp_size: int = state.get_pipeline_model_parallel_world_size()
        self.cp_rank: int = state.get_context_parallel_rank()
        self.cp_size: int = state.get_context_parallel_world_size()
        self.cp_group: Any = state.get_context_parallel_group()
        self.dp_size: int = state.get_data_parallel_world_size()
        self.dp_group: Any = state.get_data_parallel_group()
        self.pp_group: Any = state.get_pipeline_model_parallel_group()
        self.last_stage: int = state.get_pipeline_model_parallel_last_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, with the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.pp_rank == self.pp_size - 1


def start(plugin: MegatronLMPlugin, device: torch.device) -> Groups:
    """Create Megatron's process groups, once; a single process gets a new group.

    Args:
        plugin: has the degrees.
        device: device of this rank.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        leave_at_exit(device)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that Transformer Engine and Apex, which are optional, are not installed
        from megatron.core import parallel_state
        from megatron.core.optimizer import optimizer as _  # noqa: F401 - warns as well
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    logging.getLogger("megatron.core").setLevel(logging.WARNING)  # it describes each object that it makes
    context = plugin.context_parallel_size or 1
    wanted = (plugin.tp_degree, plugin.pp_degree, context)
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        if found == wanted:
            return Groups(parallel_state)
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        context_parallel_size=context,
        create_gloo_process_groups=False,
    )
    groups = Groups(parallel_state)
    # Ranks of tensor parallelism drop other elements of what they divide, and the same of what they do not.
    seed = int(broadcast(torch.tensor([torch.initial_seed() % 2**31])).item())
    # Ranks of context parallelism have other positions, so they drop other elements of everything …
    own = seed + _BETWEEN_CONTEXTS * groups.cp_rank
    model_parallel_cuda_manual_seed(own)
    if groups.cp_size > 1:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        get_cuda_rng_tracker().add(_states_of(groups), own + 1)
        torch.cuda.manual_seed(seed)  # … but the script, which reads the same batches there, draws alike
    return groups


_BETWEEN_CONTEXTS = 1_000_003
"""Between the seeds of neighbouring ranks: more than Megatron adds for the ranks of other groups."""


def _states_of(groups: Groups) -> str:
    """The name of the generator of what ranks of tensor parallelism share and those of context parallelism do not.

    It has the numbers of both: a state that was saved by another division is not taken. It would give ranks of context
    parallelism the same, or those of tensor parallelism something else.
    """
    return f"context-parallel-rng-{groups.cp_size}x{groups.tp_size}"


def draws(groups: Groups) -> contextlib.AbstractContextManager[None]:
    """Context for calling a model: ranks with different positions draw different random numbers."""
    if groups.cp_size == 1:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    forked: contextlib.AbstractContextManager[None] = get_cuda_rng_tracker().fork(_states_of(groups))
    return forked


def random_states() -> dict[str, torch.Tensor]:
    """States of the generators for tensors that tensor-parallel ranks divide, by Megatron's names."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what `random_states` returned, unless sequences were divided differently there."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    known = tracker.get_states()
    if known.keys() <= states.keys():
        tracker.set_states({name: states[name].cpu() for name in known})
