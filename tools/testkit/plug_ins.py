"""Packages with entry points, installed for one test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

__all__ = ["install"]


def install(
    patch: pytest.MonkeyPatch, folder: Path, module: str, text: str, points: dict[str, dict[str, str]]
) -> None:
    """Install a package of one module until the patch is undone.

    Args:
        patch: undoes it.
        folder: an empty folder for the package.
        module: name of the module.
        text: its source.
        points: group to the names of its entry points, and what they name in the module.
    """
    (folder / f"{module}.py").write_text(text)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    lines = [
        line
        for group, names in points.items()
        for line in (f"[{group}]", *(f"{name} = {module}:{attribute}" for name, attribute in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    patch.syspath_prepend(folder)
    patch.setitem(sys.modules, module, sys)  # so that undoing removes it
    patch.delitem(sys.modules, module)
