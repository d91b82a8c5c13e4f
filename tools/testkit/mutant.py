"""A pytest plugin that leaves one call out of one module, here and in the processes that tests start.

    MUTANT=accel_train.data.transfer:62:8 pytest -p testkit.mutant --device npu:2 …

The place is the line and column of the call. Where the value of a call is used it becomes what it was called on
(``leaf.pin_memory()`` becomes ``leaf``), otherwise the call is gone; a keyword argument that is named after the column
(``…:221:pin_memory``) becomes False.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "MUTANT"


class LeaveOut(ast.NodeTransformer):
    """Leaves out the call at a place, or a keyword argument of the call in a line."""

    def __init__(self, line: int, place: str) -> None:
        self.line, self.place = line, place
        self.found = 0

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A call whose value is not used."""
        if isinstance(node.value, ast.Call) and self._is_here(node.value):
            self.found += 1
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        """A call whose value is used, and arguments."""
        if self._is_here(node) and isinstance(node.func, ast.Attribute):
            self.found += 1
            return node.func.value
        for keyword in node.keywords:
            if keyword.arg == self.place and keyword.value.lineno == self.line:
                self.found += 1
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return self.generic_visit(node)

    def _is_here(self, node: ast.Call) -> bool:
        return (str(node.col_offset), node.lineno) == (self.place, self.line)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, line: int, place: str) -> None:
        super().__init__(name, path)
        self._leave_out = LeaveOut(line, place)

    def get_code(self, fullname: str) -> CodeType:
        tree = self._leave_out.visit(ast.parse(self.get_data(self.path)))
        if self._leave_out.found != 1:
            raise ImportError(f"{os.environ[VARIABLE]}: {self._leave_out.found} calls are at this place")
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, line: int, place: str) -> None:
        self.module, self.line, self.place = module, line, place

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self.line, self.place)
        return spec


def install() -> None:
    """Heed the variable ``MUTANT``; nothing without it."""
    wanted = os.environ.get(VARIABLE)
    if wanted and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        module, line, place = wanted.rsplit(":", 2)
        if module in sys.modules:
            raise ImportError(f"{module} is imported already")
        sys.meta_path.insert(0, _Finder(module, int(line), place))


install()
