"""Options of gradient accumulation."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from accel_state.config.sections.accumulation import GradientAccumulationSection
from accel_train.errors import OptionError
from accel_train.plugins.base import SectionPlugin

__all__ = ["GradientAccumulationPlugin"]


@dataclass(frozen=True, repr=False, eq=False)
class GradientAccumulationPlugin(SectionPlugin, GradientAccumulationSection):
    """Options of gradient accumulation.

    Attributes:
        num_steps: micro-batches per optimizer step; None: the launcher's setting, else 1.
        adjust_scheduler: the scheduler's length is counted in micro-batches, so it also advances while gradients
            accumulate. Off by default: a prepared scheduler advances when the optimizer does.
        sync_with_dataloader: the last batch of a loader ends the accumulation window.
        sync_each_batch: reduce gradients at every micro-batch; less memory when sharded, more communication.

    Raises:
        OptionError: `num_steps` is not a whole number of at least 1.
        ConfigError: `num_steps` is None, and the launcher's variable does not hold a whole number of at least 1.
    """

    section: ClassVar[str] = "gradient_accumulation"

    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def check(self) -> Mapping[str, Any]:
        """Refuse a number of steps that is not a whole number of at least 1."""
        steps = self.num_steps
        if steps is None:
            return {}
        # numbers.Integral: NumPy's integers, too.
        if isinstance(steps, bool) or not isinstance(cast(object, steps), numbers.Integral) or steps < 1:
            raise OptionError(
                f"The number of gradient accumulation steps must be a whole number of at least 1, got {steps!r}."
            )
        return {"num_steps": int(steps)}
