"""The modules of the answered ``accelerate``, which are made from their stubs.

A stub in the folder ``path`` lists the names of a module of Accelerate and where this library has them; type checkers
read it, and a finder of the import system makes the module from it. A name is imported from where it lives on first
use, so that ``import accelerate`` costs next to nothing and a client pays for what it uses.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from accel_cli.alias_folders import MODULES
from accel_cli.as_accelerate import LEVEL
from accel_state._lazy import load, missing_name, names_of_stub
from accel_state.environment import get

__all__ = ["announce", "answer", "find_stubs", "run_command"]

_PAGE = "docs/guides/as-accelerate.md"
_COMMANDS = {
    "accelerate_cli": (),
    "config.config": ("config",),
    "config.default": ("config", "default"),
    "config.update": ("config", "update"),
    "env": ("env",),
    "estimate": ("estimate-memory",),
    "launch": ("launch",),
    "merge": ("merge-weights",),
    "test": ("test",),
    "to_fsdp2": ("to-fsdp2",),
    "tpu": ("tpu-config",),
}
"""Modules of ``accelerate.commands`` that are programs, and the command of ``accel`` that each is."""

_CODE = """\
from accel_cli.as_accelerate.names import answer as _answer, run_command as _run_command
__getattr__, __dir__, __all__ = _answer(__spec__.name, __file__)
if __name__ == "__main__":
    _run_command(__spec__.name)
"""


class _StubLoader(SourceFileLoader):
    """Makes a module whose file is a stub."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(_CODE, self.path, "exec", dont_inherit=True)


def _finder_of(path: str) -> FileFinder:
    """A hook of ``sys.path_hooks``: the finder of a folder of the answered package, which also finds stubs."""
    if not path.startswith(os.path.join(MODULES, "accelerate")):
        raise ImportError("not a folder of the answered accelerate", path=path)
    return FileFinder(path, (SourceFileLoader, [".py"]), (_StubLoader, [".pyi"]))


def find_stubs() -> None:
    """Let this process import the modules of the answered ``accelerate`` from now on."""
    if _finder_of not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder_of)


def announce() -> None:
    """Print once, on the main process of a world, that this library answers ``import accelerate``."""
    if get("RANK", "0") in ("0", "") and multiprocessing.parent_process() is None:
        from accel_train import __version__

        sys.stderr.write(
            f"accel: `import accelerate` is answered by accel-train {__version__}, at level {LEVEL}\n"
        )


def answer(module: str, stub: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the three module-level hooks of a module that answers.

    Args:
        module: its name.
        stub: the file that lists its names. Names that the stub imports from the module itself are modules inside it,
            which are its attributes without being imported by name.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__``. A name that does not exist raises an error that names this
        library.
    """
    homes = names_of_stub(Path(stub).read_text(encoding="utf-8"))

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            text = (
                f"{module}.{name} does not exist: `import accelerate` is answered by accel at the level of Accelerate "
                f"{LEVEL}; {_PAGE} lists the names"
            )
            raise missing_name(text, module, name, sys._getframe(1))
        value = importlib.import_module(f"{module}.{name}") if home == module else load(home, name)
        setattr(sys.modules[module], name, value)  # later lookups bypass this function
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*homes, *vars(sys.modules[module])})

    top = sys.modules.get(module)
    if top is not None and hasattr(top, "__path__"):
        _prefer_names(top, homes)
    return __getattr__, __dir__, sorted(homes)


def _prefer_names(package: ModuleType, homes: dict[str, str]) -> None:
    """Where a name and a module of a package are called alike, such as ``tqdm``, the attribute is the name's.

    The import of the module would set the attribute later, so it happens now.
    """
    for folder in package.__path__:
        for entry in os.listdir(folder):
            name = entry.partition(".")[0]
            if homes.get(name, package.__name__) != package.__name__:
                importlib.import_module(f"{package.__name__}.{name}")
                setattr(package, name, load(homes[name], name))


def run_command(module: str) -> None:
    """Be the program that a module of ``accelerate.commands`` is for ``python -m``; others do nothing, as there.

    Raises:
        SystemExit: with the exit code of the command.
    """
    words = _COMMANDS.get(module.removeprefix("accelerate.commands."))
    if words is not None:
        from accel_cli.app import main

        sys.exit(main([*words, *sys.argv[1:]]))
