"""The import statements of a script whose code has changed."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

__all__ = ["with_import", "without_unused"]


def without_unused(before: cst.Module, after: cst.Module) -> cst.Module:
    """``after`` without the imports whose names only ``before`` uses."""
    unused = _used(before) - _used(after)
    changed = after.visit(_ImportRemover(unused))
    assert isinstance(changed, cst.Module)
    return changed


def _used(module: cst.Module) -> set[str]:
    class Names(cst.CSTVisitor):
        def __init__(self) -> None:
            super().__init__()
            self.found: set[str] = set()

        def visit_Import(self, node: cst.Import) -> bool:
            return False

        def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
            return False

        def visit_Name(self, node: cst.Name) -> None:
            self.found.add(node.value)

    names = Names()
    module.visit(names)
    return names.found


class _ImportRemover(cst.CSTTransformer):
    def __init__(self, unused: set[str]) -> None:
        super().__init__()
        self._unused = unused

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        return self._without(updated_node)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        return updated_node if isinstance(updated_node.names, cst.ImportStar) else self._without(updated_node)

    def _without(self, statement: Any) -> Any:
        kept = [alias for alias in statement.names if self._local(alias) not in self._unused]
        if len(kept) == len(statement.names):
            return statement
        if not kept:
            return cst.RemoveFromParent()
        return statement.with_changes(
            names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
        )

    def _local(self, alias: cst.ImportAlias) -> str:
        if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
            return alias.asname.name.value
        return (get_full_name_for_node(alias.name) or "").split(".")[0]


def with_import(module: cst.Module) -> cst.Module:
    """The module with the import, after the first imports of its top level.

    Without any it comes after the docstring and what is imported from ``__future__``, which have to be first.
    """
    body = list(module.body)
    last = -1
    for index, statement in enumerate(body):
        if _imports(statement, future=False):
            last = index
        elif last >= 0:
            break
    if last < 0:
        before = 0 if module.get_docstring() is None else 1
        last = max((i for i, s in enumerate(body) if _imports(s, future=True)), default=before - 1)
    body.insert(last + 1, cst.parse_statement("from accel_train import Accelerator"))
    return module.with_changes(body=body)


def _imports(statement: Any, *, future: bool) -> bool:
    """Whether a statement imports something: from ``__future__``, or from elsewhere."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return any(
        (get_full_name_for_node(getattr(small, "module", None) or small) == "__future__") == future
        for small in statement.body
        if isinstance(small, cst.Import | cst.ImportFrom)
    )
