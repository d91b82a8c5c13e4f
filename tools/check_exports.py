"""Prove that what a package lists as public can be imported, is documented, and is all that it shows.

For each package every name in its stub, ``__init__.pyi``, can be imported, is in ``__all__`` of the module that the
stub names, and has a docstring; the stub is sorted and has each name once; the package shows no other public attribute.
Run where the packages can be imported: ``python tools/check_exports.py``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import import_table

PACKAGES = ("accel_state", "accel_state.config", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli")


def check_package(name: str) -> list[str]:
    """What is wrong with the exports of one importable package."""
    package = importlib.import_module(name)
    listed = import_table.read_stub(Path(str(package.__file__)).with_suffix(".pyi"))
    table = {key: home for home, key in listed}
    problems = [f"{name}: {key} is listed more than once" for key in table if _count(listed, key) > 1]
    if listed != sorted(listed):
        first = next(one for one, other in zip(listed, sorted(listed), strict=True) if one != other)
        problems.append(f"{name}: the lines of the stub are not sorted from {' '.join(first)} on")
    if sorted(table) != sorted(package.__all__):
        problems.append(f"{name}: __all__ is not the stub: {sorted(set(table) ^ set(package.__all__))}")
    for key in sorted(table):
        problems += _check_name(name, key, package, table[key])
    return problems + _stray_attributes(package, table)


def _count(listed: list[tuple[str, str]], key: str) -> int:
    return sum(name == key for _, name in listed)


def _check_name(name: str, key: str, package: ModuleType, home: str) -> list[str]:
    try:
        value = getattr(package, key)
    except (AttributeError, ImportError) as error:
        return [f"{name}: {key} cannot be imported from {home}: {error}"]
    problems = []
    if key not in getattr(importlib.import_module(home), "__all__", ()):
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
    parser.add_argument(
        "packages", nargs="*", default=PACKAGES, help="import names; all lazy packages by default"
    )
    chosen = parser.parse_args(arguments).packages
    problems = [problem for name in chosen for problem in check_package(name)]
    for problem in problems:
        print(problem)
    print(f"exports: {len(problems)} problems in {len(chosen)} packages")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
