"""Imports and uses of ``accelerate`` become those of this library's packages, with the formatting kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from accel_cli.migration.names import SUBMODULES, home_of
from accel_cli.migration.result import Remark

__all__ = ["rewrite_imports"]

_THEIRS = "accelerate"
_NOT_HERE = "has no counterpart in this version"
_TRAINERS = ("transformers", "trl")
_VERSION = "__version__"
_KEPT = (
    "accelerate.__version__ is left as it is, and needs Accelerate: accel has versions of its own "
    "(accel_train.__version__); remove the comparison, or compare with those"
)


def rewrite_imports(module: cst.Module) -> tuple[cst.Module, list[Remark], list[Remark]]:
    """Rewrite a module.

    Args:
        module: the parsed source.

    Returns:
        The new module, refusals (with any of them the new module is incomplete), and notes.
    """
    wrapper = MetadataWrapper(module)
    bindings = _Bindings()
    wrapper.visit(bindings)
    rewriter = _Rewriter(bindings.modules)
    changed = wrapper.visit(rewriter).visit(_Merger())
    assert isinstance(changed, cst.Module)
    notes = rewriter.notes + ([] if changed.deep_equals(module) else bindings.notes)
    return changed, sorted(set(bindings.refusals + rewriter.refusals)), sorted(set(notes))


class _Located(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[Remark] = []
        self.notes: list[Remark] = []

    def line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def refuse(self, node: cst.CSTNode, text: str) -> None:
        self.refusals.append(Remark(self.line(node), text))


class _Bindings(_Located):
    """Finds the local names that stand for modules of Accelerate.

    Attributes:
        modules: local name to the dotted name of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, str] = {}

    def visit_Import(self, node: cst.Import) -> None:
        """``import accelerate``, ``import accelerate.utils``, ``import accelerate.utils as u``."""
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            if _is_theirs(name):
                local = _asname(alias)
                self.modules[local or _THEIRS] = name if local else _THEIRS

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        """``from accelerate import utils``; and trainers that import Accelerate themselves."""
        source = _source(node)
        if source.partition(".")[0] in _TRAINERS and not isinstance(node.names, cst.ImportStar):
            trainers = [get_full_name_for_node(alias.name) or "" for alias in node.names]
            self.notes += [
                Remark(
                    self.line(node),
                    f"{name} of {source} trains through Accelerate, so this file uses both; start it with "
                    "`accel launch --as_accelerate`, which lets accel answer for Accelerate",
                )
                for name in trainers
                if name.endswith("Trainer")
            ]
        if not _is_theirs(source) or isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            if source == _THEIRS and name in SUBMODULES:
                self.modules[_asname(alias) or name] = f"{source}.{name}"


class _Rewriter(_Located):
    """Rewrites imports, and attributes of imported modules.

    Args:
        modules: local name to the dotted name of a module of Accelerate.

    Attributes:
        modules: the same.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        super().__init__()
        self.modules = modules
        self._used: dict[str, dict[str, None]] = {name: {} for name in modules}

    def visit_Module(self, node: cst.Module) -> None:
        """Find all uses of the modules first: their import statements become imports of the names that are used."""
        node.visit(_Uses(self))

    def use(self, local: str, package: str) -> None:
        """Remember that ``package`` replaces the module called ``local``."""
        self._used[local][package] = None

    def note_version(self, name: str, node: cst.CSTNode) -> None:
        """Note a use of Accelerate's version, which no package here replaces."""
        if name == _VERSION:
            self.notes.append(Remark(self.line(node), _KEPT))

    def visit_Import(self, node: cst.Import) -> bool:
        """Not the names inside."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Not the names inside."""
        return False

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        """``import accelerate`` becomes an import of the packages that replace it."""
        kept: list[cst.ImportAlias] = []
        packages: dict[str, None] = {}
        found = False
        for alias in original_node.names:
            name = get_full_name_for_node(alias.name) or ""
            if not _is_theirs(name):
                kept.append(alias)
                continue
            found = True
            packages |= self._used[_asname(alias) or _THEIRS]
        if not found:
            return updated_node
        new = [*kept, *(cst.ImportAlias(name=cst.Name(package)) for package in packages)]
        if not new:
            return cst.RemoveFromParent()
        commas = [
            alias.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
            for alias in new[:-1]
        ]
        return updated_node.with_changes(
            names=[*commas, new[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
        )

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """``from accelerate import A, b`` becomes one import for each package."""
        statements: list[cst.SimpleStatementLine] = []
        body: list[cst.BaseSmallStatement] = []
        replaced = False
        for small in updated_node.body:
            if not isinstance(small, cst.ImportFrom) or not _is_theirs(_source(small)):
                body.append(small)
                continue
            replaced = True
            body += self._split(original_node, small)
        if not replaced:
            return updated_node
        if not body:
            return cst.RemoveFromParent()
        if len(original_node.body) > 1:  # a; from accelerate import b
            separated = [
                small.with_changes(semicolon=cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" ")))
                for small in body[:-1]
            ]
            return updated_node.with_changes(body=[*separated, body[-1]])
        last = len(body) - 1
        for index, small in enumerate(body):
            line = cst.SimpleStatementLine([small])
            if index == 0:
                line = line.with_changes(leading_lines=updated_node.leading_lines)
            if index == last:
                line = line.with_changes(trailing_whitespace=updated_node.trailing_whitespace)
            statements.append(line)
        return cst.FlattenSentinel(statements)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """``accelerate.utils.set_seed`` becomes ``accel_train.set_seed``."""
        found = _resolve(original_node, self.modules)
        if found is None:
            return updated_node
        package = home_of(found[1])
        return updated_node if package is None else updated_node.with_changes(value=cst.Name(package))

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> Any:
        """Texts are not code: mentions of ``accelerate`` in them are only noted."""
        text = original_node.value.strip("rbuRBU\"'")
        if text == _THEIRS or text.startswith("accelerate launch"):
            self.notes.append(
                Remark(self.line(original_node), f"the text {original_node.value} is left as it is")
            )
        return updated_node

    def _split(
        self, line: cst.SimpleStatementLine, statement: cst.ImportFrom
    ) -> list[cst.BaseSmallStatement]:
        """The imports that replace one of Accelerate's."""
        source = _source(statement)
        if isinstance(statement.names, cst.ImportStar):
            self.refuse(line, f"from {source} import *: import the names that are used, one by one")
            return [statement]
        homes: dict[str, list[cst.ImportAlias]] = {}
        modules: dict[str, None] = {}
        for alias in statement.names:
            name = get_full_name_for_node(alias.name) or ""
            local = _asname(alias) or name
            if source == _THEIRS and name in SUBMODULES:
                modules |= self._used[local]
                continue
            self.note_version(name, line)
            home = home_of(name)
            if home is None:
                self.refuse(line, f"{source}.{name} {_NOT_HERE}")
                continue
            homes.setdefault(home, []).append(alias)
        several = [cst.Import([cst.ImportAlias(name=cst.Name(package))]) for package in modules]
        return [*several, *(_import_from(statement, home, aliases) for home, aliases in homes.items())]


class _Merger(cst.CSTTransformer):
    """Makes one import of neighbouring imports from the same package of ours, and drops repeated ones."""

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """The top level."""
        return updated_node.with_changes(body=_merged(updated_node.body))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """A block."""
        return updated_node.with_changes(body=_merged(updated_node.body))


def _merged(body: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for statement in body:
        package = _plain_import_of(statement)
        if not package or not found:
            found.append(statement)
            continue
        if _is_bare(statement) and any(statement.deep_equals(other) for other in found):
            continue
        same = next(
            (at for at in reversed(range(len(found))) if _plain_import_of(found[at]) == package), None
        )
        near = same is not None and all(_plain_import_of(other) for other in found[same:])
        if same is None or not near or not _is_bare(statement) or package.startswith("import "):
            found.append(statement)
            continue
        before, after = found[same].body[0], statement.body[0]
        names = {_spelled(alias): alias for alias in (*before.names, *after.names)}
        new = before.with_changes(names=list(_separated(list(names.values()))))
        found[same] = found[same].with_changes(body=[new])
    return found


def _plain_import_of(statement: Any) -> str:
    """``from x`` or ``import x`` for an import of one of our packages on one line; else nothing."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return ""
    small = statement.body[0]
    if isinstance(small, cst.Import) and len(small.names) == 1 and _asname(small.names[0]) is None:
        name = get_full_name_for_node(small.names[0].name) or ""
        return f"import {name}" if name.startswith("accel_") else ""
    if (
        isinstance(small, cst.ImportFrom)
        and small.lpar is None
        and not isinstance(small.names, cst.ImportStar)
    ):
        name = _source(small)
        return f"from {name}" if name.startswith("accel_") and "." not in name else ""
    return ""


def _is_bare(statement: cst.SimpleStatementLine) -> bool:
    """Whether a statement has no comment or blank line that would be lost with it."""
    return not statement.leading_lines and statement.trailing_whitespace.comment is None


def _spelled(alias: cst.ImportAlias) -> str:
    return f"{get_full_name_for_node(alias.name)} {_asname(alias)}"


class _Uses(cst.CSTVisitor):
    """Finds the uses of modules; a use other than by attribute is refused."""

    def __init__(self, rewriter: _Rewriter) -> None:
        super().__init__()
        self._rewriter = rewriter

    def visit_Import(self, node: cst.Import) -> bool:
        """Not the names inside."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Not the names inside."""
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        """Not the name of a keyword."""
        node.value.visit(self)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """``accelerate.Accelerator`` uses the package of ``Accelerator``."""
        found = _resolve(node, self._rewriter.modules)
        if found is None:
            node.value.visit(self)
            return False
        local, name = found
        package = home_of(name)
        self._rewriter.note_version(name, node)
        if package is None:
            self._rewriter.refuse(node, f"{get_full_name_for_node(node)} {_NOT_HERE}")
        else:
            self._rewriter.use(local, package)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        """The module itself, as a value."""
        if node.value in self._rewriter.modules:
            self._rewriter.refuse(
                node, f"the module {node.value} is used as a value, which cannot be rewritten"
            )


def _resolve(node: cst.Attribute, modules: dict[str, str]) -> tuple[str, str] | None:
    """The local name of a module of Accelerate and the public name, if ``node`` is exactly ``module.….name``."""
    parts = (get_full_name_for_node(node) or "").split(".")
    if len(parts) < 2 or parts[0] not in modules:
        return None
    inner: Any = node
    while isinstance(inner, cst.Attribute):
        inner = inner.value
    if not isinstance(inner, cst.Name):  # f(x).accelerate
        return None
    rest = parts[1:]
    if not all(_is_module(modules[parts[0]], rest[:index]) for index in range(1, len(rest))):
        return None
    return None if _is_module(modules[parts[0]], rest) else (parts[0], rest[-1])


def _is_module(module: str, parts: Sequence[str]) -> bool:
    """Whether ``parts`` lead from a module of Accelerate to another module."""
    if module == _THEIRS:
        return parts[0] in SUBMODULES and all(part.islower() and home_of(part) is None for part in parts[1:])
    return all(part.islower() and home_of(part) is None for part in parts)


def _is_theirs(name: str) -> bool:
    return name == _THEIRS or name.startswith(f"{_THEIRS}.")


def _source(statement: cst.ImportFrom) -> str:
    if statement.relative or statement.module is None:
        return ""
    return get_full_name_for_node(statement.module) or ""


def _asname(alias: cst.ImportAlias) -> str | None:
    name = alias.asname.name if alias.asname is not None else None
    return name.value if isinstance(name, cst.Name) else None


def _import_from(statement: cst.ImportFrom, home: str, aliases: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    names = list(_separated(aliases))
    whole = isinstance(statement.names, Sequence) and len(statement.names) == len(aliases)
    if whole:  # nothing was taken out: keep line breaks and comments
        return statement.with_changes(module=cst.Name(home))
    return cst.ImportFrom(module=cst.Name(home), names=names)


def _separated(aliases: Sequence[cst.ImportAlias]) -> Iterator[cst.ImportAlias]:
    for index, alias in enumerate(aliases):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        yield alias.with_changes(comma=comma if index + 1 < len(aliases) else cst.MaybeSentinel.DEFAULT)
