"""The pictures of the tutorial show what its pages print."""

from __future__ import annotations

import re

import pytest

import draw
import tutorial_plots

DRAWN = tutorial_plots.drawings()


@pytest.mark.parametrize("name", DRAWN)
def test_a_page_shows_its_picture_and_describes_it(name):
    page = (tutorial_plots.PAGES / f"{name}.md").read_text(encoding="utf-8")
    described = re.findall(r"!\[([^\]]+)\]\(\.\./images/tutorial/(\S+)\.svg\)", page)
    assert [found for _, found in described] == [name]
    assert len(described[0][0]) > 40


def test_every_page_has_a_picture():
    assert {path.stem for path in tutorial_plots.PAGES.iterdir()} - set(DRAWN) == {"index", "next"}


def test_a_picture_shows_the_values_of_its_bars():
    def texts(name):
        return set(draw.texts_of(tutorial_plots.PICTURES / f"{name}.svg"))

    for _, right, _ in DRAWN["evaluation"].facts["right"]:
        assert f"{right:.0f}" in texts("evaluation")
    for ranks in DRAWN["fsdp2"].facts.values():
        assert {f"{sum(row):,.0f} kB" for row in ranks} <= texts("fsdp2")
    for name, [[size]] in DRAWN["answer"].facts.items():
        assert f"{name}: {size:.0f} kB" in texts("answer")


def test_a_page_without_the_output_is_named():
    with pytest.raises(ValueError, match=r"no output with 'loss"):
        tutorial_plots.numbers(r"loss (\d)", "nothing")
