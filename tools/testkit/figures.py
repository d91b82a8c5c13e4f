"""What a check gets, what it yields, and how the figures are listed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from accel_train import Accelerator

T = TypeVar("T")


class NotRunError(Exception):
    """Something that a check needs is missing here; the message says what."""


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: what was measured.
        value: the number.
        unit: of the number.
        goal: in words; empty if there is none.
        passed: whether the goal was met; None if there is none, or it is not judged at this size.
        note: how, compared with what.
    """

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    passed: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Run:
    """Where and how large a check runs.

    Attributes:
        device_name: "cpu" or "accelerator".
        full: the sizes of the benchmarks; otherwise sizes that take seconds on two cores.
        folder: an empty folder, removed afterwards.
    """

    device_name: str
    full: bool
    folder: Path

    @cached_property
    def device(self) -> torch.device:
        """The device to compute on.

        Raises:
            NotRunError: there is no accelerator.
        """
        import torch

        if self.device_name == "cpu":
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise NotRunError("no accelerator was found by torch.accelerator")
        return torch.device(accelerator.type, 0)

    @property
    def on_cpu(self) -> bool:
        """Whether there is no device to copy to."""
        return self.device_name == "cpu"

    @property
    def judged(self) -> bool:
        """Whether goals of speed and memory count: at full size on an accelerator."""
        return self.full and not self.on_cpu

    def pick(self, small: T, full: T) -> T:
        """A size."""
        return full if self.full else small

    def accelerator(self, **options: Any) -> Accelerator:
        """An `Accelerator` for the device."""
        from accel_train import Accelerator

        return Accelerator(cpu=self.on_cpu, **options)

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked for."""
        import torch

        if not self.on_cpu:
            torch.accelerator.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """How long a call takes, the device's part included."""
        self.synchronize()
        began = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - began

    def median_seconds(self, call: Callable[[], object], rounds: int) -> float:
        """The median of some calls, after one that is not counted."""
        self.seconds(call)
        return statistics.median(self.seconds(call) for _ in range(rounds))

    @contextlib.contextmanager
    def peak_memory(self) -> Iterator[list[int]]:
        """Append the most bytes that PyTorch had on the device at one time inside; nothing on the CPU."""
        import torch

        found: list[int] = []
        if not self.on_cpu:
            self.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        yield found
        if not self.on_cpu:
            self.synchronize()
            found.append(torch.accelerator.max_memory_allocated())

    # Figures with goals

    def exact(self, name: str, value: float, goal: float = 0, unit: str = "", note: str = "") -> Figure:
        """A figure that must be this value at every size."""
        return Figure(name, value, unit, f"= {goal:g}", value == goal, note)

    def within(self, name: str, value: float, goal: float, unit: str = "", note: str = "") -> Figure:
        """A figure that must be at most this value at every size; not NaN."""
        return Figure(name, value, unit, f"≤ {goal:.3g}", value <= goal, note)

    def at_most(self, name: str, value: float, goal: float, unit: str = "", note: str = "") -> Figure:
        """A figure of speed or memory."""
        return self._judged(Figure(name, value, unit, f"≤ {goal:g}", value <= goal, note))

    def at_least(self, name: str, value: float, goal: float, unit: str = "", note: str = "") -> Figure:
        """A figure of speed or memory."""
        return self._judged(Figure(name, value, unit, f"≥ {goal:g}", value >= goal, note))

    def _judged(self, figure: Figure) -> Figure:
        if self.judged:
            return figure
        why = "not judged at this size" if not self.full else "not judged on the CPU"
        note = f"{why}; {figure.note}" if figure.note else why
        return Figure(figure.name, figure.value, figure.unit, figure.goal, None, note)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Figures as lines of aligned columns.

    Args:
        rows: the fields of each `Figure`, and `check`, the name of its check.
    """
    lines = [("check", "figure", "value", "unit", "goal", "status", "note")]
    for row in rows:
        value = f"{row['value']:.4g}" if abs(row["value"]) < 1e6 else f"{row['value']:.3e}"
        status = {True: "ok", False: "FAILED", None: "measured"}[row["passed"]]
        lines.append((row["check"], row["name"], value, row["unit"], row["goal"], status, row["note"]))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    )
