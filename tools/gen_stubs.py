"""Write the stubs of the lazy packages, ``__init__.pyi``, from the tables in their ``__init__.py``.

The table that ``__init__.py`` passes to ``attach`` is the one list of a package's public names; type checkers
and editors cannot evaluate it, so they read a stub. ``python tools/gen_stubs.py`` writes every stub, and
``--check`` reports those that are missing or out of date, and names that a table lists twice.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADER = "# Generated from __init__.py by tools/gen_stubs.py; do not edit.\n"
COMMAND = "python tools/gen_stubs.py"


def read_table(top: Path) -> dict[str, list[str]]:
    """Home module to public names, as the ``__init__.py`` of a lazy package declares them.

    Args:
        top: the ``__init__.py``; it is parsed, not imported.

    Raises:
        ValueError: the file does not call ``attach`` exactly once with the name and a literal table, or the
            table lists a name twice.
    """
    calls = _attach_calls(_parse(top))
    if len(calls) != 1 or len(calls[0].args) != 2:
        raise ValueError(f"{top} must call attach(__name__, table) once, found {len(calls)} such calls")
    table = {home: list(names) for home, names in ast.literal_eval(calls[0].args[1]).items()}
    homes: dict[str, str] = {}
    for home, names in table.items():
        for name in names:
            if name in homes:
                raise ValueError(
                    f"{top} lists {name} twice, from {homes[name]} and from {home}: delete one of the two"
                )
            homes[name] = home
    return table


def lazy_tops(root: Path) -> Iterator[Path]:
    """The ``__init__.py`` of each package and subpackage that declares its names in a table."""
    for top in sorted(root.glob("packages/*/src/**/__init__.py")):
        if _attach_calls(_parse(top)):
            yield top


def render(top: Path) -> str:
    """The text of the stub that belongs to ``top``."""
    # What the package top imports under its own name, such as __version__, is visible beside the table.
    shown = [
        (node.module or "", alias.name)
        for node in _parse(top).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    shown += [(home, name) for home, names in read_table(top).items() for name in names]
    lines = [f"from {home} import {name} as {name}\n" for home, name in sorted(shown)]
    return f"{HEADER}{''.join(lines)}\n__all__: list[str]\n"


def _parse(top: Path) -> ast.Module:
    return ast.parse(top.read_text(encoding="utf-8"), filename=str(top))


def _attach_calls(tree: ast.Module) -> list[ast.Call]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach"
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the stubs; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a stub is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository root")
    options = parser.parse_args(arguments)
    tops = list(lazy_tops(options.root))
    outdated = []
    for top in tops:
        stub, text = top.with_suffix(".pyi"), render(top)
        if not stub.exists() or stub.read_text(encoding="utf-8") != text:
            outdated.append(stub.relative_to(options.root).as_posix())
            if not options.check:
                stub.write_text(text, encoding="utf-8")
    for path in outdated:
        print(f"{path} is out of date; run {COMMAND}" if options.check else f"wrote {path}")
    print(f"stubs: {len(outdated)} of {len(tops)} {'out of date' if options.check else 'written'}")
    return 1 if options.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
