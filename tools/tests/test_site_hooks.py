"""The pages that the site's hooks make."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from testkit import markdown_blocks

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
    shown = SimpleNamespace(file=SimpleNamespace(src_uri="guides/page.md"), meta={})
    page.write_text(hooks.on_page_markdown(text, shown, None, None))
    assert [line for line in page.read_text().splitlines() if line[:1] not in ("", " ")] == [
        "a",
        '=== "What changes"',
        '=== "new.py"',
        '=== "old.py"',
        "b",
    ]
    assert "```diff { .no-copy }" in page.read_text()
    change, new, old = markdown_blocks.parse(page)
    assert (change.language, change.text) == ("diff", " import os\n\n-x = 1\n+if os:\n+    x = 2\n")
    assert (new.language, new.text) == ("python", "import os\n\nif os:\n    x = 2\n")
    assert (old.language, old.text) == ("python", "import os\n\nx = 1\n")


@pytest.mark.parametrize(
    ("path", "meta", "weight"),
    [
        ("guides/fsdp.md", {}, 2.0),
        ("reference/accelerator/accelerator.md", {}, 0.02),
        ("reference/command.md", {}, 1.0),
        ("guides/fsdp.md", {"search": {"boost": 5}}, 5),
    ],
)
def test_guides_weigh_more_in_the_search_than_the_reference(hooks, path, meta, weight):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta=meta)
    assert hooks.on_page_markdown("text", page, None, None) == "text"
    assert page.meta["search"]["boost"] == weight


def test_pages_made_of_files_at_the_root(hooks):
    changes = hooks.changelog()
    for package in hooks.PACKAGES:
        assert f'=== "{package} {hooks.version(package)}"\n' in changes


def test_pages_are_served_as_markdown_and_listed(hooks, tmp_path):
    config = SimpleNamespace(
        site_dir=str(tmp_path), site_name="accel", site_description="About.", site_url="/"
    )
    for url, text in (("guides/fsdp/", "# FSDP\n\nText."), ("reference/a/", "# A\n\n::: accel_train.a")):
        assert hooks.on_post_page("<html>", SimpleNamespace(markdown=text, url=url), config) == "<html>"
    hooks.on_post_build(config)
    assert (tmp_path / "guides/fsdp/index.md").read_text() == "# FSDP\n\nText."
    assert (tmp_path / "llms.txt").read_text() == "# accel\n\n> About.\n\n- [FSDP](/guides/fsdp/index.md)\n"
