"""Make the pages of the API reference, by topic, from ``docs/reference/topics.toml`` and the sources.

Nothing is imported from the packages: names come from their stubs, first sentences from the docstrings, and
mkdocstrings renders the rest.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import import_table

__all__ = [
    "PACKAGES",
    "Page",
    "Topic",
    "navigation",
    "pages",
    "public_members",
    "public_names",
    "read_topics",
    "source",
    "summary",
]

ROOT = Path(__file__).parents[1]
TOPICS = ROOT / "docs" / "reference" / "topics.toml"
# Those with an API; accel-cli is a command, and has a page of its own.
PACKAGES = ("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train")
_WITHOUT_INHERITED = "    options:\n      inherited_members: false\n"
_WITHOUT_MEMBERS = "    options:\n      members: false\n"


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        title: of the page.
        path: below ``docs/``.
        about: a sentence at its top; may be empty.
        names: (module, name) of what it documents. Of a page that documents members of a class there are none.
        owner: (module, name) of the class whose members it documents; None: it documents names.
        members: their names.
    """

    title: str
    path: str
    about: str
    names: Sequence[tuple[str, str]]
    owner: tuple[str, str] | None = None
    members: Sequence[str] = ()


@dataclass(frozen=True)
class Topic:
    """A section of the reference: a page that lists all names, and pages that document them."""

    title: str
    path: str
    about: str
    pages: Sequence[Page] = field(default_factory=list)


def read_topics(path: Path = TOPICS) -> list[Topic]:
    """The topics in order.

    Raises:
        ValueError: an entry that is neither a module with public names nor a public name, or one that is named twice.
    """
    described = tomllib.loads(path.read_text(encoding="utf-8"))["topic"]
    entries = [entry for topic in described for page in topic["page"] for entry in page.get("from", ())]
    twice = {entry for entry in entries if entries.count(entry) > 1}
    if twice:
        raise ValueError(f"{path.name} names {', '.join(sorted(twice))} more than once")
    single = set(entries) - set(public_names())
    return [
        Topic(
            topic["title"],
            f"reference/{topic['folder']}/index.md",
            topic["about"],
            [
                Page(
                    page["title"],
                    f"reference/{topic['folder']}/{_slug(page['title'])}.md",
                    page.get("about", ""),
                    [name for entry in page.get("from", ()) for name in _named(entry, single, path)],
                    _named(page["class"], single, path)[0] if "class" in page else None,
                    page.get("members", ()),
                )
                for page in topic["page"]
            ],
        )
        for topic in described
    ]


def _named(entry: str, single: set[str], path: Path) -> list[tuple[str, str]]:
    """The names of an entry: of a module without those that are listed by themselves."""
    homes = public_names()
    if entry in homes:
        return [(entry, name) for name in homes[entry] if f"{entry}.{name}" not in single]
    home, _, name = entry.rpartition(".")
    if name not in homes.get(home, ()):
        raise ValueError(f"{path.name}: {entry} is neither a module with public names nor a public name")
    return [(home, name)]


@functools.cache
def public_names() -> Mapping[str, Sequence[str]]:
    """The public names of all packages by the module that defines them, which a re-export does not."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for home, name in import_table.read_stub(_file(package).with_suffix(".pyi")):
            if home.split(".")[0] == package:
                found.setdefault(home, []).append(name)
    return found


def pages(topics: Sequence[Topic]) -> dict[str, str]:
    """The text of all pages by path: the list of all names, an index of each topic, and its pages."""
    made = {
        f"reference/names-{package.removeprefix('accel_')}.md": _all_names(topics, package)
        for package in PACKAGES
    }
    apart = {page.owner for topic in topics for page in topic.pages}
    for topic in topics:
        made[topic.path] = f"# {topic.title}\n\n{topic.about}\n" + "".join(
            f"\n## [{page.title}]({_file_of(page)})\n\n"
            + (_table(page.names, _file_of(page)) if page.names else f"{page.about}\n")
            for page in topic.pages
        )
        for page in topic.pages:
            made[page.path] = _page(page, apart) if page.owner is None else _members_page(page, page.owner)
    return made


def public_members(module: str, name: str) -> dict[str, str]:
    """The public methods and properties of a class, in order, with the first sentence on each."""
    for node in source(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
            # The last of several is the one that is called; the others are its signatures, or set the property.
            texts = {one.name: ast.get_docstring(one) for one in methods if ast.get_docstring(one)}
            return {one.name: _first_sentence(texts.get(one.name) or "") for one in methods}
    raise ValueError(f"{module} defines no class {name}")


def _members_page(page: Page, owner: tuple[str, str]) -> str:
    """A page of members of a class."""
    home = ".".join(owner)
    said = public_members(*owner)
    rows = "".join(f"| [`{name}`](#{home}.{name}) | {said[name]} |\n" for name in page.members)
    table = f"| name | what it is |\n|---|---|\n{rows}"
    return "\n\n".join(
        [f"# {page.title}", page.about, table, *(f"::: {home}.{name}\n" for name in page.members)]
    )


def navigation(topics: Sequence[Topic]) -> list[dict[str, Any]]:
    """The sections, each with its index and its pages, then the list of all names."""
    sections: list[dict[str, Any]] = [
        {topic.title: [topic.path, *({page.title: page.path} for page in topic.pages)]} for topic in topics
    ]
    lists: list[Any] = [
        {f"{package}": f"reference/names-{package.removeprefix('accel_')}.md"} for package in PACKAGES
    ]
    return [*sections, {"All names": lists}]


def summary(module: str, name: str) -> str:
    """The first sentence of what a docstring says about a name; empty for a constant without one."""
    home = _home(module, name)
    if home is None:
        return ""
    body = source(home).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _first_sentence(ast.get_docstring(node) or "")
        if name in _assigned(node):
            if isinstance(node.value, ast.Name):
                return f"Another name of `{node.value.id}`."
            match following:
                case ast.Expr(ast.Constant(str(text))):
                    return _first_sentence(text)
    return ""


def _home(module: str, name: str) -> str | None:
    """The module that defines a name which another one may import; None: it is not of the packages."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    for node in source(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [one.name for one in node.names]:
            return _home(node.module, name)
    return module


def _assigned(node: ast.stmt) -> list[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _first_sentence(text: str) -> str:
    first = text.partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:;]) ", first)[0].rstrip(":;").replace("``", "`").replace("|", "\\|")


def _all_names(topics: Sequence[Topic], package: str) -> str:
    """The names of a package."""
    pages = {
        name: page.path.removeprefix("reference/")
        for topic in topics
        for page in topic.pages
        for name in page.names
        if name[0].partition(".")[0] == package
    }
    rows = "".join(
        f"| {_link(home, name, pages[home, name])} | {summary(home, name)} |\n"
        for home, name in sorted(pages, key=lambda found: (found[1].casefold(), found[0]))
    )
    return f"# All names of {package}\n\n| name | what it is |\n|---|---|\n{rows}"


def _page(page: Page, apart: Collection[tuple[str, str] | None]) -> str:
    """A page of names.

    Args:
        page: the page.
        apart: classes whose members have pages of their own.
    """
    packages = {home.partition(".")[0] for home, _ in page.names}
    alone = next(iter(packages)) if len(packages) == 1 else None
    about = [page.about] if page.about else []
    if alone is not None:
        about.append(f"Import {page.names[0][1] if len(page.names) == 1 else 'all of it'} from `{alone}`.")
    listed = _table(page.names, "", packages=alone is None) if len(page.names) > 1 else ""
    parts = [
        f"::: {home}.{name}\n"
        + (
            _WITHOUT_MEMBERS
            if (home, name) in apart
            else _WITHOUT_INHERITED
            if _extends_documented(home, name)
            else ""
        )
        for home, name in page.names
        if name not in _made(home)
    ]
    return "\n\n".join([f"# {page.title}", *about, listed, *parts])


def _extends_documented(module: str, name: str) -> bool:
    """Whether all base classes have sections of their own, so that what they bring is said there, and only there."""
    bases = _bases(module, name)
    documented = {each for names in public_names().values() for each in names}
    return bool(bases) and all(base in documented for base in bases)


def _bases(module: str, name: str) -> list[str]:
    """The base classes of a class, without ``typing``'s; none for other things."""
    home = _home(module, name)
    for node in source(home).body if home is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            given = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            return [one for one in map(ast.unparse, given) if one not in ("Generic", "Protocol")]
    return []


def _table(names: Sequence[tuple[str, str]], path: str, *, packages: bool = False) -> str:
    rows = (
        ["| name | import it from | what it is |", "|---|---|---|"]
        if packages
        else ["| name | what it is |", "|---|---|"]
    )
    for home, name in names:
        package = f" `{home.partition('.')[0]}` |" if packages else ""
        rows.append(f"| {_link(home, name, path)} |{package} {summary(home, name)} |")
    return "\n".join(rows) + "\n"


def _link(home: str, name: str, path: str) -> str:
    """A function that is made from a template has no section of its own, and is called without arguments."""
    if name in _made(home):
        return f"[`{name}()`]({path})" if path else f"`{name}()`"
    return f"[`{name}`]({path}#{home}.{name})"


def _file_of(page: Page) -> str:
    return page.path.rpartition("/")[2]


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


@functools.cache
def source(module: str) -> ast.Module:
    """The syntax tree of a module of the packages, which is not imported."""
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    package = module.partition(".")[0].replace("_", "-")
    place = ROOT / "packages" / package / "src" / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@functools.cache
def _made(module: str) -> frozenset[str]:
    """Names bound to the result of a private function of the module: functions made from one template."""
    return frozenset(
        ast.unparse(node.targets[0])
        for node in source(module).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("_")
    )
