"""The pictures of the concept pages, ``docs/concepts``: what they show, from real runs; ``draw.py`` writes them.

``hatch run record-concepts`` runs this library, from the repository root, and writes what it does to
``docs/images/concepts/data``, one JSON file for each picture. Tests record again what is the same in every run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from typing import Any

from concept_pictures import TITLES
from draw import IMAGES, Drawing

PICTURES = IMAGES / "concepts"
DATA = PICTURES / "data"


def recorded(name: str) -> Any:
    """What this library does now, as JSON holds it."""
    return json.loads(json.dumps(importlib.import_module(f"concept_runs.{name}").record()))


def facts(name: str) -> Any:
    """What the file says."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def written(found: Any) -> str:
    """The JSON file of facts, with a list of numbers or names on one line."""
    text = json.dumps(found, ensure_ascii=False, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"


def drawings() -> dict[str, Drawing]:
    """The files, by their names without suffix."""
    return {draw.__name__: Drawing(title, facts(draw.__name__), draw) for draw, title in TITLES.items()}


def main() -> None:
    """Run, and write the JSON files."""
    names = [draw.__name__ for draw in TITLES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*names, []],
        metavar="NAME",
        help=f"some of {', '.join(names)}; by default all",
    )
    for name in parser.parse_args().names or names:
        (DATA / f"{name}.json").write_text(written(recorded(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
