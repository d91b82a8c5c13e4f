"""How modules of the answered ``accelerate`` give names, and what they say when they are imported.

A name is imported from where it lives on first use, so that ``import accelerate`` costs next to nothing and a client
pays for what it uses.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from accel_cli.as_accelerate import LEVEL
from accel_state._lazy import attach, missing_name
from accel_state.environment import get

__all__ = ["announce", "answer"]

_PAGE = "docs/guides/as-accelerate.md"


def announce() -> None:
    """Say once, on the main process of a world, who answers ``import accelerate``."""
    if get("RANK", "0") in ("0", "") and multiprocessing.parent_process() is None:
        from accel_train import __version__

        sys.stderr.write(
            f"accel: `import accelerate` is answered by accel-train {__version__}, at level {LEVEL}\n"
        )


def answer(
    module: str, names: Mapping[str, Sequence[str]], children: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the three module-level hooks of a module that answers.

    Args:
        module: its ``__name__``.
        names: module in which names live to these names.
        children: modules inside it that are attributes of it without being imported by name.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__``. A name that is not there raises an error that says who answers.
    """
    lookup, _, listed = attach(module, names)
    known, inside = frozenset(listed), frozenset(children)

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in known:
            return lookup(name)
        if name in inside:
            return importlib.import_module(f"{module}.{name}")
        text = (
            f"{module}.{name} is not there: `import accelerate` is answered by accel at the level of Accelerate "
            f"{LEVEL}; {_PAGE} lists the names"
        )
        raise missing_name(text, module, name, sys._getframe(1))

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*known, *inside, *vars(sys.modules[module])})

    return __getattr__, __dir__, sorted(known | inside)
