"""Pages that are made from the packages when the site is built: the import table and the API reference."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PACKAGES = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT / "tools"))
    import import_table

    pages = {
        "reference/imports.md": import_table.render(import_table.load_rows(), import_table.exports(ROOT))
    }
    for package in PACKAGES:
        pages[f"reference/{package.replace('-', '_')}.md"] = reference(package)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def reference(package: str) -> str:
    """The reference page of a package: its public names, under the module that defines them."""
    name = package.replace("-", "_")
    top = ROOT / "packages" / package / "src" / name / "__init__.py"
    tree = ast.parse(top.read_text(encoding="utf-8"))
    homes = {
        home: names
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "attach"
        for home, names in ast.literal_eval(node.args[1]).items()
    }
    parts = [f"# {name}\n\n{ast.get_docstring(tree)}\n"]
    for home in sorted(homes):
        if home.split(".")[0] != name:
            continue  # a re-export: its page is that of its home
        parts.append(f"\n## `{home}`\n")
        parts += [f"\n::: {home}.{public}\n" for public in homes[home]]
    return "".join(parts)
