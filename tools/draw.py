"""Write the drawings of the documentation, or check that they are up to date.

Run from the repository root: ``python tools/draw.py`` writes the files in ``docs/images``; ``--check`` compares, prints
the names of those that differ and exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drawings import plots

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def render() -> dict[Path, str]:
    """The text of each file."""
    page = plots.Page(plots.PAGE.read_text(encoding="utf-8"))
    return {IMAGES / "plots" / f"{name}.svg": text for name, text in plots.plots(page).items()}


def main(arguments: list[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description="Write the drawings of the documentation.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file would change"
    )
    check = parser.parse_args(arguments).check
    stale = 0
    for path, text in render().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale += 1
            print(
                f"{path.relative_to(IMAGES.parents[1])}: "
                + ("out of date; run: python tools/draw.py" if check else "written")
            )
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
