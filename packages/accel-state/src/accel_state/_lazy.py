"""Lazy package namespaces: a name is imported from its defining module on first use.

A package top lists its public names once, as a table ``home module → names``. ``tools/gen_stubs.py`` generates
from it the stub ``__init__.pyi`` that type checkers read.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["attach", "missing_name"]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for garbage meanwhile, as none is made.

    Classes and functions that an import makes stay. After `import torch`, the search through everything that exists,
    which some hundred new classes set off, takes 0.1 s, as long as importing all of this.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def missing_name(text: str, module: str, name: str, frame: FrameType) -> ImportError | AttributeError:
    """The error of a name that a module does not have, in the kind that keeps its text.

    Args:
        text: says what to do.
        module: the ``__name__`` of the module.
        name: of what is missing.
        frame: that which looks the name up, the caller of the module's ``__getattr__``.
    """
    import dis  # for this error alone

    # `from module import name` replaces the text of an AttributeError by one of its own.
    if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
        return ImportError(text, name=module)
    return AttributeError(text, name=name)


def attach(
    package: str, exports: Mapping[str, Sequence[str]], elsewhere: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the three module-level hooks of a lazy package.

    Args:
        package: the package's ``__name__``.
        exports: defining module (absolute name) to the public names that it provides.
        elsewhere: package to names that users look for here and that it has; the error says so.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__``, to be assigned in the package's ``__init__.py``.
    """
    homes = {name: home for home, names in exports.items() for name in names}
    others = {name: other for other, names in (elsewhere or {}).items() for name in names}
    public = sorted(homes)

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's hook
        home = homes.get(name)
        if home is None:
            text = f"module {package!r} has no attribute {name!r}"
            other = others.get(name)
            if other is not None:
                text = f"{package} has no {name}, {other} does: from {other} import {name}"
                raise missing_name(text, package, name, sys._getframe(1))
            raise AttributeError(text)
        with _collector_paused():
            value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)  # later lookups bypass this function
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*public, *vars(sys.modules[package])})

    return __getattr__, __dir__, public
