"""The figures on the front pages are those of the benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import plots

ROOT = Path(__file__).parents[2]
PAGE = plots.benchmarks()


def step(column: str) -> str:
    return f"{PAGE.value('plain', column, section='A training step'):.2f}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_front_pages_say_what_was_measured(page):
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    for figure in (
        f"{step('ours')} times",
        f"{step('Accelerate')} times",
        f"{plots.loads(PAGE)[plots.OURS]:.2f} s",
    ):
        assert figure in text.replace("[", ""), figure
