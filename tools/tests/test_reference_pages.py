"""Every public name is on a page of the reference, under a topic."""

from __future__ import annotations

import importlib

import pytest

import reference_pages


@pytest.fixture(scope="module")
def topics():
    return reference_pages.read_topics()


def test_every_public_name_is_on_one_page(topics):
    placed = [name for topic in topics for page in topic.pages for name in page.names]
    assert len(placed) == len(set(placed))
    assert set(placed) == {
        (home, name) for home, names in reference_pages.public_names().items() for name in names
    }
    # What a package re-exports from packages below is in their modules.
    everywhere = {name for _, name in placed}
    for package in reference_pages.PACKAGES:
        module = importlib.import_module(package)
        assert {name for name in module.__all__ if getattr(module, name, None) is not None} <= everywhere


def test_every_member_of_a_class_is_on_one_of_its_pages(topics):
    owners = {page.owner for topic in topics for page in topic.pages} - {None}
    assert owners
    for owner in owners:
        placed = [
            name for topic in topics for page in topic.pages if page.owner == owner for name in page.members
        ]
        assert sorted(placed) == sorted(reference_pages.public_members(*owner))
        assert all(reference_pages.public_members(*owner).values())


@pytest.mark.wide
def test_every_page_has_a_place_in_the_navigation(topics):
    sections = [*reference_pages.navigation(topics)]
    named = []
    for section in sections:
        for value in section.values():
            for entry in value if isinstance(value, list) else [value]:
                named += entry.values() if isinstance(entry, dict) else [entry]
    assert sorted(named) == sorted(reference_pages.pages(topics))


def test_an_index_links_to_the_sections_of_its_pages(topics):
    made = reference_pages.pages(topics)
    for topic in topics:
        for page in topic.pages:
            for home, name in page.names:
                documented = f"::: {home}.{name}\n" in f"{made[page.path]}\n"
                anchor = f"{page.path.rpartition('/')[2]}#{home}.{name}"
                assert documented == (f"[`{name}`]({anchor})" in made[topic.path])
                assert documented or f"`{name}()`" in made[page.path]


def test_what_a_documented_base_class_brings_is_said_only_there(topics):
    made = "".join(f"{page}\n" for page in reference_pages.pages(topics).values())
    without = "    options:\n      inherited_members: false\n"
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        assert f"::: accel_train.data.{name}\n{without}" in made
    # Its base classes have no sections, and it has one for everything of its own.
    for name in ("data.PreparedLoader", "accelerator.Accelerator"):
        assert f"::: accel_train.{name}\n" in made
        assert f"::: accel_train.{name}\n{without}" not in made


def test_what_is_said_of_a_name():
    summary = reference_pages.summary
    assert summary("accel_train.accelerator", "Accelerator").startswith("Runs a PyTorch training loop")
    assert summary("accel_train.data", "BatchSamplerShard") == "Another name of `ShardedBatchSampler`."
    assert summary("accel_state.constants", "MODEL_NAME") == ""


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("accel_train.accelerator.Acelerator", "accel_train.accelerator.Acelerator is neither a module"),
        ("accel_train.nowhere", "accel_train.nowhere is neither a module"),
        ("accel_train.errors", "names accel_train.errors more than once"),
    ],
)
def test_an_entry_that_names_nothing_new(tmp_path, entry, words):
    path = tmp_path / "topics.toml"
    path.write_text(
        '[[topic]]\ntitle = "T"\nfolder = "t"\nabout = "a"\n[[topic.page]]\ntitle = "P"\n'
        f'from = ["accel_train.errors", "{entry}"]\n'
    )
    with pytest.raises(ValueError, match=words):
        reference_pages.read_topics(path)
