"""The plots of the documentation, from the tables of the benchmarks; ``draw.py`` writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draw import IMAGES, INK, LINE, OTHER, OWN, ROOT, Drawing

PAGES = tuple(
    ROOT / "docs" / f"{name}.md"
    for name in ("benchmarks", "benchmarks/command", "benchmarks/checkpoints", "benchmarks/big-models")
)
PICTURES = IMAGES / "plots"
OURS, ACCELERATE = "accel", "Accelerate 1.15"
PEERS = {"ours": OURS, "Accelerate": ACCELERATE}


class PageError(ValueError):
    """The page has not the table, row or number that a plot is drawn from."""


@dataclass(frozen=True)
class Group:
    """Figures that are compared with each other: of programs, or of one program for several numbers of ranks."""

    title: str
    values: dict[str, float]
    form: str = "{:.2f} s"


@dataclass(frozen=True)
class Plot:
    """What a file shows.

    Attributes:
        title: of all.
        groups: bars below each other, or one line for each.
        kind: ``bars`` with one scale, ``scales`` is bars with a scale for each group, or ``lines``.
        mark: a value that a vertical line marks.
        width: in inches; letters stay readable on a telephone, where a picture shrinks to 3.7 inches. A picture with a
            single group has no title: the page says what it shows.
    """

    title: str
    groups: list[Group]
    kind: str = "bars"
    mark: float | None = None
    width: float = 4.8


@dataclass(frozen=True)
class Page:
    """The tables of pages.

    Args:
        text: their Markdown.
    """

    text: str

    def value(self, row: str, column: str, *, section: str, after: str = "") -> float:
        """A number of a table.

        Args:
            row: how the first cell of its row begins.
            column: the heading of its column.
            section: the heading above the table.
            after: what stands before the number in its cell; by default it is the first number.

        Raises:
            PageError: there is no such section, row, column or number.
        """
        below = self.text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        headings: list[str] = []
        for line in below.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            headings = headings if cells and headings else cells
            if cells and cells[0].startswith(row) and column in headings:
                cell = cells[headings.index(column)]
                if match := re.search(rf"{after}(\d[\d,]*(?:\.\d+)?)", cell):
                    return float(match[1].replace(",", ""))
        where = f"section {section!r}, row {row!r}, column {column!r}"
        raise PageError(f"the benchmarks have no number {after!r} in {where}, from which a plot is drawn")

    def group(self, title: str, row: str, columns: Mapping[str, str], section: str, **form: str) -> Group:
        """A row of a table; ``columns`` are headings, and the names that the plot has for them."""
        return Group(
            title,
            {name: self.value(row, column, section=section) for column, name in columns.items()},
            **form,
        )


def benchmarks() -> Page:
    """The tables of the documentation."""
    return Page("\n".join(path.read_text(encoding="utf-8") for path in PAGES))


def loads(page: Page) -> dict[str, float]:
    """Seconds to load a model from the page cache."""
    row, section = "load and touch, warm", "Big models"
    return {
        OURS: page.value(row, "ours", section=section),
        "transformers": page.value(
            row, "the machine, or transformers", section=section, after="transformers "
        ),
        ACCELERATE: page.value(row, "Accelerate", section=section),
    }


def plots(page: Page) -> dict[str, Plot]:
    """What each file shows, by its name without suffix."""
    wide = wide_plots(page)
    why = zip(("why-step", "why-save", "why-load"), wide["why"].groups, strict=True)
    return wide | {name: Plot(group.title, [group], width=3.6) for name, group in why}


def wide_plots(page: Page) -> dict[str, Plot]:
    """Those that fill the width of a page."""
    dcp = {"ours": OURS, "dcp, stager kept": "dcp.async_save, stager kept", "dcp": "dcp.async_save"}
    stall, two_threads = "stall of a save in the background", "stall, 2 training threads"
    worlds = ("2", "8", "64", "1024")
    thousands = "Worlds of thousands of ranks"
    plain = page.value("plain", "plain PyTorch", section="A training step")
    steps = [
        page.group(title, row, {"ours": OURS, "Fabric": "Lightning Fabric 2.6", "Accelerate": ACCELERATE},
                   "A training step", form="{:.2f}")
        for row, title in (("plain", "plain"), ("accumulate 4", "accumulation of 4"), ("bf16", "bf16"),
                           ("ddp, 2 ranks", "ddp, 2 ranks"))
    ]  # fmt: skip
    added = {name: round((value - 1) * plain, 1) for name, value in steps[0].values.items()}
    return {
        "why": Plot(
            "What a step, a save and a load cost, lower is better",
            [
                Group(f"Added to a training step of {plain:.0f} µs in plain PyTorch, on a CPU", added, "{:.0f} µs"),
                page.group("Stall of a save of 1 GB, in the background, 1 training thread", stall, dcp, "Checkpoints"),
                Group("Loading a Llama of 5.5 GB, warm page cache, every weight touched", loads(page)),
            ],
            "scales",
            width=8.0,  # for the README
        ),
        "step": Plot("A step over plain PyTorch's (1.0), lower is better", steps, mark=1.0),
        "command": Plot(
            "Seconds of a command, lower is better",
            [
                page.group(title, row, {"accel": OURS, "torchrun": "torchrun", "Accelerate": ACCELERATE}, "The command")
                for row, title in (
                    ("`--help`", "--help"),
                    ("launch of 1 process", "launch of 1 process"),
                    ("launch of 2 processes", "launch of 2 processes"),
                    ("2 processes that import", "2 processes: import torch, all-reduce"),
                )
            ],
        ),
        "checkpoints": Plot(
            "A training state of 1 GB, in seconds, lower is better",
            [
                page.group("stall, 1 training thread, a core free", stall, dcp, "Checkpoints"),
                page.group("stall, 2 training threads on 2 cores", two_threads, dcp, "Checkpoints"),
                page.group("load, page cache warm", "load, page cache warm", PEERS, "Checkpoints"),
                page.group("load, cold", "load, cold", PEERS, "Checkpoints"),
            ],
        ),
        "big-models": Plot(
            "A Llama of 5.5 GB: seconds, lower is better",
            [
                Group("load and touch every weight, warm", loads(page)),
                page.group("prepare blocks on disk", "blocks on disk: prepare", PEERS, "Big models"),
                page.group("a warm forward, blocks on disk", "… warm forward, s", PEERS, "Big models"),
            ],
            "scales",
        ),
        "sampling": Plot(
            "µs to find the next batch, by the number of ranks",
            [
                Group(name, {ranks: page.value(ranks, column, section="Sampling") for ranks in worlds}, "{:g} µs")
                for column, name in PEERS.items()
            ],
            "lines",
        ),
        "scale": Plot(
            "Seconds to plan a save, by the number of ranks",
            [
                Group(name, {ranks.replace(",", ""): page.value(ranks, column, section=thousands) for ranks in sizes},
                      "{:g} s")
                for column, name, sizes in (
                    ("planning on a rank, s", OURS, ("8", "64", "512", "1,024", "4,096")),
                    ("torch's dcp on its coordinator, s", "dcp", ("8", "64", "512", "1,024")),
                )
            ],
            "lines",
        ),
    }  # fmt: skip


def drawings() -> dict[str, Drawing]:
    """The files, by their names without suffix."""
    return {
        name: Drawing(plot.title, asdict(plot), lambda _, plot=plot: _figure(plot))
        for name, plot in plots(benchmarks()).items()
    }


def _figure(plot: Plot) -> Any:
    from matplotlib.figure import Figure

    if plot.kind == "lines":
        figure = Figure(figsize=(plot.width, 3.2), layout="constrained")
        found = [value for group in plot.groups for value in group.values.values()]
        decades = range(math.floor(math.log10(min(found))), math.ceil(math.log10(max(found))) + 1)
        ends = (10.0 ** decades[0], 10.0 ** decades[-1])
        axes = figure.add_subplot(xlabel="ranks", xscale="log", yscale="log", ylim=ends)
        for group in plot.groups:
            ranks, values = [*map(int, group.values)], [*group.values.values()]
            axes.plot(ranks, values, "o-", color=OWN if group.title == OURS else OTHER, linewidth=2)
            axes.text(
                ranks[-1] * 1.2, values[-1], f"{group.title}: {group.form.format(values[-1])}", va="center"
            )
        axes.set_xticks([*map(int, plot.groups[0].values)], plot.groups[0].values)
        axes.minorticks_off()
        axes.set_yticks([10.0**decade for decade in decades], [f"{10.0**decade:g}" for decade in decades])
        axes.grid(axis="y", color=LINE, linewidth=0.6)
    else:
        sizes = [len(group.values) for group in plot.groups]
        titled = len(sizes) > 1
        height = 0.25 * sum(sizes) + (0.4 + 0.35 * len(sizes) if titled else 0.1)
        figure = Figure(figsize=(plot.width, height), layout="constrained")
        grid = figure.subplots(len(sizes), sharex=plot.kind == "bars", height_ratios=sizes, squeeze=False)
        for axes, group in zip(grid[:, 0], plot.groups, strict=True):
            names = [*group.values]
            bars = axes.barh(
                names, [*group.values.values()], color=[OWN if name == OURS else OTHER for name in names]
            )
            axes.bar_label(bars, fmt=group.form, padding=4)
            if titled:
                axes.set_title(group.title, loc="left", fontsize=9, fontweight="bold")
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.margins(x=0.12)
            axes.tick_params(bottom=False, labelbottom=False, left=False)
            axes.spines["bottom"].set_visible(False)
            if plot.mark is not None:
                axes.axvline(plot.mark, color=INK, linestyle="--", linewidth=1)
    if plot.kind == "lines" or titled:
        figure.suptitle(plot.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure
