"""Pages name what their programs need beside an installation of the five packages."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from testkit import markdown_blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "packages").glob("*/README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "lomo_optim": "lomo-optim", "yaml": "pyyaml"}
"""Names of imports that differ from those of their distributions."""
OTHERS = {
    "accelerate",  # pages for its users, and programs to be migrated
    "testkit",  # a folder of the clone
}


def installed_with_ours() -> set[str]:
    """The distributions that the five packages require, and the packages themselves."""
    found = set()
    for file in (ROOT / "packages").glob("*/pyproject.toml"):
        listed = re.search(r"^dependencies = \[\n(.*?)^\]", file.read_text(), re.MULTILINE | re.DOTALL)
        found |= {Requirement(text).name.lower() for text in re.findall(r'"([^"]+)"', listed[1])}
        found.add(file.parent.name)
    return found | {"setuptools"}


def imported(text: str) -> set[str]:
    """The top-level names of modules that a program imports, also inside functions; none of a part of a program."""
    found = set()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def missing(page: Path) -> set[str]:
    """Distributions that programs of a page need and that neither an installation brings nor the page names."""
    found = set()
    for block in markdown_blocks.parse(page):
        if block.language == "python":
            found |= imported(block.text)
    ours = installed_with_ours()
    own = {path.stem for path in (ROOT / "docs" / "examples").rglob("*.py")}
    own |= set(re.findall(r'title="(\w+)(?:/\w+)*\.py"', page.read_text()))  # what the page itself writes
    named = " ".join(re.findall(r"pip install ([^`\n]+)", page.read_text())).split()
    return {
        distribution
        for name in found - own - OTHERS - set(sys.stdlib_module_names)
        if (distribution := DISTRIBUTIONS.get(name, name.replace("_", "-"))) not in {*ours, *named}
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_programs_need(page):
    assert missing(page) == set()


def test_what_is_missing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch, numpy, sklearn.metrics\nfrom peft import LoraConfig\n```\n")
    assert missing(page) == {"scikit-learn", "peft"}
    page.write_text(page.read_text() + "\nNeeds `pip install scikit-learn peft`.\n")
    assert missing(page) == set()
