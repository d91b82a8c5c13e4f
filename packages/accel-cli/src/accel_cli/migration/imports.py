"""Imports and uses of ``accelerate`` become those of this library's packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from accel_cli.migration.names import SUBMODULES, home_of
from accel_cli.migration.result import Remark
from accel_cli.migration.source import PythonSource, dotted

__all__ = ["imports_accelerate", "rewrite_imports"]

_THEIRS = "accelerate"
_NOT_HERE = "has no counterpart in this version"
_TRAINERS = ("transformers", "trl")
_KEPT = (
    "accelerate.__version__ is left as it is, and needs Accelerate: accel has versions of its own "
    "(accel_train.__version__); remove the comparison, or compare with those"
)
_OF_TESTS = "it is for Accelerate's tests: remove the lines that use it, or make loaders of your own"
# What to write in the place of names that have no counterpart.
_INSTEAD = {
    "mocked_dataloaders": _OF_TESTS,
    "mocked_dataloaders_for_autoregressive_models": _OF_TESTS,
    "torch_device": "write PartialState().device of accel_train",
    "PrepareForLaunch": "start the processes by accel launch, or by notebook_launcher of accel_train",
}
_Import = ast.Import | ast.ImportFrom


def rewrite_imports(source: PythonSource) -> tuple[str, list[Remark], list[Remark]]:
    """Rewrite a source.

    Args:
        source: what is read; what has to change in it is replaced.

    Returns:
        The new text, refusals (with any of them the new text is incomplete), and notes.
    """
    rewriter = _Rewriter(source)
    rewriter.rewrite_uses()
    for block in _blocks(source.tree):
        rewriter.rewrite_imports(block)
    rewriter.note_texts()
    after = source.replaced()
    if after != source.text:
        rewriter.note_trainers()
    return after, sorted(set(rewriter.refusals)), sorted(set(rewriter.notes))


def imports_accelerate(source: PythonSource) -> bool:
    """Whether a source imports ``accelerate`` or a module of it anywhere."""
    return any(isinstance(node, _Import) and _imports_theirs(node) for node in ast.walk(source.tree))


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


class _Rewriter:
    def __init__(self, source: PythonSource) -> None:
        self.refusals: list[Remark] = []
        self.notes: list[Remark] = []
        self._source = source
        self._modules = dict(_modules(source.tree))
        # The packages of the names that are used of each module, which are imported in its place.
        self._used: dict[str, dict[str, None]] = {local: {} for local in self._modules}

    def rewrite_uses(self) -> None:
        """``accelerate.utils.set_seed`` becomes ``accel_train.set_seed``."""
        owners = {node.value: node for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute)}
        node: Any
        for node in ast.walk(self._source.tree):
            local = _name_of(node)
            if local in self._modules:
                used = self._used_of(node, owners)
                if used is not None:
                    self._rewrite_use(local, used)
                else:
                    text = f"the module {local} is used as a value, which cannot be rewritten"
                    self.refusals.append(Remark(node.lineno, text))

    def _used_of(self, node: Any, owners: dict[ast.expr, ast.Attribute]) -> ast.Attribute | None:
        """The first attribute in ``module.….name`` that is no module; None: the module itself is used."""
        module = self._modules[_name_of(node)]
        names: list[str] = []
        while (owner := owners.get(node)) is not None:
            names.append(owner.attr)
            if not _is_module(module, names):
                return owner
            node = owner
        return None

    def _rewrite_use(self, local: str, used: ast.Attribute) -> None:
        package = home_of(used.attr)
        written = self._source.between(*self._source.span(used))
        if package is None:
            self.refusals.append(Remark(used.lineno, f"{written} {_NOT_HERE}"))
        elif written != dotted(used):
            self.refusals.append(Remark(used.lineno, f"write {dotted(used)} on one line, without spaces"))
        else:
            self._note_version(used.attr, used.lineno)
            self._used[local][package] = None
            self._source.replace(*self._source.span(used.value), package)

    def rewrite_imports(self, block: Sequence[ast.stmt]) -> None:
        """Imports of a block become imports of the packages that have the names; those below each other become one."""
        theirs = [statement for statement in block if _imports_theirs(statement)]
        groups: list[list[ast.stmt]] = []
        for statement in theirs:
            if groups and self._are_below(groups[-1][-1], statement):
                groups[-1].append(statement)
            else:
                groups.append([statement])
        for group in groups:
            self._replace(group, keep=len(theirs) == len(block) and group is groups[-1])

    def _are_below(self, first: ast.stmt, second: ast.stmt) -> bool:
        """Whether two imports are on neighbouring lines, with nothing else on or between them."""
        between = self._source.between(self._source.span(first)[1], self._source.span(second)[0])
        one_line = all(each.lineno == each.end_lineno for each in (first, second))
        return one_line and second.lineno == first.lineno + 1 and not between.strip()

    def _replace(self, imports: Sequence[ast.stmt], keep: bool) -> None:
        """Replace imports.

        Args:
            imports: on neighbouring lines.
            keep: a statement must be left, because the block has no other.
        """
        packages: dict[str, None] = {}
        names: dict[str, dict[str, None]] = {}
        for statement in imports:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    theirs = _is_theirs(alias.name)
                    packages |= self._used[alias.asname or _THEIRS] if theirs else {ast.unparse(alias): None}
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    self._sort_name(statement, alias, packages, names)
        begin, end = self._source.span(imports[0])[0], self._source.span(imports[-1])[1]
        first, last = self._source.line_of(begin, end)
        before, after = self._source.between(first, begin), self._source.between(end, last)
        new = [f"import {', '.join(packages)}"] if packages else []
        new += [f"from {home} import {', '.join(aliases)}" for home, aliases in names.items()]
        if before.strip() or ";" in after.partition("#")[0]:  # a; import accelerate; b
            self._source.replace(begin, end, "; ".join(new) or "pass")
        elif not new and not keep:
            self._source.replace(first, last, "")
        elif len(imports) == len(new) == len(names) == 1 and isinstance(imports[0], ast.ImportFrom):
            # Nothing is taken out: line breaks and comments among the names stay.
            home, written = next(iter(names)), self._source.between(begin, end)
            self._source.replace(begin, end, re.sub(r"^from\s+[\w.]+", f"from {home}", written))
        else:
            line_end = after[len(after.rstrip("\r\n")) :] or "\n"
            self._source.replace(begin, end, f"{line_end}{before}".join(new) or "pass")

    def _sort_name(
        self,
        statement: ast.ImportFrom,
        alias: ast.alias,
        packages: dict[str, None],
        names: dict[str, dict[str, None]],
    ) -> None:
        """Add an imported name to those of its package, or the packages that are used of an imported module."""
        source, name = statement.module, alias.name
        if name == "*":
            text = f"from {source} import *: import the names that are used, one by one"
            self.refusals.append(Remark(statement.lineno, text))
        elif source == _THEIRS and name in SUBMODULES:
            packages |= self._used[alias.asname or name]
        else:
            home = home_of(name)
            if home is None:
                advice = _INSTEAD.get(name, "remove what uses it, or write your own")
                text = f"{source}.{name} is left as it is, and needs Accelerate: it has no counterpart here; {advice}"
                self.notes.append(Remark(statement.lineno, text))
            self._note_version(name, statement.lineno)
            names.setdefault(home or str(source), {})[ast.unparse(alias)] = None

    def _note_version(self, name: str, line: int) -> None:
        """Note a use of Accelerate's version, which no package here replaces."""
        if name == "__version__":
            self.notes.append(Remark(line, _KEPT))

    def note_texts(self) -> None:
        """Texts are not code: mentions of ``accelerate`` in them are only noted."""
        for node in ast.walk(self._source.tree):
            match node:
                case ast.Constant(value=str(text)) if text == _THEIRS or text.startswith("accelerate launch"):
                    written = self._source.between(*self._source.span(node))
                    self.notes.append(Remark(node.lineno, f"the text {written} is left as it is"))

    def note_trainers(self) -> None:
        """Note trainers of other libraries, which import Accelerate themselves."""
        for node in ast.walk(self._source.tree):
            source = _source_of(node)
            if source.partition(".")[0] in _TRAINERS and isinstance(node, ast.ImportFrom):
                self.notes += [
                    Remark(
                        node.lineno,
                        f"{alias.name} of {source} trains through Accelerate, so this file uses both; start it with "
                        "`accel launch --as_accelerate`, which lets accel answer for Accelerate",
                    )
                    for alias in node.names
                    if alias.name.endswith("Trainer")
                ]


def _modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local names that stand for modules of Accelerate, and the dotted names of these."""
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, _Import) else ():
            if isinstance(node, ast.Import) and _is_theirs(alias.name):
                yield (alias.asname, alias.name) if alias.asname else (_THEIRS, _THEIRS)
            elif _source_of(node) == _THEIRS and alias.name in SUBMODULES:
                yield alias.asname or alias.name, f"{_THEIRS}.{alias.name}"


def _name_of(node: Any) -> Any:
    """The name that a node uses or binds, unless it is that of an argument in a call, or of an import."""
    if isinstance(node, ast.keyword | ast.alias):
        return None
    return next((vars(node)[key] for key in ("id", "arg", "name") if key in vars(node)), None)


def _is_module(module: str, names: Sequence[str]) -> bool:
    """Whether names lead from a module of Accelerate to another module."""
    inner = names if module != _THEIRS else names[1:]
    known = module != _THEIRS or names[0] in SUBMODULES
    return known and all(name.islower() and home_of(name) is None for name in inner)


def _imports_theirs(statement: ast.stmt) -> bool:
    names = (
        [alias.name for alias in statement.names]
        if isinstance(statement, ast.Import)
        else [_source_of(statement)]
    )
    return any(map(_is_theirs, names))


def _is_theirs(name: str) -> bool:
    return name == _THEIRS or name.startswith(f"{_THEIRS}.")


def _source_of(node: ast.AST) -> str:
    """What ``from … import`` names; empty for a relative import, and for anything else."""
    return (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
