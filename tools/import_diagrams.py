"""Write the diagrams of imports in the documentation, as Mermaid, from the sources.

A diagram is the block below a line ``<!-- imports of NAME -->`` of a page, where NAME is a package, or ``packages`` for
all. Run from the repository root: ``python tools/import_diagrams.py`` writes the blocks; ``--check`` prints the names
of pages that would change, and exits with 1.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator

import grimp
import networkx

from generated import ROOT, Generated, write_or_check

PAGES = (
    *(ROOT / name for name in ("README.md", "docs/index.md", "docs/architecture.md")),
    *sorted((ROOT / "docs" / "architecture").glob("*.md")),
)
PACKAGES = ("accel_cli", "accel_train", "accel_bigmodel", "accel_ckpt", "accel_state")
REST = "rest"  # the box of all modules that import no folder
_BLOCK = re.compile(r"(?<=<!-- imports of )(\w+) -->\n```mermaid\n.*?```\n", re.DOTALL)


def imports(package: str) -> networkx.DiGraph:
    """Which folders and modules directly below a package import which, of which package in the case of ``packages``.

    Nodes have ``folder``, whether they are one.
    """
    roots = PACKAGES if package == "packages" else (package,)
    graph = grimp.build_graph(*roots, cache_dir=None)
    members = roots if package == "packages" else graph.find_children(package)
    names = {member: member.rpartition(".")[2] for member in members if ".__" not in member}
    found = networkx.DiGraph()
    for member, name in names.items():
        found.add_node(name, folder=bool(graph.find_children(member)))
    for member in names:
        graph.squash_module(member)
    for member, name in names.items():
        others = graph.find_modules_directly_imported_by(member) & {*names} - {member}
        found.add_edges_from((name, names[other]) for other in others)
    return found


def diagram(package: str) -> networkx.DiGraph:
    """The same with one node for all modules that import no folder, and without imports that follow from others.

    Nodes have ``names``, those of their folders and modules.

    Raises:
        networkx.NetworkXError: folders import each other in a cycle.
    """
    graph = imports(package)
    folders = {name for name in graph if graph.nodes[name]["folder"]}
    rest = {name for name in graph if name not in folders and not networkx.descendants(graph, name) & folders}
    shown = networkx.relabel_nodes(graph, dict.fromkeys(rest, REST))
    shown.remove_edges_from(list(networkx.selfloop_edges(shown)))
    reduced = networkx.transitive_reduction(shown)
    for name in reduced:
        reduced.nodes[name]["names"] = sorted(rest) if name == REST else [name]
    return reduced


def mermaid(package: str) -> str:
    """The diagram as a fenced block of Mermaid, with "_" behind names: some, such as "end", are words of Mermaid."""
    graph = diagram(package)
    lines = ["```mermaid", "flowchart TD", f"  accTitle: What imports what: {package}"]
    lines += [
        f'  {name}_["{_words(package, name, graph.nodes[name]["names"])}"]'
        for name in networkx.lexicographical_topological_sort(graph)
    ]
    lines += [f"  {above}_ --> {below}_" for above, below in sorted(graph.edges)]
    return "\n".join([*lines, "```", ""])


def _words(package: str, name: str, names: list[str]) -> str:
    """What is in a box: a title; for packages, and for modules that share a box, also what they are."""
    if name == REST:
        return f"<b>{', '.join(names)}</b><br>modules that import no folder"
    if package == "packages":
        title = name.replace("_", "-")
        about = tomllib.loads((ROOT / "packages" / title / "pyproject.toml").read_text(encoding="utf-8"))
        return f"<b>{title}</b><br>{about['project']['description'].rstrip('.')}"
    is_folder = (ROOT / "packages" / package.replace("_", "-") / "src" / package / name).is_dir()
    return f"<b>{name}{'/' * is_folder}</b>"


def pages() -> Iterator[Generated]:
    """The pages with the diagrams of the present sources."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda found: f"{found[1]} -->\n{mermaid(found[1])}", text)
        yield Generated(page, new == text, lambda new=new: new)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; the exit status."""
    return write_or_check(__doc__, "python tools/import_diagrams.py", pages(), arguments)


if __name__ == "__main__":
    sys.exit(main())
