"""Find cycles of imports between the modules of the packages, imports for type checkers included.

Modules that need each other's types can only be understood together, even where ``TYPE_CHECKING`` keeps the
imports from failing. A lazy package counts as importing every module that its table names. ``python
tools/check_cycles.py`` prints each group of modules that import each other, directly or through others, with
the imports inside the group, and exits with 1 when there is any.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp

import gen_stubs

PACKAGES = ("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli")


def cycles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules in which each imports each other, directly or through others.

    Args:
        imports: module to the modules that it imports. A module that only occurs as imported imports none.

    Returns:
        The groups and the modules of each, sorted.
    """
    reached = {module: _reach(module, imports) for module in imports}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in imports
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reach(start: str, imports: Mapping[str, Iterable[str]]) -> set[str]:
    """All modules that ``start`` imports, directly or not; ``start`` itself only if a path leads back to it."""
    reached: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports.get(module, ())
    return reached


def check(packages: Iterable[str] = PACKAGES, root: Path = gen_stubs.ROOT) -> list[str]:
    """One text per cycle: its modules, and the imports between them with their lines.

    Args:
        packages: names of importable packages; their source is read, and nothing is imported.
        root: the repository, for the tables of lazy packages.
    """
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    for top in gen_stubs.lazy_tops(root):
        name = ".".join(top.parent.parts[top.parent.parts.index("src", len(root.parts)) + 1 :])
        if name in imports:
            imports[name] |= gen_stubs.read_table(top).keys()
    texts = []
    for group in cycles(imports):
        lines = [f"import cycle of {len(group)} modules: {', '.join(group)}"]
        for importer in group:
            for imported in sorted(imports[importer] & set(group)):
                details = graph.get_import_details(importer=importer, imported=imported)
                numbers = ", ".join(str(one["line_number"]) for one in details)
                where = f"line {numbers}" if numbers else "in its table of public names"
                lines.append(f"  {importer} imports {imported} ({where})")
        texts.append("\n".join(lines))
    return texts


def main(arguments: list[str] | None = None) -> int:
    """Print the cycles; 1 when there is any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="import names; all five by default")
    parser.add_argument("--root", type=Path, default=gen_stubs.ROOT, help="repository root")
    options = parser.parse_args(arguments)
    found = check(options.packages, options.root)
    for text in found:
        print(text)
    print(f"import cycles: {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
