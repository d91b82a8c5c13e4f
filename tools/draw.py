"""Draw the plots of the benchmarks, the pictures of the tutorial and those of the concept pages.

Run from the repository root: ``hatch run draw`` writes the files in ``docs/images`` by matplotlib, which has an
environment of its own. Each file holds the facts that it shows; ``--check`` compares these with the pages and records
that they come from, without matplotlib, prints the names of files that differ and exits with 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from generated import ROOT, Generated, write_or_check

IMAGES = ROOT / "docs" / "images"
INK, LINE, OWN, OTHER, PAPER = "#1f2430", "#b9c1cf", "#0b6e69", "#a3acbb", "#ffffff"
RANKS = ("#3f51b6", "#00796b", "#c75000", "#ad1457")
"""The colors of rank 0 to 3."""
GROUPS = ("#7b1fa2", "#566c00", "#0277bd")
"""The colors of three kinds of groups of ranks."""
DARK = {INK: "#e6e8ee", LINE: "#566079", OWN: "#5fd3c8", OTHER: "#667089", PAPER: "#12151d"}
DARK |= dict(zip(RANKS, ("#8c9eff", "#4db6ac", "#ffb067", "#f48fb1"), strict=True))
DARK |= dict(zip(GROUPS, ("#ce93d8", "#c0ca33", "#4fc3f7"), strict=True))
"""What each color becomes in the dark scheme."""
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Drawing:
    """A file to write.

    Attributes:
        title: of the file.
        facts: what it is drawn from, which the file holds as JSON.
        draw: makes a figure of matplotlib from them.
    """

    title: str
    facts: Any
    draw: Callable[[Any], Any]

    @property
    def description(self) -> str:
        """What the file says about itself: all that it is drawn from."""
        return json.dumps(self.facts, ensure_ascii=False)

    def svg(self) -> str:
        """The file, with its texts as text, in the colors of the light and the dark scheme."""
        import matplotlib

        fonts = {"svg.fonttype": "none", "svg.hashsalt": "accel", "font.size": 9, "text.color": INK}
        edges = {"axes.edgecolor": LINE, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
        with matplotlib.rc_context(fonts | edges | {"axes.spines.top": False, "axes.spines.right": False}):
            file = StringIO()
            about = {"Title": self.title, "Description": self.description, "Creator": None, "Date": None}
            figure = self.draw(self.facts)
            figure.savefig(file, format="svg", transparent=True, metadata=about)
        text = re.sub(r" +$", "", file.getvalue(), flags=re.MULTILINE)
        # A browser applies this inside an image by the scheme of the page that shows it.
        rules = "".join(
            f'[style*="{property}: {light}"]{{{property}:{color}!important}}'
            for light, color in DARK.items()
            if light in text
            for property in ("fill", "stroke")
        )
        return text.replace("</style>", f"@media(prefers-color-scheme:dark){{{rules}}}</style>", 1)


def described(path: Path) -> str | None:
    """The description in a file; None if there is no such file."""
    return ElementTree.parse(path).findtext(f".//{_DESCRIPTION}") if path.is_file() else None


def texts_of(path: Path) -> list[str | None]:
    """The words that a file shows."""
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def drawings() -> Iterator[tuple[Path, Drawing]]:
    """All files."""
    import concepts
    import plots
    import tutorial_plots

    for module in (plots, tutorial_plots, concepts):
        for name, drawing in module.drawings().items():
            yield module.PICTURES / f"{name}.svg", drawing


def main(arguments: list[str] | None = None) -> int:
    """Write or check; the exit status."""
    files = (
        Generated(path, described(path) == drawing.description, drawing.svg) for path, drawing in drawings()
    )
    return write_or_check(__doc__, "hatch run draw", files, arguments)


if __name__ == "__main__":
    sys.exit(main())
