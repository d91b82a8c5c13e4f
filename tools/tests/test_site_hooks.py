"""The pages that the site's hooks make."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from testkit import blocks

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_diff_stands_beside_the_script_it_leads_to_and_the_one_it_comes_from(hooks, tmp_path):
    text = 'a\n\n<!-- test: old=old.py -->\n```diff title="new.py"\n import os\n\n-x = 1\n'
    text += "+if os:\n+    x = 2\n```\n\nb\n"
    page = tmp_path / "page.md"
    page.write_text(hooks.on_page_markdown(text, None, None, None))
    assert [line for line in page.read_text().splitlines() if line[:1] not in ("", " ")] == [
        "a",
        '=== "What changes"',
        '=== "new.py"',
        '=== "old.py"',
        "b",
    ]
    change, new, old = blocks.parse(page)
    assert (change.language, change.text) == ("diff", " import os\n\n-x = 1\n+if os:\n+    x = 2\n")
    assert (new.language, new.text) == ("python", "import os\n\nif os:\n    x = 2\n")
    assert (old.language, old.text) == ("python", "import os\n\nx = 1\n")


def test_every_package_with_an_api_lists_all_of_it(hooks):
    pages = {package: hooks.reference(package) for package in hooks.PACKAGES}
    everywhere = "".join(pages.values())
    for package, page in pages.items():
        module = __import__(package.replace("-", "_"))
        own = [name for name in module.__all__ if getattr(module, name, None) is not None]
        missing = [name for name in own if not _lists(page, name)]
        # What a package re-exports from packages below is on their pages.
        assert [name for name in missing if not _lists(everywhere, name)] == []
        assert package in ("accel-bigmodel", "accel-train") or not missing, package
        assert page.rstrip().endswith("yet.") == (not module.__all__)


def _lists(page, name):
    return f".{name}\n" in page or f"`{name}()`" in page
