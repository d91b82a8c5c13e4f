"""The report of ``accel rehearse``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_cli.rehearsal.findings import RehearsalFinding, accelerators
from accel_cli.rehearsal.run import Rehearsed
from accel_state.host.colors import Colors
from accel_state.launching.plan import World
from accel_state.messages import readable_size

__all__ = ["as_json", "as_text", "differing", "facts"]

Facts = dict[str, dict[str, str]]
_LINES = 15
"""Last lines of the script's output that are shown with a failure."""


def facts(rank: Rehearsed, world: World) -> Facts:
    """Facts about one rank, as title → name → value."""
    found = rank.found
    machine = (
        f", on machine {rank.rank // world.local_size} of {world.machines}" if world.machines > 1 else ""
    )
    shown: Facts = {"world": {"rank": f"{rank.rank} of {world.size:,}{machine}"}}
    for number, section in enumerate(accelerators(found)):
        mark = f" {number}" if number else ""
        shown.setdefault(f"world{mark}", {}).update(_world(section))
        for place, loader in enumerate(section["loaders"]):
            shown.setdefault("data", {})[f"loader {number + place}"] = _loader(loader)
        shown[f"memory{mark}"] = _memory(section["memory"])
    process = found["memory"]
    if process and found["sections"] is not None:
        shown.setdefault("memory", {}).update(
            {
                "peak of tensors": readable_size(process["peak of tensors"]),
                "host": f"{readable_size(process['host'])} of this process, Python and torch included",
            }
        )
    save = (found["sections"] or {}).get("save_state")
    if save is not None:
        shown["save_state"] = {
            "this rank writes": f"{_count(save['files'], 'file')} of {readable_size(save['bytes'])}",
            "planning": f"{save['seconds']:.2f} s of a processor",
            "told to other ranks": f"32 bytes, or {readable_size(save['described in'])} if ranks differ",
        }
    if found["given"]:
        shown["sent to collectives"] = {name: readable_size(size) for name, size in found["given"].items()}
    return shown


def differing(shown: Facts, first: Facts) -> Facts:
    """The facts of a rank without those that it shares with the first one."""
    rows = {
        title: {name: value for name, value in facts.items() if first.get(title, {}).get(name) != value}
        for title, facts in shown.items()
    }
    return {title: facts for title, facts in rows.items() if facts}


def _world(section: Mapping[str, Any]) -> dict[str, str]:
    mesh = " x ".join(f"{name} {size}" for name, size in section["mesh"].items())
    place = ", ".join(f"{name} {index}" for name, index in section["place in the mesh"].items())
    models = ", ".join(
        f"{model['class']} with {model['parameters']:,} parameters" for model in section["models"]
    )
    return {
        "strategy": f"{section['strategy']}, precision {section['precision']}",
        "mesh": (f"{mesh}; this rank is {place}" if "," in place else mesh) or "one rank",
        "model": models or "none prepared",
        "optimizer steps": f"{section['optimizer steps taken']} taken, {section['gradient accumulation steps']} "
        "micro-batches in each",
    }


def _loader(loader: Mapping[str, Any]) -> str:
    samples = "an unknown number of" if loader["samples"] is None else f"{loader['samples']:,}"
    parts = [f"{loader['dataset']} with {samples} samples"]
    if loader["global batch size"] is not None:
        parts.append(
            f"{loader['batch size of this rank']:,} a batch, {loader['global batch size']:,} over all ranks"
        )
    if loader["batches of this rank"] is not None:
        batches, steps = loader["batches of this rank"], loader["optimizer steps per epoch"]
        parts.append(f"{_count(batches, 'batch', 'batches')} and {_count(steps, 'optimizer step')} an epoch")
    if "rows of this rank" in loader:
        parts.append(f"{loader['rows of this rank']:,} rows of this rank")
    return "; ".join(parts)


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _memory(sizes: Mapping[str, int]) -> dict[str, str]:
    return {name: readable_size(size) for name, size in sizes.items() if size}


def as_text(findings: Sequence[RehearsalFinding], ranks: Sequence[Rehearsed], colors: Colors) -> str:
    """The findings, and the end of the output of a rank that failed."""
    words = {
        "error": colors("red", "error"),
        "warning": colors("yellow", "warning"),
        "note": colors("dim", "note"),
    }
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{words[finding.kind]}: {finding.text}")
        if finding.traceback:
            lines += ["", *(f"  {line}" for line in finding.traceback.splitlines()), ""]
    for rank in ranks:
        printed = rank.output.rstrip().splitlines()
        if rank.found["error"] is not None and printed:
            lines.append(f"last output of rank {rank.rank}:")
            lines += [f"  {line}" for line in printed[-_LINES:]]
    errors = sum(finding.kind == "error" for finding in findings)
    seconds = sum(rank.found["seconds"] for rank in ranks)
    names = ", ".join(str(rank.rank) for rank in ranks)
    if errors:
        verdict = colors("red", f"{_count(errors, 'thing')} would fail.")
    else:
        verdict = colors(
            "green", f"Nothing would fail on rank{'s' if len(ranks) > 1 else ''} {names}{_reach(ranks)}."
        )
    lines.append(f"{verdict} ({seconds:.1f} s; values of other ranks are made up, so losses mean nothing)")
    return "\n".join(lines) + "\n"


def _reach(ranks: Sequence[Rehearsed]) -> str:
    """Until where the script ran, if that was not its end."""
    if all(rank.found["ended"] == "script" for rank in ranks):
        return ""
    sections = [section for rank in ranks for section in accelerators(rank.found)]
    taken = max((section["optimizer steps taken"] for section in sections), default=0)
    return (
        f" until optimizer step {taken}, where the rehearsal ended; what the script does later was not tried "
        "(--steps N goes on)"
    )


def as_json(findings: Sequence[RehearsalFinding], ranks: Sequence[Rehearsed], world: World) -> dict[str, Any]:
    """The same as plain data, with sizes in bytes."""
    return {
        "world_size": world.size,
        "machines": world.machines,
        "would_fail": any(finding.kind == "error" for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        "ranks": [
            {
                "rank": rank.rank,
                **{name: rank.found[name] for name in ("ended", "error", "seconds", "memory")},
                "accelerators": accelerators(rank.found),
                "bytes_given": rank.found["given"],
                "collectives": len(rank.found["entered"]),
                "save_state": (rank.found["sections"] or {}).get("save_state"),
            }
            for rank in ranks
        ],
    }
