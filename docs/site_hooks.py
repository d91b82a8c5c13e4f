"""Pages that are generated when the site is built, and what is added to the others.

Generated are the API reference by topic, the changelog, and pages of files at the root of the
repository. Diffs of scripts become tabs, pages get their weight in the search, the footer says which version they
describe, and the script that draws diagrams is served with the site. Each page is served as Markdown, too, at its
address with ``index.md``, and ``llms.txt`` lists them, for programs that read.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("accel-train", "accel-bigmodel", "accel-ckpt", "accel-state", "accel-cli")
# The weight of pages in the search, by the beginning of their path: guides come before lists and generated pages.
WEIGHTS = (
    ("reference/command", 1.0),
    ("reference/configuration", 0.1),
    ("reference/", 0.02),
    ("architecture", 0.1),
    ("extending/", 0.3),
    ("changelog", 0.05),
    ("concepts/", 0.5),
    ("benchmarks", 0.7),
    ("contributing", 0.2),
    ("licence", 0.1),
    ("examples", 0.3),
    ("from-accelerate", 0.7),
    ("differences", 0.3),
    ("index", 0.5),
    ("tutorial/", 0.4),
    ("", 2.0),
)
# What draws diagrams in the reader's browser. The theme would fetch it from the web, and where that is blocked, its own
# scripts end: then nothing is drawn, and the search does not begin.
MERMAID = "11.17.2"
_DRAWS = "javascripts/mermaid.min.js"
# A diff is to be read; what is copied is a script, from the tab beside it.
_NO_COPY = " { .no-copy }"
_DIFF = re.compile(
    r'^(?:<!-- test: old=(?P<old>\S+) -->\n)?```diff title="(?P<new>[^"]+)"\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the topics of the reference in the navigation, and say version and licence in the footer.

    Pages link to their source where the address of the repository is known.
    """
    reference = _tool("reference_pages")
    _section(config.nav, "Reference")[2:2] = reference.navigation(reference.read_topics())
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    config.copyright = f"accel {version('accel-train')} · Apache-2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    pages = {
        "changelog.md": changelog(),
        "contributing.md": _moved(_text("CONTRIBUTING.md")),
        "licence.md": f"# Licence\n\n```text\n{_text('LICENSE')}```\n",
    }
    reference = _tool("reference_pages")
    pages |= reference.pages(reference.read_topics())
    if (script := mermaid_script()) is not None:
        files.append(File.generated(config, _DRAWS, abs_src_path=str(script)))
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each diff of a script into tabs, so that the script can be read and copied whole; weigh the page."""
    path = page.file.src_uri
    weight = next(weight for start, weight in WEIGHTS if path.startswith(start))
    page.meta.setdefault("search", {}).setdefault("boost", weight)
    return _DIFF.sub(lambda match: tabs(match["text"], match["new"], match["old"]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Load the script that draws diagrams where there are some."""
    from mkdocs.utils import get_relative_url

    if 'class="mermaid"' not in html or files.get_file_from_path(_DRAWS) is None:
        return html
    return f'{html}<script src="{get_relative_url(_DRAWS, page.url)}"></script>'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Write the page as Markdown, too, unless it is rendered from the source."""
    if page.markdown is not None and "\n::: " not in page.markdown:
        target = Path(config.site_dir) / page.url / "index.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.markdown, encoding="utf-8")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """List the pages that are served as Markdown."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    for page in sorted(site.rglob("index.md")):
        title = next((line[2:] for line in page.read_text("utf-8").splitlines() if line[:2] == "# "), "accel")
        lines.append(f"- [{title}]({config.site_url or '/'}{page.relative_to(site).as_posix()})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def mermaid_script() -> Path | None:
    """The script of mermaid, which npm fetches once; None if it cannot, and says that pages need the web then."""
    folder = Path(os.environ.get("ACCEL_MERMAID_FOLDER", Path.home() / f".cache/accel/mermaid-{MERMAID}"))
    script = folder / "node_modules/mermaid/dist/mermaid.min.js"
    if not script.is_file():
        quiet = ("--no-fund", "--no-audit", "--no-save", "--ignore-scripts", "--silent")
        command = [
            shutil.which("npm") or "npm",
            "install",
            *quiet,
            "--prefix",
            str(folder),
            f"mermaid@{MERMAID}",
        ]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"site: npm did not fetch mermaid ({error}): pages with diagrams, and their search, need the web"
            )
            return None
    return script


def version(package: str) -> str:
    """The version that a package's source states."""
    about = _text(f"packages/{package}/src/{package.replace('-', '_')}/__about__.py")
    match = re.search(r'__version__ = "([^"]+)"', about)
    if match is None:
        raise ValueError(f"__about__.py of {package} states no version, which the site shows")
    return match[1]


def changelog() -> str:
    """The changelogs of the packages, one a tab, with what waits for the next release."""
    kinds = (
        ("security", "Security"), ("removed", "Removed"), ("changed", "Changed"),
        ("added", "Added"), ("fixed", "Fixed"),
    )  # fmt: skip
    parts = ["---\nhide: [toc]\n---\n\n# Changelog\n"]  # the table of contents would not say of which package
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        texts = []
        for kind, title in kinds:
            fragments = sorted((folder / "changelog.d").glob(f"*.{kind}.md"))
            lines = [f"- {fragment.read_text(encoding='utf-8').strip()}\n" for fragment in fragments]
            if lines:
                texts.append(f"\n## {title}, not released yet {{: #{package}-{kind} }}\n\n{''.join(lines)}")
        texts.append(_text(f"packages/{package}/CHANGELOG.md").partition("release notes start -->")[2])
        text = textwrap.indent("".join(texts), "    ")
        parts.append(f'\n=== "{package} {version(package)}"\n{text}')
    return "".join(parts)


def tabs(diff: str, new: str, old: str | None) -> str:
    """A diff, its new side and, if it has a name, its old side.

    Args:
        diff: lines after ``+``, ``-`` or a space.
        new: file name of the new side.
        old: file name of the old side.
    """
    side = _tool("testkit.markdown_blocks").side
    sides = [("What changes", "diff", diff), (new, "python", side(diff, new=True))]
    if old is not None:
        sides.append((old, "python", side(diff, new=False)))
    return "\n".join(
        f'=== "{title}"\n\n'
        + textwrap.indent(f"```{language}{_NO_COPY if language == 'diff' else ''}\n{text}```\n", "    ")
        for title, language, text in sides
    )


def _section(nav: list[Any], title: str) -> list[Any]:
    """The entries of a section of the navigation."""
    return next(entry[title] for entry in nav if isinstance(entry, dict) and title in entry)


def _moved(text: str) -> str:
    """A page of the root, whose links now begin in ``docs/``."""
    return text.replace("](docs/", "](")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _tool(name: str) -> ModuleType:
    """A module of ``tools/``, which is not on the path of mkdocs."""
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
