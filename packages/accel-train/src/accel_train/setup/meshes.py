"""Degrees of parallelism that a script or a launcher asks for, as the mesh of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_state.config.parallel_degrees import DIMENSIONS, experts_misfit, misfit
from accel_state.world.process import PartialState
from accel_train.errors import IncompatibleOptionsError
from accel_train.mesh import Mesh
from accel_train.plugins import ParallelismConfig
from accel_train.strategies.base import Strategy

if TYPE_CHECKING:
    from accel_train.sequence.parallel import SequenceParallel

__all__ = ["asked_degrees", "make_mesh", "sequences"]


def asked_degrees(parallelism: ParallelismConfig | None, num_processes: int) -> dict[str, int] | None:
    """Ranks of each dimension; None where neither the script nor the launcher sets a degree.

    Raises:
        IncompatibleOptionsError: they do not multiply to the number of ranks.
    """
    if parallelism is None or parallelism.total_size == 1:
        return None  # replicas on all ranks, or as the strategy's plugin says
    wrong = misfit(parallelism.degrees, num_processes)
    if wrong is not None:
        raise IncompatibleOptionsError(f"ParallelismConfig: {wrong}.")
    return parallelism.degrees


def make_mesh(
    strategy: type[Strategy],
    config: Any,
    process: PartialState,
    degrees: Mapping[str, int] | None,
    experts: int = 1,
) -> Mesh:
    """The mesh that was asked for, or else the strategy's own.

    Args:
        strategy: its class.
        config: its plugin.
        process: this one.
        degrees: ranks of each dimension; None where nobody asks for any.
        experts: ranks that experts are divided among (`ep_size`).

    Raises:
        IncompatibleOptionsError: the strategy, or its plugin, does not go with the degrees.
    """
    if experts > 1 and "ep" not in strategy.capabilities.dimensions:
        raise IncompatibleOptionsError(
            f"strategy {strategy.name!r} cannot train with ep_size={experts}. Strategy 'fsdp2' can "
            "(FullyShardedDataParallelPlugin, accel launch --use_fsdp)."
        )
    mesh = _mesh(strategy, config, process, degrees)
    if experts > 1:
        wrong = experts_misfit(mesh.degrees, experts)
        if wrong is not None:
            raise IncompatibleOptionsError(f"ParallelismConfig: {wrong}.")
        mesh.divide_experts(experts)
    return mesh


def _mesh(
    strategy: type[Strategy], config: Any, process: PartialState, degrees: Mapping[str, int] | None
) -> Mesh:
    device, size, rank = process.device, process.num_processes, process.process_index
    if degrees is None:
        return strategy.make_mesh(config, device, size, rank)
    known = strategy.capabilities.dimensions
    for name, degree in degrees.items():
        if degree > 1 and name not in known:
            taken = ", ".join(f"{other}_size" for other in DIMENSIONS if other in known)
            raise IncompatibleOptionsError(
                f"strategy {strategy.name!r} cannot train with {name}_size={degree}; it takes {taken}. Strategy "
                "'fsdp2' (FullyShardedDataParallelPlugin) takes all of them."
            )
    strategy.check_degrees(config, degrees)
    mesh = Mesh(degrees, device.type, size, rank)
    mesh.name_unions()
    return mesh


def sequences(parallelism: ParallelismConfig | None, mesh: Mesh) -> SequenceParallel | None:
    """Create the object that divides sequences among ranks; None: each rank has whole sequences."""
    if parallelism is None or not (parallelism.cp_enabled or parallelism.sp_enabled):
        return None
    # Here, because torch loads its compiler with attention's biases.
    from accel_train.sequence.parallel import SequenceParallel

    return SequenceParallel(mesh, *parallelism.sequences)
