"""The pictures of the concept pages show what this library does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import concepts
import draw

ROOT = Path(__file__).parents[2]
SAME_IN_EVERY_RUN = (
    "held_tensors",
    "mesh_groups",
    "reading_samples",
    "tensor_dtypes",
    "launched_processes",
    "learning_rates",
    "device_map",
)
NAMES = [*concepts.drawings()]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "concepts").glob("*.md")}


def test_every_picture_shows_what_is_recorded():
    assert {path.stem for path in concepts.DATA.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_facts_is_as_the_tool_writes_it(name):
    path = concepts.DATA / f"{name}.json"
    assert path.read_text(encoding="utf-8") == concepts.written(concepts.facts(name))


@pytest.mark.wide(only=["held_tensors"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name == "launched_processes" else name
        for name in SAME_IN_EVERY_RUN
    ],
)
def test_the_library_does_what_is_recorded(name):
    assert concepts.recorded(name) == concepts.facts(name)


def test_a_picture_shows_the_values_of_its_facts():
    texts = draw.texts_of(concepts.PICTURES / "reading_samples.svg")
    order = [
        str(sample)
        for rank in (0, 1)
        for sample in concepts.facts("reading_samples")["options"]["default"][rank]["read"]
    ]
    assert set(order) | {"even_batches=False", "no batch"} <= set(texts)
    assert draw.texts_of(concepts.PICTURES / "tensor_dtypes.svg").count("bf16") == 2 + len(
        [
            dtype
            for run in concepts.facts("tensor_dtypes").values()
            for dtype in run.values()
            if dtype == "bfloat16"
        ]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_picture_and_says_what_is_in_it(name):
    guide = {"learning_rates": "learning-rate-schedules", "device_map": "big-models"}.get(name)
    path = ROOT / "docs" / "guides" / f"{guide}.md"
    pages = [path.read_text(encoding="utf-8")] if guide else PAGES.values()
    shown = rf"!\[([^\]]+)\]\(\.\./images/concepts/{name}\.svg\)"
    found = [re.search(shown, text) for text in pages]
    (described,) = [match[1] for match in found if match]
    assert len(described) > 100


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"index"}))
def test_a_page_is_short_and_listed(page):
    assert len(PAGES[page].split()) < 700
    assert f"({page}.md)" in PAGES["index"]
    assert f"concepts/{page}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def window(facts):
    """Gradients are reduced in the last micro-batch alone, from before its backward ends."""
    last = facts["micro_batches"] - 1
    for events in facts["ranks"]:
        backward = [event for event in events if event["kind"] == "backward"]
        reductions = [event for event in events if event["kind"] == "all-reduce"]
        assert [event["micro_batch"] for event in backward] == [*range(facts["micro_batches"])]
        assert len(reductions) == 2
        assert {event["micro_batch"] for event in reductions} == {last}
        assert backward[-1]["begin_ms"] < reductions[0]["begin_ms"] < backward[-1]["end_ms"]
        steps = [event["end_ms"] - event["begin_ms"] for event in events if event["kind"] == "step"]
        assert max(steps[:-1]) < steps[-1]


def save(facts):
    """Steps run between the call and the moment in which the folder has its name, and bytes only grow."""
    call, named = facts["save_state_ms"], facts["named_ms"]
    assert call[0] < call[1] < named
    assert [step for step in facts["steps_ms"] if call[1] <= step[0] < named]
    sizes = [size for _, size in facts["written_mb"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(facts["checkpoint_mb"], rel=0.01)
    assert "manifest.json" in facts["files"]


def stream(facts):
    """A layer is in memory when it computes, and many others are not; one stays all the time."""
    layers = len(facts["computing_ms"])
    for when, shares in facts["in_memory"]:
        assert sum(shares) < 0.75 * layers, when
    assert min(facts["in_memory_when_computed"]) == 1
    assert [layer for layer in range(layers) if all(shares[layer] == 1 for _, shares in facts["in_memory"])]
    assert [layer for layer in range(layers) if any(shares[layer] == 0 for _, shares in facts["in_memory"])]


TIMED = {"accumulation_window": window, "background_save": save, "streamed_layers": stream}


@pytest.mark.parametrize("name", TIMED)
def test_what_a_page_says_of_times_holds_in_the_record(name):
    TIMED[name](concepts.facts(name))


@pytest.mark.full
@pytest.mark.parametrize("name", TIMED)
def test_what_a_page_says_of_times_holds_in_a_new_run(name):
    TIMED[name](concepts.recorded(name))


def test_every_picture_is_recorded_in_every_test_or_by_its_times():
    assert {*SAME_IN_EVERY_RUN, *TIMED} == set(NAMES)
