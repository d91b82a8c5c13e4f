"""The folders of the package and the command ``accelerate`` that replace those of Hugging Face Accelerate.

`accel_cli.as_accelerate` says when they do. They are named here, because ``accel launch`` only passes them on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MODULES", "environment"]

_ALIAS = Path(__file__).parent / "as_accelerate"
MODULES = str(_ALIAS / "path")
"""Folder of the package ``accelerate``."""
_COMMANDS = str(_ALIAS / "bin")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` in which processes find this ``accelerate`` first, the module and on POSIX systems the command."""
    modules = _first(MODULES, environ.get("PYTHONPATH", ""))
    commands = _first(_COMMANDS, environ.get("PATH", os.defpath))
    return {**environ, "PYTHONPATH": modules, "PATH": commands, "ACCEL_PYTHON": sys.executable}


def _first(folder: str, path: str) -> str:
    others = [part for part in path.split(os.pathsep) if part not in ("", folder)]
    return os.pathsep.join([folder, *others])
