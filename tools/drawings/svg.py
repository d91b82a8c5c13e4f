"""Shapes and texts of an SVG file whose colours follow the reader's light or dark scheme.

A browser applies ``prefers-color-scheme`` inside an image by the ``color-scheme`` of the page that shows it, so one
file serves a site with a switch between both, and a README on a page of either. The background is transparent.
"""

from __future__ import annotations

from html import escape

# The name of a colour, its value in the light and in the dark scheme.
COLORS = (
    ("ink", "#1f2430", "#e6e8ee"),
    ("soft", "#5b6372", "#a9b1c1"),
    ("line", "#b9c1cf", "#566079"),
    ("panel", "#f1f4fb", "#272d3d"),
    ("ours", "#3949ab", "#8c9eff"),
    ("ours-fill", "#e3e7fa", "#2b3358"),
    ("other", "#a3acbb", "#667089"),
    ("third", "#c7cedb", "#495269"),
    ("good", "#1b7f5c", "#5fd0a5"),
    ("good-fill", "#e0f3eb", "#1f3d35"),
    ("warm", "#a85b00", "#ffb86b"),
    ("warm-fill", "#fbeedd", "#453522"),
)


def style() -> str:
    """The style sheet of a drawing."""
    light = "".join(f"--{name}:{value};" for name, value, _ in COLORS)
    dark = "".join(f"--{name}:{value};" for name, _, value in COLORS)
    return (
        f"<style>svg{{{light}font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
        "font-size:14px}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        ".mono{font-family:ui-monospace,'SFMono-Regular',Menlo,'DejaVu Sans Mono',monospace;font-size:12.5px}"
        ".small{font-size:12px}.bold{font-weight:600}.title{font-size:16px;font-weight:600}.big{font-size:30px;font-weight:700}"
        "</style>"
    )


class Drawing:
    """An SVG file that is put together from shapes.

    Args:
        width: in pixels, of the view box.
        height: in pixels.
        label: what the drawing shows, for readers who do not see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str = "ink",
        kind: str = "",
        anchor: str = "start",
    ) -> None:
        """One line of text, whose baseline is at ``y``."""
        classes = f' class="{kind}"' if kind else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y)}"{classes}{place} style="fill:var(--{color})">{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "panel",
        stroke: str = "line",
        radius: float = 6,
        dashed: bool = False,
    ) -> None:
        """A rectangle with round corners; ``stroke=""`` leaves the border out."""
        border = f"stroke:var(--{stroke})" if stroke else "stroke:none"
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(radius)}"{dashes} style="fill:var(--{fill});{border}"/>'
        )

    def labelled(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: list[str],
        *,
        fill: str = "panel",
        stroke: str = "line",
        kinds: tuple[str, ...] = ("bold",),
    ) -> None:
        """A box with lines of text in its middle; ``kinds`` are those of the first lines, others are small and soft."""
        self.box(x, y, width, height, fill=fill, stroke=stroke)
        top = y + height / 2 - (len(lines) - 1) * 9 + 5
        for at, line in enumerate(lines):
            kind = kinds[at] if at < len(kinds) else "small"
            color = "ink" if at < len(kinds) else "soft"
            self.text(x + width / 2, top + at * 18, line, kind=kind, color=color, anchor="middle")

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        color: str = "line",
        width: float = 1.5,
        dashed: bool = False,
    ) -> None:
        """Straight lines from point to point."""
        path = "M" + " L".join(f"{number(x)} {number(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none"{dashes} stroke-width="{number(width)}" style="stroke:var(--{color})"/>'
        )

    def arrow(
        self,
        points: list[tuple[float, float]],
        *,
        color: str = "soft",
        width: float = 1.5,
        dashed: bool = False,
    ) -> None:
        """The same with a head at the last point; the last piece is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = _sign(x - x0), _sign(y - y0)
        self.line([*points[:-1], (x - 6 * dx, y - 6 * dy)], color=color, width=width, dashed=dashed)
        wing = f"{number(x - 9 * dx - 5 * dy)},{number(y - 9 * dy - 5 * dx)} "
        wing += f"{number(x - 9 * dx + 5 * dy)},{number(y - 9 * dy + 5 * dx)}"
        self._parts.append(f'<polygon points="{number(x)},{number(y)} {wing}" style="fill:var(--{color})"/>')

    def dot(self, x: float, y: float, *, color: str = "ours", radius: float = 4) -> None:
        """A filled circle."""
        self._parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" style="fill:var(--{color})"/>'
        )

    def svg(self) -> str:
        """The file."""
        width, height = number(self.width), number(self.height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        head += f'viewBox="0 0 {width} {height}" '
        head += f'role="img" aria-label="{escape(self.label)}">'
        return "\n".join([head, style(), *self._parts, "</svg>"]) + "\n"


def number(value: float) -> str:
    """``value`` with at most one decimal, as a file has it."""
    return f"{value:.1f}".removesuffix(".0")


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
