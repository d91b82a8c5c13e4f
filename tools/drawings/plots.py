"""Plots of the tables in ``docs/benchmarks.md``; a table that changes there changes its plot."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drawings.svg import Drawing

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
OURS, ACCELERATE = "accel", "Accelerate 1.15"


class PageError(ValueError):
    """The page has not the table, row or number that a plot is drawn from."""


@dataclass(frozen=True)
class Bar:
    """One bar of a plot.

    Attributes:
        name: what was measured.
        value: its length.
        color: of the bar.
        note: shown behind it; by default the value.
    """

    name: str
    value: float
    color: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The tables of the page.

    Args:
        text: its Markdown.
    """

    text: str

    def cell(self, row: str, column: str, *, section: str) -> str:
        """The cell of a table.

        Args:
            row: how its first cell begins.
            column: the heading of its column.
            section: the heading above the table.

        Raises:
            PageError: there is no such section, row or column.
        """
        _, found, below = self.text.partition(f"\n## {section}\n")
        if not found:
            raise PageError(f"docs/benchmarks.md has no section {section!r}, from which a plot is drawn")
        headings: list[str] = []
        for line in below.partition("\n## ")[0].splitlines():
            cells = (
                [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
            )
            if not cells:
                headings = []
            elif not headings:
                headings = cells
            elif cells[0].startswith(row) and column in headings:
                return cells[headings.index(column)]
        raise PageError(f"docs/benchmarks.md has no row {row!r} with a column {column!r} under {section!r}")

    def value(self, row: str, column: str, *, section: str) -> float:
        """The first number of a cell.

        Raises:
            PageError: as ``cell``, or there is no number in it.
        """
        cell = self.cell(row, column, section=section)
        match = _NUMBER.search(cell)
        if match is None:
            raise PageError(f"docs/benchmarks.md, {section!r}, {row!r}, {column!r}: {cell!r} has no number")
        return float(match[0].replace(",", ""))


def plots(page: Page) -> dict[str, str]:
    """SVG files by name."""
    return {
        "why": why(page),
        "step": step(page),
        "sampling": sampling(page),
        "command": command(page),
        "checkpoints": checkpoints(page),
        "big-models": big_models(page),
    }


def why(page: Page) -> str:
    """The three figures of the README in one picture."""
    drawing = Drawing(
        880,
        262,
        "Overhead of a training step, stall of a save in the background, and time to load a model: accel and others",
    )
    step_section, ours, theirs = "A training step", *_step(page, "plain")
    plain = page.value("plain", "plain PyTorch", section=step_section)
    panels = [
        (
            "Added to a training step",
            f"of {plain:.0f} µs in plain PyTorch, on a CPU",
            [
                Bar(OURS, (ours - 1) * plain, "ours", f"{(ours - 1) * plain:.0f} µs"),
                Bar("Lightning Fabric", (_step(page, "plain", "Fabric")[1] - 1) * plain, "other",
                    f"{(_step(page, 'plain', 'Fabric')[1] - 1) * plain:.0f} µs"),
                Bar(ACCELERATE, (theirs - 1) * plain, "other", f"{(theirs - 1) * plain:.0f} µs"),
            ],
        ),
        ("Stall of a save of 1 GB", "in the background, 1 training thread", stalls(page)),
        ("Loading a Llama of 5.5 GB", "warm page cache, every weight touched", loads(page)),
    ]  # fmt: skip
    for at, (title, subtitle, bars) in enumerate(panels):
        left = 14 + at * 292
        drawing.box(left, 8, 276, 246)
        drawing.text(left + 16, 36, title, kind="bold")
        drawing.text(left + 16, 55, subtitle, kind="small", color="soft")
        longest = max(bar.value for bar in bars)
        for row, bar in enumerate(bars):
            y = 82 + row * 56
            drawing.text(left + 16, y, bar.name, color="ours" if bar.color == "ours" else "ink",
                         kind="bold" if bar.color == "ours" else "")  # fmt: skip
            drawing.box(
                left + 16, y + 7, max(3, 176 * bar.value / longest), 18, fill=bar.color, stroke="", radius=3
            )
            drawing.text(left + 24 + max(3, 176 * bar.value / longest), y + 21, bar.note, kind="bold")
    return drawing.svg()


def step(page: Page) -> str:
    """Ratios of a step to plain PyTorch."""
    loops = {
        "plain": "plain",
        "accumulate 4": "accumulation of 4",
        "bf16": "bf16",
        "ddp, 2 ranks": "ddp, 2 ranks",
    }
    groups = []
    for row, name in loops.items():
        values = {
            column: page.value(row, column, section="A training step")
            for column in ("ours", "Accelerate", "Fabric")
        }
        groups.append(
            (name, [
                Bar(OURS, values["ours"], "ours", f"{values['ours']:.2f}"),
                Bar("Lightning Fabric 2.6", values["Fabric"], "third", f"{values['Fabric']:.2f}"),
                Bar(ACCELERATE, values["Accelerate"], "other", f"{values['Accelerate']:.2f}"),
            ])
        )  # fmt: skip
    return _groups(
        "A training step over the same step of plain PyTorch (1.0), lower is better",
        groups,
        mark=(1.0, "plain PyTorch"),
    )


def command(page: Page) -> str:
    """Seconds of commands."""
    rows = {
        "`--help`": "--help",
        "launch of 1 process": "launch of 1 process",
        "launch of 2 processes": "launch of 2 processes",
        "2 processes that import": "2 processes: import torch, all-reduce",
    }
    groups = []
    for row, name in rows.items():
        bars = [
            Bar(label, page.value(row, column, section="The command"), color)
            for label, column, color in (
                (OURS, "accel", "ours"),
                ("torchrun", "torchrun", "third"),
                (ACCELERATE, "Accelerate", "other"),
            )
        ]
        groups.append((name, [Bar(bar.name, bar.value, bar.color, f"{bar.value:.2f} s") for bar in bars]))
    return _groups("Seconds of a command, lower is better", groups)


def checkpoints(page: Page) -> str:
    """Seconds of saving and loading."""
    one, two = "stall of a save in the background", "stall, 2 training threads"
    groups = []
    for row, name in (
        (one, "stall, 1 training thread, a core free"),
        (two, "stall, 2 training threads on 2 cores"),
    ):
        groups.append((name, stalls(page, row)))
    for row, name in (("load, page cache warm", "load, page cache warm"), ("load, cold", "load, cold")):
        bars = [
            Bar(label, page.value(row, column, section="Checkpoints"), color)
            for label, column, color in ((OURS, "ours", "ours"), (ACCELERATE, "Accelerate", "other"))
        ]
        groups.append((name, [Bar(bar.name, bar.value, bar.color, f"{bar.value:.2f} s") for bar in bars]))
    return _groups("A training state of 1 GB, in seconds, lower is better", groups)


def big_models(page: Page) -> str:
    """Seconds of loading and preparing."""
    section = "Big models"
    forward = [
        Bar(OURS, page.value("… warm forward, s", "ours", section=section), "ours"),
        Bar(ACCELERATE, page.value("… warm forward, s", "Accelerate", section=section), "other"),
    ]
    prepare = [
        Bar(OURS, page.value("blocks on disk: prepare", "ours", section=section), "ours"),
        Bar(ACCELERATE, page.value("blocks on disk: prepare", "Accelerate", section=section), "other"),
    ]
    groups = [
        ("load and touch every weight, warm", loads(page)),
        (
            "prepare blocks on disk",
            [Bar(bar.name, bar.value, bar.color, f"{bar.value:.2f} s") for bar in prepare],
        ),
        (
            "a warm forward, blocks on disk",
            [Bar(bar.name, bar.value, bar.color, f"{bar.value:.2f} s") for bar in forward],
        ),
    ]
    return _groups(
        "A Llama of 5.5 GB: seconds, lower is better; each group has a scale of its own", groups, shared=False
    )


def sampling(page: Page) -> str:
    """Microseconds per batch against the size of the world, both on logarithmic axes."""
    section, worlds = "Sampling", (2, 8, 64, 1024)
    curves = {
        OURS: ("ours", [page.value(str(world), "ours", section=section) for world in worlds]),
        ACCELERATE: ("other", [page.value(str(world), "Accelerate", section=section) for world in worlds]),
    }
    drawing = Drawing(
        820,
        340,
        "Time to find a batch of one rank against the number of ranks: flat for accel, growing for Accelerate",
    )
    drawing.text(20, 28, "µs to find the next batch of a rank, by the number of ranks", kind="title")
    left, right, top, bottom = 76, 590, 52, 290
    low, high = math.log10(0.1), math.log10(1000)

    def place(world: int, value: float) -> tuple[float, float]:
        x = left + (right - left) * (math.log2(world) - 1) / 9
        return x, bottom - (bottom - top) * (math.log10(value) - low) / (high - low)

    for value in (0.1, 1, 10, 100, 1000):
        y = place(2, value)[1]
        drawing.line([(left, y), (right, y)], width=0.8)
        drawing.text(left - 10, y + 4, f"{value:g}", anchor="end", kind="small", color="soft")
    for world in worlds:
        drawing.text(place(world, 1)[0], bottom + 22, f"{world}", anchor="middle", kind="small", color="soft")
    drawing.text((left + right) / 2, bottom + 42, "ranks", anchor="middle", kind="small", color="soft")
    for name, (color, values) in curves.items():
        points = [place(world, value) for world, value in zip(worlds, values, strict=True)]
        drawing.line(points, color=color, width=2.5)
        for x, y in points:
            drawing.dot(x, y, color=color)
        x, y = points[-1]
        drawing.text(x + 12, y + 5, f"{name}: {values[-1]:g} µs", kind="bold" if color == "ours" else "")
    return drawing.svg()


def _step(page: Page, row: str, column: str = "Accelerate") -> tuple[float, float]:
    section = "A training step"
    return page.value(row, "ours", section=section), page.value(row, column, section=section)


def stalls(page: Page, row: str = "stall of a save in the background") -> list[Bar]:
    """Seconds for which training waits for a save: ours, and DCP's in two ways."""
    columns = (
        (OURS, "ours", "ours"),
        ("dcp.async_save, stager kept", "dcp, stager kept", "third"),
        ("dcp.async_save", "dcp", "other"),
    )
    values = [
        (name, page.value(row, column, section="Checkpoints"), color) for name, column, color in columns
    ]
    return [Bar(name, value, color, f"{value:.2f} s") for name, value, color in values]


def loads(page: Page) -> list[Bar]:
    """Seconds to load a model from the page cache: ours, transformers', Accelerate's."""
    row, section = "load and touch, warm", "Big models"
    cell = page.cell(row, "the machine, or transformers", section=section)
    match = re.search(r"transformers ([\d.]+)", cell)
    if match is None:
        raise PageError(
            f"docs/benchmarks.md, {section!r}, {row!r}: {cell!r} does not say how long transformers takes"
        )
    bars = [
        Bar(OURS, page.value(row, "ours", section=section), "ours"),
        Bar("transformers", float(match[1]), "third"),
        Bar(ACCELERATE, page.value(row, "Accelerate", section=section), "other"),
    ]
    return [Bar(bar.name, bar.value, bar.color, f"{bar.value:.2f} s") for bar in bars]


def _groups(
    title: str,
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    mark: tuple[float, str] | None = None,
    shared: bool = True,
) -> str:
    """Groups of horizontal bars, one below the other.

    Args:
        title: above the plot.
        groups: a name and its bars.
        mark: a value that a vertical line marks, and its name.
        shared: all groups have one scale.
    """
    left, length, row, gap = 236, 400, 25, 34
    height = 62 + sum(len(bars) * row + gap for _, bars in groups)
    drawing = Drawing(760, height, title)
    drawing.text(20, 28, title, kind="title")
    y = 56.0
    longest = max(bar.value for _, bars in groups for bar in bars)
    for name, bars in groups:
        scale = length / (longest if shared else max(bar.value for bar in bars))
        drawing.text(20, y + 14, name, kind="bold")
        y += 22
        for bar in bars:
            drawing.text(
                left - 12,
                y + 15,
                bar.name,
                anchor="end",
                kind="small",
                color="ours" if bar.color == "ours" else "soft",
            )
            drawing.box(
                left, y + 2, max(2.0, bar.value * scale), row - 7, fill=bar.color, stroke="", radius=3
            )
            drawing.text(left + max(2.0, bar.value * scale) + 8, y + 15, bar.note, kind="small")
            y += row
        y += gap - 22
    if mark is not None:
        value, text = mark
        drawing.line(
            [(left + value * length / longest, 60), (left + value * length / longest, height - 12)],
            color="good",
            dashed=True,
        )
        drawing.text(left + value * length / longest + 6, 66, text, kind="small", color="good")
    return drawing.svg()
