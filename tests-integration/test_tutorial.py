"""The tutorial's scripts are those of its pages, and print what the pages show."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit import markdown_blocks, worlds

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted((DOCS / "examples" / "tutorial").glob("[1-7]_*.py"))
BEFORE = [*SCRIPTS[:4], SCRIPTS[3], SCRIPTS[5]]  # chapter 6 continues with the script of chapter 4
CHAPTERS = (
    "one-process", "two-ranks", "precision-and-accumulation", "evaluation", "fsdp2", "resume", "answer"
)  # fmt: skip
NUMBER = re.compile(r"\d+(?= of \d+ right)|(?<=loss )\d+\.\d+")
LAUNCHED = "[rank 0] "


def _page(chapter: str) -> Path:
    return DOCS / "tutorial" / f"{chapter}.md"


def _losses(text: str) -> dict[int, str]:
    """The losses of an output by step, as printed."""
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss (\d\.\d{3})", text)}


def _shown(chapter: str) -> list[str]:
    """The outputs on a page, in order."""
    return [block.text for block in markdown_blocks.parse(_page(chapter)) if block.language == "text"]


# -- Running the commands of a page


def really(command: str, folder: Path, status: int = 0) -> str:
    """What bash prints for a command that ends with this status."""
    environ = {**os.environ, **markdown_blocks.commands(folder)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, timeout=240, check=False,
        stderr=subprocess.DEVNULL if "accel prove" in command else subprocess.STDOUT,  # its progress
    )  # fmt: skip
    assert done.returncode == status, f"{command}\n{done.stdout}"
    return worlds.without_gloo_notes(done.stdout)


def forked(command: str, folder: Path, status: int = 0) -> str | None:
    """What the same command prints when its processes are forked, which saves the imports; other commands run.

    None for a command that is left to the long tests: processors without arithmetic for bf16 are slow at it.
    """
    parts = shlex.split(command, comments=True)
    if parts[0] == "python":
        return _in_world(parts[1:], 1, {}, folder, status)
    if parts[:2] != ["accel", "launch"]:
        return really(command, folder, status)
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--use_fsdp", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args(parts[2:])
    if asked.mixed_precision != "no":
        return None
    environ = {
        "ACCELERATE_USE_FSDP": str(asked.use_fsdp).lower(),
        "ACCELERATE_RESUME": str(asked.resume).lower(),
    }
    printed = _in_world(asked.script, asked.num_processes, environ, folder, status)
    return "".join(f"{LAUNCHED}{line}\n" for line in printed.splitlines())


def _in_world(words: list[str], world: int, environ: dict[str, str], folder: Path, status: int) -> str:
    # Which rank is missed first, the killed one or the one that waits for it, is open.
    with pytest.raises(worlds.RankError) if status else contextlib.nullcontext():
        worlds.run(_script, world, words, str(folder), environ=environ, timeout=200)
    outputs = [folder / f".printed-{rank}" for rank in range(world)]
    printed = [output.read_text(encoding="utf-8") for output in outputs]
    assert printed[1:] == [""] * (world - 1), "the other ranks print nothing"
    return printed[0]


def _script(words: list[str], folder: str) -> None:
    """Run a script as ``__main__`` in this rank; what it prints is in a file, also if it is killed."""
    os.chdir(folder)
    sys.argv = words
    sys.path.insert(0, folder)
    output = Path(f".printed-{os.environ.get('RANK', '0')}")
    with output.open("w", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        runpy.run_path(words[0], run_name="__main__")


# -- Comparing


def agree(shown: str, printed: str, *, only_ranks: bool) -> None:
    """Compare an output with the one on a page.

    Losses may differ by 2% or 0.005, and numbers of right answers by ten, because processors round differently; where
    the page says that all are right, all must be. A line ``…`` of a page is for lines that it leaves out.

    Args:
        only_ranks: leave out what the launcher prints itself.
    """
    expected = [line for line in shown.splitlines() if not (only_ranks and line.startswith("accel: "))]
    lines = printed.splitlines()
    if "…" in expected:
        kept = [line for line in expected if line != "…"]
        templates = {NUMBER.sub("#", line) for line in kept}
        lines = [line for line in lines if NUMBER.sub("#", line) in templates]
        expected = kept
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in expected], printed
    for line, like in zip(lines, expected, strict=True):
        for got, wanted in zip(NUMBER.finditer(line), NUMBER.finditer(like), strict=True):
            total = re.match(r" of (\d+) right", like[wanted.end() :])
            if total is None:
                assert float(got[0]) == pytest.approx(float(wanted[0]), rel=0.02, abs=0.005), line
            else:
                slack = 0 if total[1] == wanted[0] else 10
                assert abs(int(got[0]) - int(wanted[0])) <= slack, line


def follow(chapter: str, folder: Path, run: Callable[[str, Path, int], str | None]) -> None:
    """Do what a page says: write its files, run its commands, and compare what they print."""
    (folder / "dates.py").write_text((DOCS / "examples/tutorial/dates.py").read_text(encoding="utf-8"))
    printed: list[str | None] = []
    for block in markdown_blocks.parse(_page(chapter)):
        if block.language == "bash":
            status = int(block.marks.get("exits", "0"))
            printed = [run(command, folder, status) for command in block.text.splitlines()]
        elif block.language == "text" and block.file is None:
            if None not in printed:
                agree(block.text, "".join(map(str, printed)), only_ranks=run is forked)
        elif block.file is not None and block.language != "text":
            text = markdown_blocks.side(block.text, new=True) if block.language == "diff" else block.text
            (folder / block.file).write_text(text, encoding="utf-8")
        else:
            assert not block.runs, f"{block.place}: this block is not run"


@pytest.mark.wide(but=["one-process-forked"])
@pytest.mark.parametrize(
    "run", [forked, pytest.param(really, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("chapters", [*([chapter] for chapter in CHAPTERS[:5]), CHAPTERS[5:]], ids="-".join)
def test_each_command_prints_what_the_page_shows(chapters, run, tmp_path):
    for chapter in chapters:
        follow(chapter, tmp_path, run)


@pytest.mark.full
def test_the_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path):
    command = "accel launch --cpu --num_processes 2"
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        for script, target in (("dates.py", "dates.py"), (SCRIPTS[5].name, "train.py")):
            shutil.copy(DOCS / "examples" / "tutorial" / script, tmp_path / name / target)
    forked(f"{command} train.py", tmp_path / "straight")
    forked(f"{command} train.py --kill_at 47", tmp_path / "killed", 137)
    forked(f"{command} --resume train.py", tmp_path / "killed")
    for file in (
        "model.safetensors",
        "state.safetensors",
    ):  # of step 100: weights, and the optimizer's averages
        straight, resumed = (
            (tmp_path / name / "dates/checkpoints/checkpoint_4" / file).read_bytes()
            for name in ("straight", "killed")
        )
        assert straight == resumed, file


# -- What the pages say about each other


@pytest.mark.parametrize(("chapter", "old", "new"), [*zip(CHAPTERS[1:], BEFORE, SCRIPTS[1:], strict=True)])
def test_a_page_shows_what_changes_in_the_script(chapter, old, new):
    diffs = [block for block in markdown_blocks.parse(_page(chapter)) if block.language == "diff"]
    assert len(diffs) == 1
    assert diffs[0].file == "train.py"
    how = f"take the lines of: diff -U999 {old.name} {new.name} | tail -n +4"
    assert markdown_blocks.side(diffs[0].text, new=False) == old.read_text(encoding="utf-8"), how
    assert markdown_blocks.side(diffs[0].text, new=True) == new.read_text(encoding="utf-8"), how


def test_the_pages_show_the_same_losses_in_all_chapters():
    whole = _losses(_shown("one-process")[1])
    assert len(whole) == 10
    assert _losses(_shown("two-ranks")[0]) == whole
    assert _losses(_shown("precision-and-accumulation")[0]) == whole
    assert _losses(_shown("evaluation")[0]) == whole
    assert _losses(_shown("fsdp2")[1]) == whole
    killed, _, resumed = map(_losses, _shown("resume"))
    assert (max(killed), min(resumed)) == (40, 50)
    assert killed | resumed == whole
    assert _losses(_shown("precision-and-accumulation")[1]).keys() == whole.keys()


def test_what_is_wrong_on_a_page_is_found():
    page = "step  30  loss 0.641\nepoch 2: 362 of 501 right\n"
    agree(page, page.replace("0.641", "0.645").replace("362", "359"), only_ranks=False)
    agree("01.12.1999 = 1999-12-01", "01.12.1999 = 1999-12-01", only_ranks=False)
    with pytest.raises(AssertionError):
        agree("01.12.1999 = 1999-12-01", "01.13.1999 = 1999-12-01", only_ranks=False)
    for wrong in (page.replace("0.641", "0.741"), page.replace("362", "300"), page.replace("501", "512"), ""):
        with pytest.raises(AssertionError):
            agree(page, wrong, only_ranks=False)
    with pytest.raises(AssertionError):
        agree("epoch 4: 501 of 501 right", "epoch 4: 500 of 501 right", only_ranks=False)
