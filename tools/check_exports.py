"""Prove that what a package says it exports is what it exports.

For each package the table in ``__init__.py``, the imports of ``__init__.pyi``, ``__all__`` and what can be
really imported are the same names, and every public name has a docstring. Run where they can be imported:
``python tools/check_exports.py``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli")
_PRIVATE_BUT_SHARED = "__version__"


def stub_exports(stub: Path) -> dict[str, str]:
    """Names that a stub re-exports (``import X as X``), with the module that each comes from."""
    homes: dict[str, str] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8"), filename=str(stub)).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == alias.name and alias.name != _PRIVATE_BUT_SHARED:
                    homes[alias.name] = node.module or ""
    return homes


def table_exports(package: ModuleType) -> dict[str, str]:
    """Names in the table of a lazy package top, with the module that each comes from."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach"
    ]
    if len(calls) != 1 or len(calls[0].args) != 2:
        raise ValueError(
            f"{package.__file__} must call attach(__name__, table) once, found {len(calls)} such calls"
        )
    table: dict[str, list[str]] = ast.literal_eval(calls[0].args[1])
    return {name: home for home, names in table.items() for name in names}


def check_package(name: str) -> list[str]:
    """What is wrong with the exports of one importable package."""
    package = importlib.import_module(name)
    table = table_exports(package)
    stub = stub_exports(Path(str(package.__file__)).with_suffix(".pyi"))
    problems = [f"{name}: {key} is in __init__.py only" for key in sorted(table.keys() - stub.keys())]
    problems += [f"{name}: {key} is in __init__.pyi only" for key in sorted(stub.keys() - table.keys())]
    problems += [
        f"{name}: {key} comes from {table[key]} in __init__.py, from {stub[key]} in __init__.pyi"
        for key in sorted(table.keys() & stub.keys())
        if table[key] != stub[key]
    ]
    if sorted(table) != sorted(package.__all__):
        problems.append(f"{name}: __all__ is not the table: {sorted(set(table) ^ set(package.__all__))}")
    for key in sorted(table):
        problems += _check_name(name, key, package, table[key])
    return problems + _stray_attributes(package, table)


def _check_name(name: str, key: str, package: ModuleType, home: str) -> list[str]:
    try:
        value = getattr(package, key)
    except (AttributeError, ImportError) as error:
        return [f"{name}: {key} cannot be imported from {home}: {error}"]
    problems = []
    exported = getattr(importlib.import_module(home), "__all__", None)
    if exported is not None and key not in exported:
        problems.append(f"{name}: {key} is not in __all__ of its home {home}")
    if (inspect.isclass(value) or inspect.isroutine(value)) and not _own_doc(value):
        problems.append(f"{name}: {key} has no docstring")
    return problems


def _own_doc(value: object) -> str | None:
    """The docstring written for ``value`` itself, neither inherited nor generated."""
    if not inspect.isclass(value):
        return inspect.getdoc(value)
    text = value.__dict__.get("__doc__")
    generated = text is not None and text.startswith(f"{value.__name__}(")
    return None if generated else text


def _stray_attributes(package: ModuleType, table: dict[str, str]) -> list[str]:
    """Public attributes of a fresh package top that are neither exported nor its own submodules."""
    submodules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    allowed = {*table, *submodules, "attach"}
    return [
        f"{package.__name__}: {key} is a public attribute but not exported"
        for key in sorted(vars(package))
        if not key.startswith("_") and key not in allowed
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong; 1 when there is anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="import names; all five by default")
    chosen = parser.parse_args(arguments).packages
    problems = [problem for name in chosen for problem in check_package(name)]
    for problem in problems:
        print(problem)
    print(f"exports: {len(problems)} problems in {len(chosen)} packages")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
