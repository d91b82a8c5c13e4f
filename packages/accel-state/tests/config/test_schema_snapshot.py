"""The whole surface of the schema is frozen in a file: a changed name, default or choice is seen in its diff.

After a change that is wanted: `python packages/accel-state/tests/config/test_schema_snapshot.py` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_state.config import SageMakerConfig, complete_root, schema_of
from accel_state.config.option import Section

SNAPSHOT = Path(__file__).parents[1] / "data" / "schema_surface.json"
ROOTS: tuple[type[Section], ...] = (complete_root(), SageMakerConfig)


def surface() -> dict[str, dict[str, Any]]:
    """Every option of both roots with all that users can see or write."""
    found: dict[str, dict[str, Any]] = {}
    for root in ROOTS:
        options = found.setdefault(root.__name__, {})
        for bound in schema_of(root).options:
            about = bound.about
            facts = {
                "type": type(bound.option_type).__name__,
                "default": bound.default,
                "launch_default": about.launch_default,
                "flags": bound.flags,
                "switches": {flag: list(meaning) for flag, meaning in about.switches.items()},
                "variables": bound.variables,
                "file": [bound.file_key, *bound.keys] if bound.keys else [],
                "choices": about.choices,
                "synonyms": dict(about.synonyms),
                "unset": about.unset,
                "limits": [about.low, about.high] if (about.low, about.high) != (None, None) else [],
                "numbered": about.numbered,
                "toggle": about.toggle,
                "secret": about.secret,
            }
            empty = (None, False, (), [], {})
            options[bound.path] = {
                name: fact for name, fact in facts.items() if name == "default" or fact not in empty
            }
    return json.loads(json.dumps(found))


def test_the_surface_is_the_frozen_one():
    frozen = json.loads(SNAPSHOT.read_text())
    now = surface()
    changed = [
        f"{root}.{path}: {frozen.get(root, {}).get(path)} -> {now[root].get(path)}"
        for root in now
        for path in {**frozen.get(root, {}), **now[root]}
        if frozen.get(root, {}).get(path) != now[root].get(path)
    ]
    assert not changed, "\n".join([*changed, __doc__ or ""])
    assert frozen == now


if __name__ == "__main__":
    blocks = [
        f'"{root}": {{\n'
        + ",\n".join(f'"{path}": {json.dumps(facts)}' for path, facts in options.items())
        + "\n}"
        for root, options in surface().items()
    ]
    SNAPSHOT.write_text("{\n" + ",\n".join(blocks) + "\n}\n")  # a line per option, for short diffs
