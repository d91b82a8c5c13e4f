"""Every picture of the documentation has words for those who do not see it, and a script that draws it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import concepts
import draw
import terminal_pictures
import tutorial_plots

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Drawn by the example whose losses it shows, and the mark of the site.
OTHERS = {"guides/images/strategies-losses.svg", "images/favicon.svg", "images/logo.svg"}


DRAWN = dict(draw.drawings())


def test_every_file_shows_its_facts():
    assert draw.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("folder", "page", "before", "after", "name"),
    [
        (draw.ROOT / "docs/benchmarks", "command.md", "| `--help` | 0", "| `--help` | 9", "plots/command"),
        (tutorial_plots.PAGES, "evaluation.md", "500 of 501", "499 of 501", "tutorial/evaluation"),
        (concepts.DATA, "mesh_groups.json", "0, 1", "1, 0", "concepts/mesh_groups"),
    ],
)
def test_a_picture_of_other_facts_is_named(folder, page, before, after, name, monkeypatch, capsys):
    read = Path.read_text

    def changed(path, *arguments, **options):
        text = read(path, *arguments, **options)
        return text.replace(before, after, 1) if path == folder / page else text

    assert before in read(folder / page, encoding="utf-8")
    monkeypatch.setattr(Path, "read_text", changed)
    assert draw.main(["--check"]) == 1
    assert capsys.readouterr().out == f"docs/images/{name}.svg: out of date; run: hatch run draw\n"


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_has_a_color_for_both_schemes(path):
    style, _, drawn = path.read_text(encoding="utf-8").partition("</style>")
    colors = set(re.findall(r"(?:fill|stroke): #\w+", drawn))
    assert len(colors) > 2
    assert {color for color in colors if f'[style*="{color}"]' not in style} == set()


def test_every_picture_is_drawn_by_a_script():
    paths = [*DRAWN, *terminal_pictures.IMAGES.glob("*.svg")]
    drawn = {path.relative_to(DOCS).as_posix() for path in paths}
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
