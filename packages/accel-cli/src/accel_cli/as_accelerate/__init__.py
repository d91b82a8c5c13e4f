"""``import accelerate``, answered by this library where the user asks for it.

Clients of Hugging Face Accelerate, such as transformers' ``Trainer``, import ``accelerate``. The folder ``path`` beside
this file holds a package of that name whose modules name objects of this library, and metadata of the level that it
answers, ``LEVEL``. Three ways put it in front of the module search path:

- ``accel launch --as-accelerate train.py``, for all ranks and what they start;
- ``python -m accel_cli.as_accelerate train.py``, for one process and what it starts;
- ``install()``, in a running process such as a notebook.

Nothing falls back to the real package: a process with two ``PartialState`` would be worse than an ImportError.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from accel_cli.alias_folders import MODULES, environment
from accel_state.errors import ConfigError

__all__ = ["LEVEL", "environment", "install", "is_installed"]

LEVEL = "1.15.0"
"""Version of Accelerate whose names and behaviour are answered."""

_NAME = "accelerate"
_CLIENTS = ("transformers", "diffusers", "peft", "trl", "sentence_transformers")
"""Packages that look for Accelerate, or for its version, once, when they are imported."""


def is_installed() -> bool:
    """Whether ``import accelerate`` is answered by this library in this process."""
    return MODULES in sys.path and (_NAME not in sys.modules or _is_ours(sys.modules[_NAME]))


def install() -> None:
    """Answer ``import accelerate`` in this process, and in the processes that it spawns, from now on.

    Processes that are started by a command have it if they get ``environment(...)``. A second call does nothing.

    Raises:
        ConfigError: the real Accelerate is imported already, or a module that has looked for it.
    """
    if is_installed():
        return
    real = sys.modules.get(_NAME)
    if real is not None:
        holders = _holders()
        raise ConfigError(
            f"accelerate {getattr(real, '__version__', '')} is imported already, from {_origin(real)}"
            f"{'; it is held by ' + ', '.join(holders) if holders else ''}. Call as_accelerate.install() before "
            "anything imports accelerate, or start the program with python -m accel_cli.as_accelerate"
        )
    early = [name for name in _CLIENTS if name in sys.modules]
    if early:
        raise ConfigError(
            f"{' and '.join(early)} {'has' if len(early) == 1 else 'have'} been imported, and looked for accelerate "
            "then. Call as_accelerate.install() first, or start the program with python -m accel_cli.as_accelerate"
        )
    sys.path.insert(0, MODULES)
    importlib.invalidate_caches()


def _is_ours(module: ModuleType) -> bool:
    return (_origin(module) or "").startswith(MODULES + os.sep)


def _origin(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


def _holders() -> list[str]:
    """Packages outside of Accelerate with a module that holds Accelerate or an object of it."""
    found: dict[str, None] = {}
    for name, module in sorted(sys.modules.items()):
        top = name.partition(".")[0]
        if top in found or top == _NAME:
            continue
        if any(_belongs(value) for value in list(getattr(module, "__dict__", {}).values())):
            found[top] = None
    return list(found)


def _belongs(value: Any) -> bool:
    if isinstance(value, ModuleType):
        home = value.__name__
    elif isinstance(value, type) or callable(value):
        home = getattr(value, "__module__", None) or ""
    else:
        return False
    return isinstance(home, str) and home.partition(".")[0] == _NAME
