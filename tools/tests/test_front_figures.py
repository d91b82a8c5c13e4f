"""The figures on the front pages are those of docs/benchmarks.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drawings import plots

ROOT = Path(__file__).parents[2]
PAGE = plots.Page(plots.PAGE.read_text(encoding="utf-8"))


def step(column: str) -> str:
    return f"{PAGE.value('plain', column, section='A training step'):.2f}"


def bars(name: str) -> list[plots.Bar]:
    """The bars of a panel of the first picture, ours first."""
    return {"stall": plots.stalls, "load": plots.loads}[name](PAGE)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_front_pages_say_what_was_measured(page):
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    ours, *_, incumbent = bars("stall")
    loaded = bars("load")[0]
    for figure in (
        f"{step('ours')} times",
        f"{step('Accelerate')} times",
        f"{ours.value:.2f} s for a save of 3 GB",
        f"{incumbent.value / ours.value:.0f} times less than with `dcp.async_save`",
        f"{loaded.value:.2f} s",
    ):
        assert figure in text.replace("[", ""), figure
