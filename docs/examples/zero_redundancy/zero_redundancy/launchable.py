"""What the launcher, the wizard and the help know of the strategy; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config import LaunchableStrategy, Options, Section, StrategyQuestion
from accel_state.config.option import option
from accel_state.errors import ConfigError

__all__ = ["ZERO_REDUNDANCY", "ZeroRedundancySection"]


@dataclass(frozen=True, repr=False, eq=False)
class ZeroRedundancySection(Section):
    """Options of the strategy."""

    file_key = "zero_redundancy_config"
    prefix = "zero_redundancy_"
    env_prefix = "ZERO_REDUNDANCY_"
    title = "ZeRO-1"

    parameters_as_bucket_view: bool | None = option(
        help="Keep parameters in the buffers that are sent after a step: fewer messages, no copies.",
        launch_default=False,
        prompt="Should parameters be kept in the buffers that are sent?",
    )


def _no_cuda_graphs(options: Options) -> None:
    path = "zero_redundancy.parameters_as_bucket_view"
    if options.values[path] and options.values["dynamo.mode"] == "reduce-overhead":
        raise ConfigError(
            f"{options.describe(path)} contradicts {options.describe('dynamo.mode')}: CUDA graphs keep addresses of "
            f"parameters, which move into buckets in the first step; {options.remedy(path)}"
        )


ZERO_REDUNDANCY = LaunchableStrategy(
    name="zero_redundancy",
    distributed_type="ZERO_REDUNDANCY",
    title="ZeRO-1",
    summary="a replica on each process, optimizer states divided",
    section=ZeroRedundancySection,
    section_name="zero_redundancy",
    plugin="zero_redundancy.strategy:ZeroRedundancyPlugin",
    questions=(StrategyQuestion(option="parameters_as_bucket_view"),),
    rules=(_no_cuda_graphs,),
    several_processes=True,
)
