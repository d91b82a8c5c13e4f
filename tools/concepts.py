"""Record and draw the pictures of the concept pages, ``docs/concepts``.

Run from the repository root. ``hatch run record-concepts`` runs this library and writes what it does to
``docs/images/concepts/data``, one JSON file for each picture; ``hatch run draw`` draws them, by matplotlib, which has
an environment of its own. Each SVG holds the facts that it shows: ``--check`` compares these with the JSON files,
without matplotlib, prints the names of files that differ and exits with 1. Tests record again what is the same
in every run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import plots

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "concepts"
DATA = PICTURES / "data"
NAMES = (
    "held_tensors",
    "mesh_groups",
    "accumulation_window",
    "background_save",
    "launched_processes",
    "streamed_layers",
    "device_map",
    "reading_samples",
    "tensor_dtypes",
    "learning_rates",
)
"""One module of this name in ``concept_runs`` records, and one in ``concept_pictures`` draws."""


def recorded(name: str) -> Any:
    """What this library does now, as JSON holds it."""
    return json.loads(json.dumps(importlib.import_module(f"concept_runs.{name}").record()))


def facts(name: str) -> Any:
    """What the file says."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def shown(found: Any) -> str:
    """The description of a picture: all that it is drawn from."""
    return json.dumps(found, ensure_ascii=False)


def written(found: Any) -> str:
    """The JSON file of facts, with a list of numbers or names on one line."""
    text = json.dumps(found, ensure_ascii=False, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"


def record(names: list[str]) -> None:
    """Run, and write the JSON files."""
    for name in names:
        (DATA / f"{name}.json").write_text(written(recorded(name)), encoding="utf-8")


def svg(name: str) -> str:
    """The file of a picture, from the facts of its JSON file."""
    from concept_pictures import shapes

    picture, found = importlib.import_module(f"concept_pictures.{name}"), facts(name)
    return plots.rendered(lambda: picture.draw(found), picture.TITLE, shown(found), shapes.DARK)


def main(arguments: list[str] | None = None) -> int:
    """Record, draw or check; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "draw"), nargs="?", default="draw")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)}; by default all")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a picture shows other facts"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    names = options.names or [*NAMES]
    if options.action == "record" and not options.check:
        record(names)
        return 0
    drawings = {
        PICTURES / f"{name}.svg": plots.Drawing(shown(facts(name)), functools.partial(svg, name))
        for name in names
    }
    return plots.write_or_check(drawings, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
