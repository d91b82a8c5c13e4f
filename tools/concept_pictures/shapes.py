"""Boxes, texts and arrows on a canvas, in the colors that all concept pictures have in common.

Sizes are points, y grows downwards. A canvas is narrow, because a telephone shows it at about two thirds of its size.
"""

from __future__ import annotations

import plots

INK, LINE, OWN, OTHER = plots.INK, plots.LINE, plots.OWN, plots.OTHER
PAPER = "#ffffff"
RANKS = ("#3f51b6", "#00796b", "#c75000", "#ad1457")
"""The colors of rank 0 to 3."""
GROUPS = ("#7b1fa2", "#566c00", "#0277bd")
"""The colors of three kinds of groups of ranks."""
DARK = plots.DARK | {
    PAPER: "#12151d",
    **dict(zip(RANKS, ("#8c9eff", "#4db6ac", "#ffb067", "#f48fb1"), strict=True)),
    **dict(zip(GROUPS, ("#ce93d8", "#c0ca33", "#4fc3f7"), strict=True)),
}
WIDTH = 380.0
SMALL, TEXT = 9.7, 10.2


class Canvas:
    """A figure without axes."""

    def __init__(self, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()
        self._drawn = 0

    def _above(self) -> int:
        """The place above all that was drawn before."""
        self._drawn += 1
        return self._drawn

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        edge: str | None = None,
        alpha: float = 1.0,
        hatch: str | None = None,
        dashed: bool = False,
        line: float = 1.0,
    ) -> None:
        """A rectangle by its upper left corner."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(
            Rectangle(
                (x, y), width, height, facecolor=fill or "none", edgecolor=edge or "none", alpha=alpha,
                hatch=hatch, linewidth=line if edge else 0, linestyle="--" if dashed else "-",
                zorder=self._above(),
            )
        )  # fmt: skip

    def text(
        self, x: float, y: float, words: str, *, size: float = TEXT, color: str = INK, bold: bool = False,
        at: str = "left",
    ) -> None:  # fmt: skip
        """Words, centered at the height ``y``."""
        self.axes.text(
            x,
            y,
            words,
            fontsize=size,
            color=color,
            ha=at,
            va="center_baseline",
            fontweight="bold" if bold else "normal",
            zorder=self._above(),
        )

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        color: str = LINE,
        width: float = 1.0,
        dashed: bool = False,
    ) -> None:
        """A line through points."""
        xs, ys = zip(*points, strict=True)
        self.axes.plot(
            xs,
            ys,
            color=color,
            linewidth=width,
            linestyle="--" if dashed else "-",
            solid_capstyle="butt",
            zorder=self._above(),
        )

    def area(
        self, points: list[tuple[float, float]], floor: float, *, color: str, alpha: float = 1.0
    ) -> None:
        """What is between a line and a height."""
        xs, ys = zip(*points, strict=True)
        self.axes.fill_between(xs, ys, floor, color=color, alpha=alpha, linewidth=0, zorder=self._above())

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], *, color: str = INK) -> None:
        """From one point to another."""
        self.axes.annotate(
            "",
            end,
            begin,
            arrowprops={"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0},
            zorder=self._above(),
        )

    def time_axis(
        self, y: float, left: float, right: float, span: float, every: float, unit: str = "ms"
    ) -> None:
        """A line with marks, in steps of ``every``, from 0 to ``span``."""
        self.line([(left, y), (right, y)], color=INK)
        for number in range(int(span // every) + 1):
            x = left + number * every / span * (right - left)
            self.line([(x, y), (x, y + 4)], color=INK)
            last = number == int(span // every)
            self.text(
                x, y + 12, f"{number * every:g}" + (f" {unit}" if last else ""), size=SMALL, at="center"
            )
