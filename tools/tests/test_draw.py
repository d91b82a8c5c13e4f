"""Drawings are up to date with their scripts and with the tables that they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import draw
from drawings import plots

DRAWN = draw.render()
SPACE = "{http://www.w3.org/2000/svg}"


def test_every_file_is_what_the_script_writes():
    assert draw.main(["--check"]) == 0
    assert set(draw.IMAGES.glob("plots/*.svg")) == set(DRAWN)


def test_a_stale_file_is_named_and_written_again(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "docs" / "images"
    monkeypatch.setattr(draw, "IMAGES", folder)
    assert draw.main([]) == 0
    assert draw.main(["--check"]) == 0
    (folder / "plots" / "step.svg").write_text("old")
    capsys.readouterr()
    assert draw.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/images/plots/step.svg: out of date; run: python tools/draw.py\n"
    assert (folder / "plots" / "step.svg").read_text() == "old"
    assert draw.main([]) == 0
    assert draw.main(["--check"]) == 0


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_drawing_is_well_formed_labelled_and_has_both_schemes(path):
    root = ElementTree.fromstring(DRAWN[path])
    assert root.get("aria-label")
    style = root.find(f"{SPACE}style").text
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    used = set(re.findall(r"var\(--([\w-]+)\)", DRAWN[path]))
    assert used
    for color in used:
        assert f"--{color}:#" in light
        assert f"--{color}:#" in dark
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SPACE}rect"):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) <= float(box.get("y")) + float(box.get("height")) <= height


PAGE = """
## A training step

| loop | plain PyTorch | ours | Accelerate | Fabric |
|---|---|---|---|---|
| plain | 200 µs | 1.10 [1.0-1.2] | 3.00 | 2.00 |

text

| loop | other |
|---|---|
| plain | 1,234 MB |

## Other
"""


def test_cells_are_found_by_section_row_and_column():
    page = plots.Page(PAGE)
    assert page.value("plain", "ours", section="A training step") == 1.1
    assert page.value("plain", "other", section="A training step") == 1234


@pytest.mark.parametrize(
    ("row", "column", "section"),
    [("plain", "ours", "None"), ("fp16", "ours", "A training step"), ("plain", "theirs", "A training step")],
)
def test_what_the_page_does_not_have_is_named(row, column, section):
    with pytest.raises(
        plots.PageError, match=f"(?=.*{section}).*docs/benchmarks.md|docs/benchmarks.md.*{section}"
    ):
        plots.Page(PAGE).value(row, column, section=section)


def test_a_changed_number_changes_the_plot():
    text = plots.PAGE.read_text(encoding="utf-8")
    assert plots.step(plots.Page(text)) == DRAWN[draw.IMAGES / "plots" / "step.svg"]
    slower = text.replace("| plain | 391 µs | 1.078", "| plain | 391 µs | 1.578")
    assert slower != text
    assert ">1.58<" in plots.step(plots.Page(slower))
