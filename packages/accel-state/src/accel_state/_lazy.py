"""Lazy package namespaces: a name is imported from its defining module on first use.

The stub beside a package's ``__init__.py`` is the one list of its public names: type checkers read it, and so does
``attach``. A stub has one line ``from home import name as name`` for each.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["attach", "load", "missing_name", "names_of_stub"]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector during a block of imports, which make no garbage.

    The classes and functions that an import defines stay alive. After `import torch`, some hundred new classes trigger
    a full collection, which takes 0.1 s: as long as importing this whole package.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def missing_name(text: str, module: str, name: str, frame: FrameType) -> ImportError | AttributeError:
    """The error for a name that a module does not have, of the type that keeps the message.

    Args:
        text: the message.
        module: the ``__name__`` of the module.
        name: the missing name.
        frame: the frame that looks the name up: the caller of the module's ``__getattr__``.
    """
    import dis  # for this error alone

    # `from module import name` replaces the text of an AttributeError by one of its own.
    if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
        return ImportError(text, name=module)
    return AttributeError(text, name=name)


def names_of_stub(text: str) -> dict[str, str]:
    """Map the public names in a stub to the modules that define them.

    Raises:
        ValueError: a line imports more than one name, or gives it another one.
    """
    homes = {}
    for line in text.splitlines():
        if line.startswith("from "):
            # Not `ast`: every start of a process reads some hundred of these lines, and they all look alike.
            match line.split():
                case ["from", home, "import", name, "as", alias] if name == alias:
                    homes[name] = home
                case _:
                    raise ValueError(
                        f"a line of a stub is to read 'from home import name as name', not {line!r}"
                    )
    homes.pop("__version__", None)  # the package imports it
    return homes


def attach(
    package: str, elsewhere: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the three module-level hooks of a lazy package from the stub beside its ``__init__.py``.

    Args:
        package: the package's ``__name__``.
        elsewhere: package to names that users look for here but that are in that package; the error names the package.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__``, to be assigned in the package's ``__init__.py``.
    """
    module = sys.modules[package]
    # The loader reads it, so that a package in a zip archive is read like one in a folder.
    loader: Any = module.__loader__
    homes = names_of_stub(loader.get_data(f"{module.__path__[0]}/__init__.pyi").decode())
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
        value = load(home, name)
        setattr(module, name, value)  # later lookups bypass this function
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*public, *vars(module)})

    return __getattr__, __dir__, public


def load(home: str, name: str) -> Any:
    """Import a name from its module, with the garbage collector paused."""
    with _collector_paused():
        try:
            return getattr(importlib.import_module(home), name)
        except KeyboardInterrupt as interrupt:
            _tell_briefly(interrupt)
            raise
        except (ImportError, AttributeError) as error:
            _note_old_torch(error)
            raise


def _note_old_torch(error: Exception) -> None:
    """Add to the error of an import that the installed PyTorch is too old, which is likely its cause."""
    import re

    from accel_state.constants import OLDEST_TORCH

    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if release and release < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        error.add_note(
            f"torch {version} is installed, and {needed} or newer is needed: pip install --upgrade torch"
        )


def _tell_briefly(interrupt: KeyboardInterrupt) -> None:
    """Let the interpreter print one line if this interrupt ends it: the frames of an import say nothing to a user."""
    usual = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is interrupt and trace is not None:
            place = f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
            sys.stderr.write(f"accel: ended by Ctrl-C while modules were imported in {place}\n")
        else:
            usual(kind, error, trace)

    sys.excepthook = show
