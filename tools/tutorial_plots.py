"""The pictures of the tutorial, from the outputs that its pages show; ``draw.py`` writes them.

Tests run the commands of the pages and compare what they print (``tests-integration/test_tutorial.py``).
"""

from __future__ import annotations

import re
from typing import Any

from draw import IMAGES, INK, LINE, OTHER, OWN, ROOT, Drawing

PAGES = ROOT / "docs" / "tutorial"
PICTURES = IMAGES / "tutorial"
STEPS = r"step +(\d+)  loss (\d\.\d{3})"
Series = dict[str, list[list[float]]]
"""Points of each line, or numbers of each bar, by its name."""


def output(page: str, number: int) -> str:
    """An output that a page shows.

    Args:
        page: its name without suffix.
        number: 0 for the first output.
    """
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]


def numbers(pattern: str, text: str) -> list[list[float]]:
    """The numbers of each place where a pattern matches.

    Raises:
        ValueError: it matches nowhere.
    """
    found = [[float(number) for number in match.groups()] for match in re.finditer(pattern, text)]
    if not found:
        raise ValueError(f"no output with {pattern!r} for a picture of the tutorial, in:\n{text}")
    return found


def drawings() -> dict[str, Drawing]:
    """What each file shows, by its name without suffix: that of its page."""
    alone = numbers(STEPS, output("one-process", 0))
    two = "two ranks"
    return {
        "one-process": Drawing("Loss by step, one process", {"one process": alone}, _losses),
        "two-ranks": Drawing(
            "Loss by step, one process and two ranks",
            {"one process": alone, two: numbers(STEPS, output("two-ranks", 0))},
            _losses,
        ),
        "precision-and-accumulation": Drawing(
            "Loss by step, with accumulation and with bf16",
            {
                "one process": alone,
                "two ranks, accumulation": numbers(STEPS, output("precision-and-accumulation", 0)),
                "the same with bf16": numbers(STEPS, output("precision-and-accumulation", 1)),
            },
            _losses,
        ),
        "evaluation": Drawing(
            "Right answers of 501, by epoch",
            {"right": numbers(r"epoch (\d+): (\d+) of (\d+) right", output("evaluation", 0))},
            _accuracy,
        ),
        "fsdp2": Drawing(
            "What each of two ranks holds, in kB",
            {
                name: numbers(r"parameters (\d+) kB, gradients (\d+) kB, AdamW (\d+) kB", output("fsdp2", run))
                for run, name in enumerate(("DDP", "FSDP2"))
            },
            _memory,
        ),
        "resume": Drawing(
            "Loss by step, killed at step 47, resumed and not interrupted",
            {
                "not interrupted (chapter 4)": numbers(STEPS, output("evaluation", 0)),
                "until the kill": numbers(STEPS, output("resume", 0)),
                "resumed": numbers(STEPS, output("resume", 2)),
            },
            _losses,
        ),
        "answer": Drawing(
            "Where the weights are, in kB",
            {
                name: numbers(rf"device {device}: ([\d.]+) kB", output("answer", 1))
                for device, name in (("cpu", "in memory"), ("disk", "on disk"))
            },
            _places,
        ),
    }  # fmt: skip


def _axes(height: float, **labels: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    return figure, figure.add_subplot(**labels)


def _losses(figures: Series) -> Any:
    """One line under all; other runs are marks on it."""
    figure, axes = _axes(2.9, xlabel="step", ylabel="loss", xlim=(0, 104), ylim=(-0.05, 1.4))
    looks = [
        {"color": OTHER, "linewidth": 6, "solid_capstyle": "round"},
        {"color": OWN, "linestyle": "", "marker": "o", "markersize": 6},
        {"color": INK, "linestyle": "", "marker": "x", "markersize": 9, "markeredgewidth": 1.6},
    ]
    if len(figures) == 1:
        looks = [{"color": OWN, "linewidth": 2, "marker": "o", "markersize": 5}]
    for (name, points), look in zip(figures.items(), looks, strict=False):
        axes.plot(*zip(*points, strict=True), label=name, **look)
    if "resumed" in figures:
        axes.axvline(47, color=INK, linestyle="--", linewidth=1)
        axes.text(49, 0.62, "killed at step 47")
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    if len(figures) > 1:
        axes.legend(frameon=False, loc="upper right")
    return figure


def _accuracy(figures: Series) -> Any:
    rows = figures["right"]
    figure, axes = _axes(2.1, xlabel="right answers of 501", xlim=(0, 560))
    names = [f"epoch {epoch:.0f}" for epoch, _, _ in rows]
    bars = axes.barh(names, [right for _, right, _ in rows], color=OWN)
    axes.bar_label(bars, fmt="{:.0f}", padding=4)
    _as_rows(axes, len(rows))
    return figure


def _memory(figures: Series) -> Any:
    rows = [
        (f"{name}, rank {rank}", row) for name, ranks in figures.items() for rank, row in enumerate(ranks)
    ]
    figure, axes = _axes(2.3, xlabel="kB")
    names, left = [name for name, _ in rows], [0.0] * len(rows)
    parts = (("parameters", OWN, 1.0), ("gradients", OTHER, 1.0), ("AdamW", OWN, 0.45))
    for part, (label, color, alpha) in enumerate(parts):
        widths = [row[part] for _, row in rows]
        bars = axes.barh(names, widths, left=left, color=color, alpha=alpha, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(bars, [f"{total:,.0f} kB" for total in left], padding=4)
    axes.set_xlim(0, 1.15 * max(left))
    _as_rows(axes, len(rows))
    axes.legend(frameon=False, loc="lower right")
    return figure


def _places(figures: Series) -> Any:
    figure, axes = _axes(1.2, xlabel="kB of weights")
    left = 0.0
    for (name, [[size]]), color in zip(figures.items(), (OWN, OTHER), strict=True):
        axes.barh(["the model"], [size], left=left, color=color, label=f"{name}: {size:.0f} kB")
        left += size
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    axes.tick_params(left=False)
    return figure


def _as_rows(axes: Any, count: int) -> None:
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(left=False)
