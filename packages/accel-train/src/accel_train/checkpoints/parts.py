"""The parts that the state of an `Accelerator` consists of."""

from __future__ import annotations

from collections.abc import Sequence

from accel_ckpt.modules.named_model import NamedModel
from accel_train.checkpoints.counters import Counters
from accel_train.checkpoints.random_state import RandomStates
from accel_train.checkpoints.registered_state import RegisteredStates
from accel_train.checkpoints.replica_state import ReplicaStates
from accel_train.checkpoints.window_state import Trained, WindowStates
from accel_train.data.loader_state import LoaderStates
from accel_train.loop.optimizer_state import OptimizerStates
from accel_train.loop.scheduler_state import SchedulerStates
from accel_train.precision.scaler_state import ScalerState
from accel_train.setup.prepared import Prepared
from accel_train.state_part import StatePart

__all__ = ["named_models", "parts_of"]


def parts_of(prepared: Prepared, named: Sequence[NamedModel], trusted: bool = False) -> list[StatePart]:
    """List all parts, in the order in which they are restored, after the weights.

    Args:
        prepared: the prepared and registered objects.
        named: its models with their canonical names.
        trusted: pickles of registered objects may be loaded.
    """
    strategy, several = prepared.plan.strategy, prepared.process.num_processes > 1
    trained = Trained(
        prepared.models,
        prepared.prepared_models,
        prepared.optimizers,
        prepared.loaders,
        named,
        engine_optimizers=strategy.capabilities.prepares_together,
    )
    places = {id(strategy.plain(model)): place for place, model in enumerate(prepared.prepared_models)}
    averages = {
        id(each): f"an average (decay {each.decay}) of model {places.get(id(each.plain))}"
        for each in strategy.weight_averages
    }
    return [
        ReplicaStates(strategy.states, prepared.prepared_models, named, several),
        *strategy.states.parts(prepared.optimizers, named),
        OptimizerStates(strategy.states, prepared.optimizers, prepared.models, named),
        SchedulerStates(prepared.schedulers, prepared.optimizers),
        ScalerState(prepared.plan.precision, prepared.optimizers),
        RegisteredStates(prepared.registered, trusted, averages),
        LoaderStates(prepared.loaders),
        WindowStates(prepared.accumulator, trained, strategy),
        *prepared.parts,
        Counters(prepared),
        RandomStates(strategy.draws),
    ]


def named_models(prepared: Prepared) -> list[NamedModel]:
    """The prepared models; their canonical names are worked out once for all that uses this list."""
    return [NamedModel(prepared.plan.strategy.plain(model)) for model in prepared.prepared_models]
