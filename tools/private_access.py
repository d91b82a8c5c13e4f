"""Find private access across modules: ``x._name``, where another module of the project defines ``_name``.

A module that reads a private name of another breaks when its owner changes the name. Access through ``self``,
``cls``, ``super()``, a class of the same module or an imported module outside the project does not count, nor
does a name that the module itself defines. Imports of private names count. Run from the repository root:
``python tools/private_access.py`` prints the places and exits with 1 if there are any. ruff's SLF001 is no substitute:
it also counts what a module does with its own classes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Names of objects that are not ours: modules, tensors, loaders and state dicts of PyTorch, named tuples, and what
# clients of Accelerate call. Some of our classes use such a name as well, so an access alone does not tell whose it is.
FOREIGN = frozenset(
    {
        "_apply", "_buffers", "_indices", "_is_accelerate_prepared", "_iterator", "_load_from_state_dict", "_metadata",
        "_modules", "_parameters", "_replace", "_reset_state", "_tensor", "_values", "_version",
    }
)  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Access:
    """One place that reaches for a private name of another module.

    Attributes:
        path: file of the access.
        line: its line.
        text: the expression, such as ``accelerator._state``.
        owners: files that define the name.
    """

    path: str
    line: int
    text: str
    owners: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text} is private to {', '.join(self.owners)}"


def find(trees: Mapping[str, ast.Module]) -> list[Access]:
    """Private access across the modules of one project.

    Args:
        trees: path to parsed source of every module, whose private names count as the project's own.
    """
    defined = {path: set(_definitions(tree)) for path, tree in trees.items()}
    owners: dict[str, list[str]] = {}
    for path, names in defined.items():
        for name in names:
            owners.setdefault(name, []).append(path)
    return sorted(
        Access(path, line, text, tuple(sorted(owners[name])))
        for path, tree in trees.items()
        for line, text, name in _accesses(tree)
        if name in owners and name not in defined[path]
    )


def _is_private(name: str) -> bool:
    special = name == "_" or (name.startswith("__") and name.endswith("__"))
    return name.startswith("_") and not special and name not in FOREIGN


def _definitions(tree: ast.Module) -> Iterator[str]:
    """Private names of a module, of its classes, and of their instances."""
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    in_scope = {id(statement) for scope in scopes for statement in scope.body}
    for node in ast.walk(tree):
        yield from filter(_is_private, _bound(node, in_scope=id(node) in in_scope))


def _bound(node: ast.AST, *, in_scope: bool) -> Iterator[str]:
    """Names that a statement defines; those of variables only at the level of a module or class."""
    if isinstance(node, _Function | ast.ClassDef):
        yield node.name
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and in_scope:
                yield part.id
            if isinstance(part, ast.Attribute) and _is_own(part.value):
                yield part.attr


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def _root(value: ast.expr) -> str:
    """The name at the beginning of ``a.b.c``; empty for any other expression."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _accesses(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, text and private name of each lookup in an object that is not the module's own."""
    outside = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("accel_")
    }
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            value = node.value
            through_super = isinstance(value, ast.Call) and ast.unparse(value.func) == "super"
            own_class = isinstance(value, ast.Name) and value.id in classes
            if not (_is_own(value) or through_super or own_class or _root(value) in outside):
                yield node.lineno, ast.unparse(node), node.attr
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}", alias.name


def main(root: Path = Path()) -> int:
    """Print the places in the packages; 1 if there is any."""
    files = sorted(root.glob("packages/*/src/**/*.py"))
    found = find(
        {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    )
    for access in found:
        print(access)
    print(f"private access across modules: {len(found)} places in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
