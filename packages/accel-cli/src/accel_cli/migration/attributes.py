"""Attributes of ``Accelerator`` that a script uses and that this version does not have."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from accel_cli.migration.result import Remark
from accel_cli.migration.source import PythonSource, dotted

__all__ = ["accelerator_attributes", "missing_attributes"]


@functools.cache
def accelerator_attributes() -> frozenset[str]:
    """The methods and attributes of ``accel_train.Accelerator``, read from its source: torch is not imported."""
    spec = importlib.util.find_spec("accel_train")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    found: set[str] = set()
    for source in (folder / "accelerator.py", *folder.glob("*_view.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(found)


def missing_attributes(source: PythonSource) -> list[Remark]:
    """A remark for each line that uses an attribute of an ``Accelerator`` that does not exist here.

    Args:
        source: of the script; names that are assigned ``Accelerator(…)`` anywhere in it count, those with a dot
            (``self.accelerator``), in a conditional expression, and parameters annotated with the class too.
    """
    names = {name for node in ast.walk(source.tree) for name in _accelerators(node)}
    used = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    return sorted(
        {
            Remark(node.lineno, f"{dotted(node)} does not exist in this version")
            for node in used
            if dotted(node.value) in names
            and node.attr not in accelerator_attributes()
            and not node.attr.startswith("_")
        }
    )


def _accelerators(node: ast.AST) -> Iterator[str]:
    """The names that a node binds to an ``Accelerator``."""
    match node:
        case ast.Assign(targets=targets, value=value) if _makes_one(value):
            for target in targets:
                yield from _bound(target)
        case ast.AnnAssign(target=target, annotation=kind, value=value) if _makes_one(value) or _is_the_class(
            kind
        ):
            yield from _bound(target)
        case ast.arg(arg=name, annotation=ast.expr() as kind) if _is_the_class(kind):
            yield name


def _makes_one(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):  # Accelerator(log_with=…) if tracked else Accelerator()
        return _makes_one(value.body) or _makes_one(value.orelse)
    return isinstance(value, ast.Call) and _is_the_class(value.func)


def _is_the_class(name: ast.expr) -> bool:
    return dotted(name).rpartition(".")[2] == "Accelerator"


def _bound(target: ast.expr) -> Iterator[str]:
    """The names in the target of an assignment: ``a``, ``a.b``, and those in a tuple or a list."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _bound(element)
    elif name := dotted(target):
        yield name
