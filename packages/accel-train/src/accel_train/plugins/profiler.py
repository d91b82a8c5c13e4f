"""Options of the profiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accel_state.handlers import KwargsHandler
from accel_train.errors import OptionError

__all__ = ["ProfileKwargs"]


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Options that cannot be used are refused by the constructor.

    Attributes:
        activities: some of "cpu", "cuda", "xpu", "mtia", "hpu"; None: torch chooses.
        schedule_option: arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler when a cycle of the schedule is done.
        output_trace_dir: folder for one Chrome trace per rank, `profile_<rank>.json`, of the last finished cycle.

    Raises:
        OptionError: torch does not know an activity, or refuses the schedule.
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

    def __post_init__(self) -> None:
        self._torch_activities()
        self._schedule()

    def build(self) -> Any:
        """Create the profiler, without starting it."""
        import torch

        return torch.profiler.profile(
            activities=self._torch_activities(),
            schedule=self._schedule(),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _torch_activities(self) -> list[Any] | None:
        import torch

        if self.activities is None:
            return None
        known = {name.lower(): value for name, value in torch.profiler.ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities if name not in known]
        if unknown:
            raise OptionError(f"Unknown profiler activity {unknown[0]!r}; known: {', '.join(sorted(known))}.")
        return [known[name] for name in self.activities]

    def _schedule(self) -> Callable[[int], Any] | None:
        import torch

        options = self.schedule_option
        if not options:
            return None
        known = inspect.signature(torch.profiler.schedule).parameters
        unknown = [name for name in options if name not in known]
        missing = [
            name for name, value in known.items() if value.default is value.empty and name not in options
        ]
        if unknown or missing:
            problem = f"has {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
            raise OptionError(
                f"schedule_option={options!r} {problem}; torch.profiler.schedule takes {', '.join(known)}."
            )
        try:
            return torch.profiler.schedule(**options)
        except AssertionError as error:
            raise OptionError(f"schedule_option={options!r} is no schedule: {error}.") from error
