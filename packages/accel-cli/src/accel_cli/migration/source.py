"""A Python source: its syntax tree, and the pieces of its text that are replaced; all else stays as it is written."""

from __future__ import annotations

import ast
import re
import warnings

__all__ = ["PythonSource", "dotted"]

_MARK = "\ufeff"  # editors of Windows begin a file with it


class PythonSource:
    """A Python source.

    Args:
        text: of the file.

    Attributes:
        text: the same.
        tree: its syntax tree.

    Raises:
        SyntaxError: it is not Python.
        RecursionError, MemoryError: it is nested too deeply for Python itself.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text.removeprefix(_MARK))
        self._bytes = text.encode()  # in which the syntax tree counts
        first = len(_MARK.encode()) if text.startswith(_MARK) else 0
        self._lines = [first, *(match.end() for match in re.finditer(rb"\r\n?|\n", self._bytes))]
        self._pieces: list[tuple[int, int, str]] = []

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """The first byte of a node, and the one after it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def between(self, begin: int, end: int) -> str:
        """The text from one byte to another."""
        return self._bytes[begin:end].decode()

    def line_of(self, begin: int, end: int) -> tuple[int, int]:
        """The first byte of the line of one byte, and the one after the line of another."""
        return (
            max(start for start in self._lines if start <= begin),
            min((start for start in self._lines if start > end), default=len(self._bytes)),
        )

    def replace(self, begin: int, end: int, text: str) -> None:
        """Have another text from one byte to another."""
        self._pieces.append((begin, end, text))

    def replaced(self) -> str:
        """The text with all that is replaced."""
        parts, done = [], 0
        for begin, end, text in sorted(self._pieces):
            parts += [self.between(done, begin), text]
            done = end
        return "".join([*parts, self.between(done, len(self._bytes))])


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression that is just that; empty for any other."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed([*names, node.id])) if isinstance(node, ast.Name) else ""
