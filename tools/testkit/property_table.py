"""The table strategy x property, which `hatch run conformance` prints.

`tools/data/strategy_properties.md` has the whole table, docs/guides/strategies.md the rows in which strategies differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from testkit.conformance import VARIANTS

__all__ = ["COLUMNS", "OTHER_TESTS", "PROPERTIES", "as_markdown", "as_text", "differences"]

PROPERTIES = {
    "training": "training as one process, by precision",
    "short_window": "short last window",
    "two_forwards_of_one_backward": "two forwards of one backward",
    "items": "weighing by items",
    "clip_norm": "clipping the norm",
    "clip_value": "clipping values",
    "t34_clipping_of_several_optimizers": "two optimizers of a model",
    "shuffling": "samples and dropout",
    "evaluation": "evaluation inside an epoch",
    "gather_for_metrics": "`gather_for_metrics`",
    "uneven": "`join_uneven_inputs`",
    "two_models": "two models",
    "frozen": "frozen parameters",
    "t45_optimizers_follow_replaced_parameters": "model and optimizer in two calls",
    "unwrap": "unwrapping",
    "save_model": "`save_model`",
    "weight_source": "`weight_source`",
    "resume": "resuming, bit for bit",
    "resume_inside_a_window": "resuming inside a window",
    "mobility": "loading by every other strategy",
    "an_error_on_one_rank_ends_all": "an error on one rank ends all",
    "undeclared_precisions_are_refused": "other precisions are refused",
}
"""Tests of the conformance suite, and what the table calls them."""

OTHER_TESTS = frozenset({"not_installed", "a_window_of_one_engine_is_refused_by_another"})
"""Tests of the suite that are no property of a strategy."""

COLUMNS = (
    "single",
    "ddp",
    "fsdp2",
    "hsdp",
    "offload",
    "tp",
    "groups",
    "dp_shard x tp",
    "dp_replicate x tp",
    "dp_replicate x dp_shard",
    "pp",
    "pp x dp_shard",
    "pp x tp",
    "ep",
    "ep of a list",
    "ep x tp",
    "zero0",
    "zero1",
    "deepspeed",
    "zero3",
    "zero2offload",
    "zero3offload",
    "xla",
)
"""Members of the suite in the order of the table; those of other packages come after them."""
assert set(VARIANTS) < set(COLUMNS)

Cells = Mapping[tuple[str, str], set[str]]
"""What was found, by test and member: several words where a test has several parts that end differently."""


def as_markdown(found: Cells) -> Iterator[str]:
    """The lines of the table as Markdown; the test kit's own strategy is left out."""
    columns = [name for name in _columns(found) if name != "fake"]
    yield f"| | {' | '.join(f'`{name}`' for name in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for label, cells in _rows(found, columns):
        yield f"| {label} | {' | '.join(cells)} |"


def differences(found: Cells) -> Iterator[str]:
    """The lines of a table of the properties in which strategies differ, with one row for strategies that are alike."""
    columns = [name for name in _columns(found) if name != "fake"]
    rows = [(label, cells) for label, cells in _rows(found, columns) if len(set(cells)) > 1]
    alike: dict[tuple[str, ...], list[str]] = {}
    for place, name in enumerate(columns):
        alike.setdefault(tuple(cells[place] for _, cells in rows), []).append(f"`{name}`")
    yield f"| strategy | {' | '.join(label for label, _ in rows)} |"
    yield "|---|" + "---|" * len(rows)
    for cells, names in alike.items():
        yield f"| {', '.join(names)} | {' | '.join(cells)} |"


def as_text(found: Cells) -> Iterator[str]:
    """The lines of the table for a terminal."""
    columns = _columns(found)
    rows = [("", columns), *_rows(found, columns)]
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(columns))]
    for label, cells in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{label:<{first}}  {'  '.join(padded)}".rstrip()


def _columns(found: Cells) -> list[str]:
    members = {member for _, member in found}
    return [name for name in COLUMNS if name in members] + sorted(members - set(COLUMNS))


def _rows(found: Cells, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for test, label in PROPERTIES.items():
        cells = ["/".join(sorted(found.get((test, member), ()))) or "-" for member in columns]
        if set(cells) != {"-"}:
            yield label, cells
