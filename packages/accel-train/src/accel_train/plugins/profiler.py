"""Options of the profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accel_state.handlers import KwargsHandler
from accel_train.errors import OptionError

__all__ = ["ProfileKwargs"]


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Attributes:
        activities: of "cpu", "cuda", "xpu", "mtia", "hpu"; None lets torch choose.
        schedule_option: arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler when a cycle of the schedule is done.
        output_trace_dir: folder for one Chrome trace per rank, `profile_<rank>.json`.
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> Any:
        """The profiler, not started.

        Raises:
            OptionError: an activity that torch does not know.
        """
        import torch

        known = {name.lower(): value for name, value in torch.profiler.ProfilerActivity.__members__.items()}
        activities = None
        if self.activities is not None:
            unknown = [name for name in self.activities if name not in known]
            if unknown:
                raise OptionError(
                    f"Unknown profiler activity {unknown[0]!r}; known: {', '.join(sorted(known))}."
                )
            activities = [known[name] for name in self.activities]
        schedule = torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
