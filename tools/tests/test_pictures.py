"""Every picture of the documentation has words for those who do not see it, and a script that draws it."""

from __future__ import annotations

import re
from pathlib import Path

import concepts
import plots
import terminal_pictures
import tutorial_plots

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Drawn by the example whose losses it shows, and the mark of the site.
OTHERS = {"guides/images/strategies-losses.svg", "images/favicon.svg", "images/logo.svg"}


def test_every_picture_is_drawn_by_a_script():
    folders = (concepts.PICTURES, plots.PLOTS, terminal_pictures.IMAGES, tutorial_plots.PICTURES)
    drawn = {path.relative_to(DOCS).as_posix() for folder in folders for path in folder.glob("*.svg")}
    there = {
        path.relative_to(DOCS).as_posix()
        for kind in ("svg", "png", "jpg", "gif", "webp")
        for path in DOCS.rglob(f"*.{kind}")
    }
    assert there == drawn | OTHERS


def test_every_picture_of_a_page_has_words_and_is_there():
    shown = set()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            assert len(words.split()) >= 4, f"{page.name} shows {target} with the words {words!r}"
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
            shown.add((page.parent / target).resolve())
    unused = {path for path in DOCS.rglob("*.svg") if path.resolve() not in shown}
    assert {path.name for path in unused} == {"favicon.svg", "logo.svg"}
