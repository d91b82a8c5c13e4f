"""The report of a proof: a table of strategies and what was compared, then the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from accel_cli.proof.compare import ORDER
from accel_cli.proof.findings import Cause, Verdict
from accel_cli.render import show_text

__all__ = ["as_json", "in_words", "merged", "show"]


def show(verdicts: Sequence[Verdict], facts: Mapping[str, str]) -> None:
    """Print the report.

    Args:
        verdicts: of each strategy.
        facts: what was run, by name.
    """
    for name, value in facts.items():
        show_text(f"{name}: {value}")
    print()
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    print(f"{'':{width}}  " + "  ".join(ORDER))
    for verdict in verdicts:
        cells = [_cell(verdict, kind).center(len(kind)) for kind in ORDER]
        print(f"{verdict.name:{width}}  " + "  ".join(cells).rstrip())
    for verdict in merged(verdicts):
        lines = in_words(verdict)
        if lines:
            print()
        for line in lines:
            show_text(line)
    if all(verdict.reason for verdict in verdicts):
        show_text("\nnothing was compared")


def merged(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for all that say the same."""
    alike: dict[tuple[str, Sequence[Cause]], list[str]] = {}
    for verdict in verdicts:
        alike.setdefault((verdict.reason, tuple(verdict.findings)), []).append(verdict.name)
    return [Verdict("; ".join(names), (), causes, reason) for (reason, causes), names in alike.items()]


def in_words(verdict: Verdict) -> list[str]:
    """What is wrong under a strategy, and what to change; or why it was not run."""
    lines = [f"{verdict.name}: not compared. {verdict.reason}"] if verdict.reason else []
    for cause in verdict.findings:
        mark = "wrong" if cause.fault else "note"
        lines += [f"{verdict.name}: {mark}, {cause.kind}: {cause.text}", f"  {cause.advice}"]
    return lines


def _cell(verdict: Verdict, kind: str) -> str:
    if verdict.reason:
        return "-"
    if kind not in verdict.differ:
        return "✔"
    return "✘" if verdict.has_fault else "~"


def as_json(verdicts: Sequence[Verdict], facts: Mapping[str, str]) -> dict[str, Any]:
    """The report as plain data."""

    def shown(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in fields if name != "wants"}  # which is for the proof itself

    return {"facts": dict(facts), "strategies": [asdict(each, dict_factory=shown) for each in verdicts]}
