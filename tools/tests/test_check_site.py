"""What the check of the built site counts as a problem."""

from __future__ import annotations

from pathlib import Path

import check_site

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_a_guide_that_is_found_second_or_not_at_all_is_a_miss():
    found = {query: [f"guides/{guides[0]}/"] for query, guides in check_site.EXPECTED.items()}
    assert check_site.misses(found) == []
    found["fsdp"] = ["reference/configuration/", "guides/fsdp/"]
    found["gan"] = []
    assert check_site.misses(found) == [
        "'fsdp' finds 'reference/configuration/' first, not one of fsdp",
        "'gan' finds 'nothing' first, not one of several-models",
    ]


def test_the_expected_guides_are_there():
    named = {guide for guides in check_site.EXPECTED.values() for guide in guides}
    assert {guide for guide in named if not (GUIDES / f"{guide}.md").is_file()} == set()


def test_every_guide_has_words_for_the_search():
    assert [
        page.name for page in GUIDES.glob("*.md") if not page.read_text().startswith("---\ntags: [")
    ] == []


def test_pages_that_are_too_high():
    assert check_site.too_high({"guides/a/": 6_000, "guides/b/": 6_001, "reference/c/": 12_000}) == [
        "guides/b/ is 6,001 pixels high, of at most 6,000"
    ]
