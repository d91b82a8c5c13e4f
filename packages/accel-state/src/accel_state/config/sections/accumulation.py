"""Gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["GradientAccumulationSection"]


@dataclass(frozen=True, repr=False, eq=False)
class GradientAccumulationSection(Section):
    """Micro-batches per optimizer step."""

    title = "Gradient accumulation"

    num_steps: int | None = option(
        help="Micro-batches per optimizer step. In a file it is also accepted in deepspeed_config.",
        name="gradient_accumulation_steps",
        env=("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
        unset=("auto",),
        low=1,
        ours=True,
        prompt="How many micro-batches make one optimizer step (gradient accumulation)?",
    )
