"""The pictures of the tutorial show what its pages print."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import tutorial_plots

PICTURES = tutorial_plots.pictures()


def test_every_picture_shows_the_figures_of_its_page():
    assert tutorial_plots.main(["--check"]) == 0
    assert {path.stem for path in tutorial_plots.PICTURES.iterdir()} == set(PICTURES)
    assert {path.stem for path in tutorial_plots.PAGES.iterdir()} - set(PICTURES) == {"index", "next"}


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_its_picture_and_describes_it(name):
    page = (tutorial_plots.PAGES / f"{name}.md").read_text(encoding="utf-8")
    described = re.findall(r"!\[([^\]]+)\]\(\.\./images/tutorial/(\S+)\.svg\)", page)
    assert [found for _, found in described] == [name]
    assert len(described[0][0]) > 40


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_color_for_both_schemes(name):
    style, _, drawn = (
        (tutorial_plots.PICTURES / f"{name}.svg").read_text(encoding="utf-8").partition("</style>")
    )
    colors = set(re.findall(r"(?:fill|stroke): #\w+", drawn))
    assert len(colors) > 2
    assert {color for color in colors if f'[style*="{color}"]' not in style} == set()


def test_a_picture_shows_the_values_of_its_bars():
    def texts(name):
        path = tutorial_plots.PICTURES / f"{name}.svg"
        return {text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}

    for _, right, _ in PICTURES["evaluation"].figures["right"]:
        assert f"{right:.0f}" in texts("evaluation")
    for ranks in PICTURES["fsdp2"].figures.values():
        assert {f"{sum(row):,.0f} kB" for row in ranks} <= texts("fsdp2")
    for name, [[size]] in PICTURES["answer"].figures.items():
        assert f"{name}: {size:.0f} kB" in texts("answer")


def test_a_picture_of_other_figures_is_named(tmp_path, monkeypatch, capsys):
    for page in tutorial_plots.PAGES.iterdir():
        text = page.read_text(encoding="utf-8")
        if page.stem == "evaluation":
            text = text.replace("500 of 501 right", "499 of 501 right")
        (tmp_path / page.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(tutorial_plots, "PAGES", tmp_path)
    assert tutorial_plots.main(["--check"]) == 1
    assert (
        capsys.readouterr().out == "docs/images/tutorial/evaluation.svg: out of date; run: hatch run draw\n"
    )


def test_a_page_without_the_output_is_named():
    with pytest.raises(ValueError, match=r"no output with 'loss"):
        tutorial_plots.numbers(r"loss (\d)", "nothing")
