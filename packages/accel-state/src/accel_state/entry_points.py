"""Entry points of installed distributions, read from their metadata without importing anything of theirs.

``importlib.metadata`` finds the same ones, but its import takes longer than a start of ``accel launch``.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["entry_points", "load"]

_METADATA = (".dist-info", ".egg-info")


def entry_points(group: str) -> Mapping[str, str]:
    """The entry points of a group on ``sys.path``.

    Editable installs are among them: their metadata is in a folder of the path, as that of any other install. Of
    two entry points with one name the one that comes first on the path counts.

    Args:
        group: name of the group, such as ``accel_train.strategies``.

    Returns:
        Name to ``module:attribute``.
    """
    return MappingProxyType(_groups(tuple(sys.path)).get(group, {}))


def load(place: str) -> Any:
    """Import the object that ``module:attribute`` names.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module does not have the attribute.
    """
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.lru_cache(maxsize=32)  # the path changes in tests, and when a script adds a folder
def _groups(folders: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    """The entry points of all groups: the files are read once for all of them."""
    found: dict[str, dict[str, str]] = {}
    for text in _texts(folders):
        group = ""
        for line in map(str.strip, text.splitlines()):
            if line.startswith("["):
                group = line.removeprefix("[").removesuffix("]")
            elif "=" in line and not line.startswith("#"):
                name, _, place = line.partition("=")
                known = found.setdefault(group, {})
                known.setdefault(name.strip(), place.partition("[")[0].replace(" ", ""))
    return found


def _texts(folders: tuple[str, ...]) -> Iterator[str]:
    for folder in dict.fromkeys(folders):
        names: list[str] = []
        with suppress(OSError):  # of a ZIP file, or of a folder that does not exist
            names = sorted(name for name in os.listdir(folder or ".") if name.endswith(_METADATA))
        for name in names:
            with suppress(OSError):  # of a distribution without entry points
                yield Path(folder, name, "entry_points.txt").read_text(encoding="utf-8")
