"""Which packages a change touches, with everything above them; printed as a JSON list for the test matrix.

Usage: ``git diff --name-only BASE HEAD | python .github/scripts/changed_packages.py``. A file that no package
owns (root configuration, shared tools, workflows) selects all packages; documentation alone selects none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

# Package → itself and what lies above it.
ABOVE = {
    "accel-state": ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli"),
    "accel-ckpt": ("accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli"),
    "accel-bigmodel": ("accel-bigmodel", "accel-cli"),
    "accel-train": ("accel-train", "accel-cli"),
    "accel-cli": ("accel-cli",),
}
_NO_TESTS = ("docs/", ".github/ISSUE_TEMPLATE/", ".github/PULL_REQUEST_TEMPLATE.md")


def affected(paths: Iterable[str]) -> list[str]:
    """Packages whose tests a change of ``paths`` can turn red, from the bottom up."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in ABOVE:
            if not path.endswith(".md"):
                found.update(ABOVE[parts[1]])
        elif not path.startswith(_NO_TESTS) and not ("/" not in path and path.endswith(".md")):
            return list(ABOVE)
    return [package for package in ABOVE if package in found]


if __name__ == "__main__":
    print(json.dumps(affected(line.strip() for line in sys.stdin if line.strip())))
