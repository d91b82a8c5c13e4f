"""Pages generated when the site is built: the import table, the API reference, and whole scripts beside diffs."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Those with an API; accel-cli is a command, and has a page of its own.
PACKAGES = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train")
# Modules with long lists of small functions or constants come last on their page.
LONG_LISTS = ("accel_state.host.available", "accel_state.constants")
NOTHING = "\nThis version has no public functions in it yet.\n"
_DIFF = re.compile(
    r'^(?:<!-- test: old=(?P<old>\S+) -->\n)?```diff title="(?P<new>[^"]+)"\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    import_table = _tool("import_table")
    pages = {
        "reference/imports.md": import_table.render(import_table.load_rows(), import_table.exports(ROOT))
    }
    for package in PACKAGES:
        pages[f"reference/{package.replace('-', '_')}.md"] = reference(package)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each diff of a script into tabs, so that the script can be read and copied whole."""
    return _DIFF.sub(lambda match: tabs(match["text"], match["new"], match["old"]), markdown)


def tabs(diff: str, new: str, old: str | None) -> str:
    """A diff, its new side and, if it has a name, its old side.

    Args:
        diff: lines after ``+``, ``-`` or a space.
        new: file name of the new side.
        old: file name of the old side.
    """
    side = _tool("testkit.blocks").side
    sides = [("What changes", "diff", diff), (new, "python", side(diff, new=True))]
    if old is not None:
        sides.append((old, "python", side(diff, new=False)))
    return "\n".join(
        f'=== "{title}"\n\n' + textwrap.indent(f"```{language}\n{text}```\n", "    ")
        for title, language, text in sides
    )


def reference(package: str) -> str:
    """The reference page of a package: its public names, under the module that defines them."""
    name = package.replace("-", "_")
    tree = _source(f"{name}.__init__")
    homes = _tool("gen_stubs").read_table(_file(f"{name}.__init__"))
    parts = [f"# {name}\n\n{ast.get_docstring(tree)}\n"]
    for home in sorted(homes, key=lambda home: (home in LONG_LISTS, home)):
        if home.split(".")[0] != name:
            continue  # a re-export: its page is that of its home
        module = _source(home)
        alike = [public for public in homes[home] if public in _made(module)]
        parts.append(f"\n## `{home}`\n\n{ast.get_docstring(module)}\n")
        if alike:
            parts.append("\nFunctions without arguments: " + ", ".join(f"`{one}()`" for one in alike) + ".\n")
        parts += [f"\n::: {home}.{public}\n" for public in homes[home] if public not in alike]
    return "".join(parts) if homes else parts[0] + NOTHING


def _source(module: str) -> ast.Module:
    """The syntax tree of a module of the packages, which is not imported."""
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    package = module.partition(".")[0].replace("_", "-")
    place = ROOT / "packages" / package / "src" / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _tool(name: str) -> ModuleType:
    """A module of ``tools/``, which is not on the path of mkdocs."""
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _made(module: ast.Module) -> set[str]:
    """Names bound to the result of a private function of the module: functions made from one template."""
    return {
        ast.unparse(node.targets[0])
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("_")
    }
