"""Every code block of the documentation and of the READMEs runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit import markdown_blocks, worlds

ROOT = Path(__file__).parents[1]
# Chapters need the files of those before. tests-integration/test_tutorial.py runs them, and compares what they print.
TUTORIAL = set((ROOT / "docs" / "tutorial").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted(set((ROOT / "docs").rglob("*.md")) - TUTORIAL),
]
# Pages whose commands start many worlds: for the long run.
LONG = {
    "packages/accel-cli/README.md",
    "docs/concepts/device-mesh.md",
    "docs/concepts/processes-and-ports.md",
    "docs/concepts/samples.md",
    "docs/concepts/what-each-rank-holds.md",
    "docs/from-accelerate.md",
    "docs/from-pytorch.md",
    "docs/installation.md",
    "docs/quickstart.md",
    *(
        f"docs/guides/{guide}.md"
        for guide in (
            "as-accelerate", "checkpoint-parts", "checkpoints", "clusters", "collectives", "containers", "ddp",
            "evaluation", "fsdp", "hugging-face", "launching", "local-sgd", "memory-estimates", "multi-node", "muon",
            "other-checkpoints", "pipeline-inference", "preemption", "processes", "rehearse", "restarts",
            "several-models", "timeouts", "troubleshooting", "weights-to-an-inference-engine",
        )
    ),
}  # fmt: skip
CODE = [block for page in PAGES for block in markdown_blocks.parse(page) if block.runs]
SKIPPED = [block for block in CODE if markdown_blocks.skip_reason(block) is not None]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] if _name(page) in LONG else []


@pytest.mark.wide(
    only=["docs/index.md", "docs/guides/prove.md", "*ing/strategies.md", "*command.md", "*/plug-ins.md"]
)
@pytest.mark.parametrize("page", [pytest.param(page, id=_name(page), marks=_marks(page)) for page in PAGES])
def test_page(page, tmp_path):
    if any(block.page == page and block not in SKIPPED for block in CODE):
        worlds.run(markdown_blocks.run_page, 1, str(page), str(tmp_path), timeout=280)


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: f"{_name(block.page)}:{block.line}")
def test_block_that_cannot_run_here(block):
    pytest.skip(f"{_name(block.page)}:{block.line}: {markdown_blocks.skip_reason(block)}")
