"""Attributes of ``Accelerator`` that a script uses and that this version does not have."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from accel_cli.migration.result import Remark

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


def missing_attributes(module: cst.Module) -> list[Remark]:
    """A remark for each line that uses an attribute of an ``Accelerator`` that does not exist here.

    Args:
        module: the parsed source; names that are assigned ``Accelerator(…)`` anywhere in it count, those with a dot
            (``self.accelerator``), in a conditional expression, and parameters annotated with the class too.
    """
    wrapper = MetadataWrapper(module)
    finder = _Finder()
    wrapper.visit(finder)
    known = accelerator_attributes()
    return sorted(
        {
            Remark(line, f"{owner}.{name} does not exist in this version")
            for owner, name, line in finder.used
            if owner in finder.names and name not in known and not name.startswith("_")
        }
    )


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()
        self.used: list[tuple[str, str, int]] = []

    def visit_Assign(self, node: cst.Assign) -> None:
        if _makes_one(node.value):
            self.names |= {name for target in node.targets for name in _bound(target.target)}

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if _makes_one(node.value) or _is_the_class(node.annotation.annotation):
            self.names |= set(_bound(node.target))

    def visit_Param(self, node: cst.Param) -> None:
        if node.annotation is not None and _is_the_class(node.annotation.annotation):
            self.names.add(node.name.value)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        owner = (
            get_full_name_for_node(node.value) if isinstance(node.value, cst.Name | cst.Attribute) else None
        )
        if owner:
            line = int(self.get_metadata(PositionProvider, node).start.line)
            self.used.append((owner, node.attr.value, line))


def _makes_one(value: cst.BaseExpression | None) -> bool:
    if isinstance(value, cst.IfExp):  # Accelerator(log_with=…) if tracked else Accelerator()
        return _makes_one(value.body) or _makes_one(value.orelse)
    return isinstance(value, cst.Call) and _is_the_class(value.func)


def _is_the_class(name: cst.BaseExpression) -> bool:
    return (get_full_name_for_node(name) or "").rsplit(".", 1)[-1] == "Accelerator"


def _bound(target: cst.BaseExpression) -> Iterator[str]:
    """The names in the target of an assignment: ``a``, ``a.b``, and those in a tuple or a list."""
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _bound(element.value)
    else:
        yield from filter(None, [get_full_name_for_node(target)])
