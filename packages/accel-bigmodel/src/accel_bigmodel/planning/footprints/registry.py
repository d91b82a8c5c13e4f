"""Footprints by the name of their strategy, including those of installed packages."""

from __future__ import annotations

from accel_bigmodel.errors import EstimateError
from accel_bigmodel.planning.footprints.base import Footprint, Setting, StrategyFootprint, Timelines, Workload
from accel_bigmodel.planning.shape import ModelShape
from accel_state.registry import Registry

__all__ = ["GROUP", "footprint", "footprint_class", "footprint_names"]

GROUP = "accel_bigmodel.footprints"
"""The entry-point group of footprints."""

_FOLDER = "accel_bigmodel.planning.footprints"
_BUILT_IN = {
    "single": f"{_FOLDER}.base:StrategyFootprint",
    "ddp": f"{_FOLDER}.ddp:DDPFootprint",
    "fsdp2": f"{_FOLDER}.fsdp2:FSDP2Footprint",
    "deepspeed": f"{_FOLDER}.deepspeed:DeepSpeedFootprint",
    "pp": f"{_FOLDER}.pipeline:PipelineFootprint",
    "pp x fsdp2": f"{_FOLDER}.pipeline:ShardedPipelineFootprint",
    "tp": f"{_FOLDER}.tensor_parallel:TensorParallelFootprint",
}

_REGISTRY: Registry[type[StrategyFootprint]] = Registry(
    "footprint", GROUP, _BUILT_IN, base_class=StrategyFootprint, error=EstimateError
)


def footprint_names() -> list[str]:
    """The strategies that have a footprint: the built-in ones, then installed ones by name."""
    return [*_BUILT_IN, *sorted(_REGISTRY.installed())]


def footprint_class(strategy: str) -> type[StrategyFootprint]:
    """Return the footprint class of a strategy.

    Raises:
        EstimateError: it has none; the message names the strategies that have one.
    """
    if strategy not in footprint_names():
        raise EstimateError(
            f"the memory of the strategy {strategy!r} is not known; known: {', '.join(footprint_names())}"
        )
    return _REGISTRY.get(strategy)


def footprint(shape: ModelShape, setting: Setting, workload: Workload, timelines: Timelines) -> Footprint:
    """Compute the peak memory of a rank in a step after the first.

    Raises:
        EstimateError: the memory of the strategy is not known.
    """
    kind = footprint_class(setting.strategy)
    timeline = timelines(kind.numbers(workload.precision), setting.checkpointing)
    held = kind(shape, setting, workload, timeline)
    moments = [*held.moments()]
    return Footprint(
        peak=max(moments, key=lambda moment: moment.total),
        kept=held.between().total,
        host=held.host(),
        knows_activations=timeline is not None,
    )
