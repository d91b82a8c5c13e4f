"""Keep the source within its budgets: sizes, annotations, private access, and a few forbidden patterns.

Lines are counted without docstrings, comments and blank lines. Run from the repository root:
``python tools/check_budgets.py``; prints one line per violation and exits with 1 when there is any. Private
access across modules (see ``private_access.py``) is measured per 1,000 lines of code, in each package and in
all together.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import private_access

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
PRIVATE_ACCESS_LIMIT = 1.0
ENVIRONMENT_MODULE = "accel_state/environment.py"
# Spelled in two parts so that this file passes its own check.
_OPEN_ENDS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Violation:
    """One place that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines that hold code: no blank line, no line with only a comment, no docstring."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | _Function)
            and ast.get_docstring(node, clean=False) is not None
        ):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def check_source(path: str, source: str, *, library: bool) -> list[Violation]:
    """Violations in one file.

    Args:
        path: shown in messages; also tells the environment module from the others.
        source: the text of the file.
        library: a module of a package: the rules on annotations, environment and errors hold as well.
    """
    tree = ast.parse(source, filename=path)
    lines = code_lines(source, tree)
    found = list(_sizes(path, tree, lines))
    found += [
        Violation(path, number, f"{match[0]} is left in the text")
        for number, text in enumerate(source.splitlines(), 1)
        if (match := _OPEN_ENDS.search(text))
    ]
    found += [
        Violation(path, node.lineno, "an exception is swallowed: the handler only passes")
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and all(_does_nothing(statement) for statement in node.body)
    ]
    if library:
        found += _annotations(path, tree)
        found += _not_implemented(path, tree)
        if not path.replace("\\", "/").endswith(ENVIRONMENT_MODULE):
            found += _environment(path, tree)
    return sorted(found)


def _sizes(path: str, tree: ast.Module, lines: set[int]) -> Iterator[Violation]:
    if len(lines) > MAX_FILE_LINES:
        yield Violation(path, 1, f"{len(lines)} lines of code in one file, at most {MAX_FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            size = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
            if size > MAX_FUNCTION_LINES:
                yield Violation(
                    path, node.lineno, f"{node.name} has {size} lines of code, at most {MAX_FUNCTION_LINES}"
                )


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _annotations(path: str, tree: ast.Module) -> Iterator[Violation]:
    methods = {
        id(child): not any(_name(decorator) == "staticmethod" for decorator in child.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, _Function)
    }
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            positional = [*node.args.posonlyargs, *node.args.args][1 if methods.get(id(node)) else 0 :]
            every = [*positional, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            for argument in every:
                if argument is not None and argument.annotation is None:
                    yield Violation(
                        path, argument.lineno, f"parameter {argument.arg} of {node.name} is not annotated"
                    )


def _not_implemented(path: str, tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _name(raised) == "NotImplementedError":
                yield Violation(
                    path, node.lineno, "NotImplementedError is raised: split the ability into a protocol"
                )


def _environment(path: str, tree: ast.Module) -> Iterator[Violation]:
    touching = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    message = f"the environment is touched outside {ENVIRONMENT_MODULE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in touching and _name(node.value) == "os":
            yield Violation(path, node.lineno, message)
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and touching & {alias.name for alias in node.names}
        ):
            yield Violation(path, node.lineno, message)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def check_tree(root: Path) -> list[Violation]:
    """Violations in every Python file of the repository at ``root``."""
    found: list[Violation] = []
    for folder in ("packages", "tools", "tests-integration", "docs"):
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root)
            library = folder == "packages" and "src" in path.parts
            found += check_source(path.as_posix(), file.read_text(encoding="utf-8"), library=library)
    return found


@dataclass(frozen=True)
class PrivateAccess:
    """Private access across modules in one package, or in all.

    Attributes:
        package: name of the package's folder, or ``all packages``.
        lines: lines of code.
        found: the places.
    """

    package: str
    lines: int
    found: tuple[private_access.Access, ...]

    @property
    def rate(self) -> float:
        """Places per 1,000 lines of code."""
        return 1000 * len(self.found) / self.lines if self.lines else 0.0

    def __str__(self) -> str:
        return f"{self.package}: {len(self.found)} in {self.lines} lines, {self.rate:.2f} per 1,000"


def measure_private_access(root: Path) -> list[PrivateAccess]:
    """Private access across modules in each package, and last in all of them."""
    trees, lines = {}, Counter[str]()
    for file in sorted(root.glob("packages/*/src/**/*.py")):
        path, source = file.relative_to(root), file.read_text(encoding="utf-8")
        trees[path.as_posix()] = tree = ast.parse(source, filename=str(file))
        lines[path.parts[1]] += len(code_lines(source, tree))
    found = private_access.find(trees)
    measured = [
        PrivateAccess(package, count, tuple(one for one in found if one.path.split("/")[1] == package))
        for package, count in sorted(lines.items())
    ]
    return [*measured, PrivateAccess("all packages", lines.total(), tuple(found))]


def main(arguments: list[str] | None = None) -> int:
    """Print the violations; 1 when there is any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="repository root")
    parser.add_argument(
        "--private-access-limit",
        type=float,
        default=PRIVATE_ACCESS_LIMIT,
        help="private access across modules per 1,000 lines of code must be below this (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    violations = check_tree(options.root)
    for violation in violations:
        print(violation)
    measured = measure_private_access(options.root)
    exceeded = [one for one in measured if one.found and one.rate >= options.private_access_limit]
    for access in sorted({access for one in exceeded for access in one.found}):
        print(access)
    for one in measured:
        too_much = f", must be below {options.private_access_limit:g}" if one in exceeded else ""
        print(f"private access across modules, {one}{too_much}")
    count = len(violations) + len(exceeded)
    print(f"budgets: {count} violations")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
