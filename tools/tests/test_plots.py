"""Plots show what the tables of the benchmarks say."""

from __future__ import annotations

import pytest

import draw
import plots

DRAWN = plots.plots(plots.benchmarks())


@pytest.mark.parametrize("name", DRAWN)
def test_a_file_shows_its_figures(name):
    plot, texts = DRAWN[name], draw.texts_of(plots.PICTURES / f"{name}.svg")
    titled = len(plot.groups) > 1  # a single group is in a card of the page that says what it is
    assert (plot.title in texts) == titled
    for group in plot.groups:
        last = group.form.format([*group.values.values()][-1])
        if plot.kind == "lines":
            assert f"{group.title}: {last}" in texts
        else:
            shown = [*[group.title] * titled, *group.values, *map(group.form.format, group.values.values())]
            assert [text for text in shown if text not in texts] == []


PAGE = """
## A training step

| loop | plain PyTorch | ours | Accelerate | Fabric |
|---|---|---|---|---|
| plain | 200 µs | 1.10 [1.0-1.2] | 3.00 | peer 2.00 |

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
    assert page.value("plain", "Fabric", section="A training step", after="peer ") == 2


@pytest.mark.parametrize(
    ("row", "column", "section", "after"),
    [
        ("plain", "ours", "None", ""),
        ("fp16", "ours", "A training step", ""),
        ("plain", "theirs", "A training step", ""),
        ("plain", "ours", "A training step", "peer "),
        ("plain", "ours", "Other", ""),
    ],
)
def test_what_the_page_does_not_have_is_named(row, column, section, after):
    with pytest.raises(plots.PageError, match=f"{after}.*{section}.*{row}.*{column}"):
        plots.Page(PAGE).value(row, column, section=section, after=after)
