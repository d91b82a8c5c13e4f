"""``torch.compile``."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option
from accel_state.enums import DynamoBackend

__all__ = ["DynamoSection"]


@dataclass(frozen=True, repr=False, eq=False)
class DynamoSection(Section):
    """Options of ``torch.compile`` for prepared models."""

    file_key = "dynamo_config"
    prefix = "dynamo_"
    env_prefix = "ACCELERATE_DYNAMO_"
    title = "torch.compile"

    backend: str | None = option(
        help="Backend of torch.compile; no: no compilation.",
        choices=tuple(DynamoBackend.list()),
        synonyms={"torhchxla_trace_once": "TORCHXLA_TRACE_ONCE"},
        prompt="Which backend of torch.compile do you want to use?",
    )
    mode: str | None = option(
        help="Mode of torch.compile.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        launch_default="default",
        prompt="Which mode of torch.compile do you want to use?",
    )
    fullgraph: bool | None = option(
        help="Require that each model compiles to a single graph.",
        name="dynamo_use_fullgraph",
        env=("ACCELERATE_DYNAMO_USE_FULLGRAPH",),
        toggle=True,
        launch_default=False,
        prompt="Must each model compile to a single graph (fullgraph)?",
    )
    dynamic: bool | None = option(
        help="Compile with dynamic shapes; unset: torch.compile decides.",
        name="dynamo_use_dynamic",
        env=("ACCELERATE_DYNAMO_USE_DYNAMIC",),
        toggle=True,
        prompt="Do you want to enable dynamic shape tracing?",
    )
    use_regional_compilation: bool | None = option(
        help="Compile repeated blocks once each instead of the whole model (regional compilation).",
        toggle=True,
        launch_default=False,
        prompt="Do you want to compile repeated blocks only?",
    )
