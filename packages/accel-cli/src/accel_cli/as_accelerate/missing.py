"""What modules of the answered ``accelerate`` say when they are imported, and of names that they do not have."""

from __future__ import annotations

import dis
import multiprocessing
import sys
from collections.abc import Callable
from typing import NoReturn

from accel_cli.as_accelerate import LEVEL
from accel_state.environment import get

__all__ = ["announce", "missing_name"]

_PAGE = "docs/guides/as-accelerate.md"


def announce() -> None:
    """Say once, on the main process of a world, who answers ``import accelerate``."""
    if get("RANK", "0") in ("0", "") and multiprocessing.parent_process() is None:
        from accel_train import __version__

        sys.stderr.write(
            f"accel: `import accelerate` is answered by accel-train {__version__}, at level {LEVEL}\n"
        )


def missing_name(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module: the name is not part of what is answered."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        text = (
            f"{module}.{name} is not there: `import accelerate` is answered by accel at the level of Accelerate "
            f"{LEVEL}; {_PAGE} lists the names"
        )
        frame = sys._getframe(1)
        # `from module import name` would replace the text of an AttributeError by its own.
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
            raise ImportError(text, name=module)
        raise AttributeError(text, name=name)

    return __getattr__
