"""What the pages on architecture, extending and files name exists, tables and diagrams are complete and true, and the
example of a strategy trains."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import generated
import import_diagrams
import weight
from accel_bigmodel.planning.footprints import registry as footprints
from accel_state.config import strategies
from testkit import markdown_blocks, worlds
from testkit.conformance import Case, Record, train

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *(DOCS / f"{name}.md" for name in ("architecture", "extending", "format")),
    *sorted((DOCS / "architecture").glob("*.md")),
    *sorted((DOCS / "extending").glob("*.md")),
)
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", PROSE)
SOURCES = sorted(
    path
    for pattern in (
        "packages/*/src/**/*.py",
        "tools/**/*.py",
        "tests-integration/**/*.py",
        "docs/examples/**/*.py",
    )
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
)


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose header begins with this cell."""
    lines = TEXT.splitlines()
    starts = [
        number
        for number, line in enumerate(lines)
        if line.startswith(f"| {first} |") and lines[number + 1].startswith("|---")
    ]
    assert len(starts) == 1, f"one table begins with {first}"
    table = lines[starts[0] + 2 :]
    end = next((number for number, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:end]]


def files_in(folder: str) -> Path:
    """The folder of a package that a path such as ``accel_train/data/`` means."""
    package = folder.partition("/")[0].replace("_", "-")
    return ROOT / "packages" / package / "src" / folder


def named_in(folder: str, cell: str) -> set[Path]:
    """The modules that a cell names, in the folder of its row."""
    return {files_in(folder) / name for name in re.findall(r"`([\w/]+\.py)`", cell)}


def test_every_path_exists():
    paths = [span for span in SPANS if re.fullmatch(r"[\w./-]*[\w-]\.(?:py|md|toml)|[\w./-]+/", span)]
    names = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    folders = {f"{Path(name).parent.as_posix()}/" for name in names}
    missing = [
        path
        for path in paths
        if not (ROOT / path).exists()
        and not any(f"/{name}".endswith(f"/{path}") for name in (*names, *folders))
    ]
    assert len(paths) > 150
    assert missing == []


def test_the_tables_of_folders_name_their_modules_and_all_of_them():
    checked = set()
    for package in import_diagrams.PACKAGES:
        above = ""
        for folder, _, modules in rows(f"`{package}/`"):
            above = above if folder == "the same folder" else folder.strip("`")
            checked |= named_in(above, modules)
    assert [path for path in checked if not path.is_file()] == []
    there = {
        path
        for path in ROOT.glob("packages/*/src/**/*.py")
        # Of plugins and sections the page shows examples.
        if not path.name.startswith("_") and path.parent.name not in ("plugins", "sections")
    }
    # The alias has modules for clients of Accelerate; the page names the folder.
    assert {path for path in there - checked if "as_accelerate" not in path.parts} == set()


def test_every_folder_has_a_row():
    there = {
        f"{path.parent.relative_to(path.parents[2]).as_posix()}/"
        for path in ROOT.glob("packages/*/src/*/*/__init__.py")
    }
    assert {folder for folder in there if f"`{folder}`" not in TEXT} == set()


def test_every_dotted_name_of_a_package_can_be_imported():
    names = {name for span in SPANS for name in re.findall(r"\baccel_\w+(?:\.\w+)+", span) if "/" not in span}
    no_modules = {strategies.GROUP, footprints.GROUP, "accel_state.launchers", "accel_train.state_parts"}
    assert no_modules | {"accel_train.strategies", "accel_train.precision", "accel_cli.commands"} < names
    for name in sorted(names - no_modules):
        found: Any = importlib.import_module(name.partition(".")[0])
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


def test_every_identifier_occurs_in_the_sources():
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    texts += [
        block.text
        for block in (block for page in PAGES for block in markdown_blocks.parse(page))
        if block.file is not None
    ]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    used = {
        word
        for span in SPANS
        if not re.match(r"(?:pip|python|lint-imports)\b|.*(?:/|\.py|\.md)$", span)
        for word in re.findall(r"[A-Za-z_]\w+", span)
    }
    assert len(used) > 280
    assert used - words == set()


def test_every_verb_and_capability_has_a_row():
    from accel_train import Capabilities, StateAdapter, Strategy
    from accel_train.strategies.window_gradients import WindowGradients

    for kind in (Strategy, StateAdapter, WindowGradients):
        verbs = [row[0].strip("`") for row in rows(f"method of `{kind.__name__}`")]
        methods = [
            name
            for name, value in vars(kind).items()
            if not name.startswith("_") and isinstance(value, FunctionType | classmethod | property)
        ]
        assert sorted(verbs) == sorted(methods)
    assert [row[0].strip("`") for row in rows("capability")] == [
        field.name for field in dataclasses.fields(Capabilities)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_inside_the_page_lead_to_headings(page):
    text = page.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) - headings == set()


def test_the_reading_order_is_short():
    found = rows("way")
    assert [row[0] for row in found] == ["a step under ddp", "a batch", "a save", "a launch"]
    for way, files, told in found:
        paths = [files_in(path) for path in re.findall(r"`([\w/]+\.py)`", files)]
        lines = sum(weight.code_lines(path.read_text("utf-8")) for path in paths)
        most = int(told.replace(",", ""))
        assert len(paths) <= 8, way
        assert most - 250 < lines <= most <= 2_500, f"{way}: {lines} lines"


# The diagrams


def imports_by_text(package: str) -> set[tuple[str, str]]:
    """What the lines of the sources import, found without a graph of imports: as a second opinion."""
    pairs = set()
    for path in files_in(package).rglob("*.py"):
        name = path.relative_to(files_in(package)).parts[0].removesuffix(".py")
        found = re.findall(
            rf"^ *(?:from|import) {package}(?:\.| import )(\w+)", path.read_text("utf-8"), re.MULTILINE
        )
        pairs |= {(name, other) for other in found if other != name}
    return {pair for pair in pairs if not any(name.startswith("__") for name in pair)}


def on_the_page(package: str) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """The title of each box of a diagram, and its arrows."""
    text = TEXT.partition(f"<!-- imports of {package} -->\n")[2].partition("\n```\n")[0]
    boxes = dict(re.findall(r'^  (\w+)\["<b>(.+?)</b>', text, re.MULTILINE))
    return boxes, set(re.findall(r"^  (\w+) --> (\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize("package", import_diagrams.PACKAGES)
def test_the_arrows_of_a_diagram_are_the_imports_of_its_folders(package):
    """Each arrow is an import; each import is an arrow, or leads the same way along several arrows."""
    boxes, arrows = on_the_page(package)
    box_of = {name.rstrip("/"): box for box, title in boxes.items() for name in title.split(", ")}
    imported = {(box_of[a], box_of[b]) for a, b in imports_by_text(package)}

    def ways(box: str) -> set[str]:
        return {box}.union(*(ways(below) for above, below in arrows if above == box))

    assert arrows <= imported
    assert {(above, below) for above, below in imported if below not in ways(above)} == set()
    for above, below in arrows:
        others = {other for start, other in arrows if start == above} - {below}
        assert not any(below in ways(other) for other in others), (above, below)


@pytest.mark.parametrize("package", import_diagrams.PACKAGES)
def test_a_diagram_has_every_folder_and_module_once(package):
    there = {path.stem for path in files_in(package).glob("*.py")} | {
        f"{path.name}/" for path in files_in(package).iterdir() if path.is_dir()
    }
    boxes, _ = on_the_page(package)
    names = [name for title in boxes.values() for name in title.split(", ")]
    assert sorted(names) == sorted(name for name in there if not name.startswith("__"))


def test_the_diagram_of_packages_has_those_that_depend_on_each_other():
    boxes, arrows = on_the_page("packages")
    assert sorted(boxes.values()) == sorted(path.name for path in (ROOT / "packages").iterdir())
    assert {(boxes[above], boxes[below]) for above, below in arrows} == {
        ("accel-cli", "accel-train"),
        ("accel-cli", "accel-bigmodel"),
        ("accel-train", "accel-ckpt"),
        ("accel-bigmodel", "accel-ckpt"),
        ("accel-ckpt", "accel-state"),
    }


def test_a_diagram_that_is_out_of_date_is_named_and_written_again(tmp_path, monkeypatch, capsys):
    assert import_diagrams.main(["--check"]) == 0
    page = tmp_path / "page.md"
    page.write_text("a\n\n<!-- imports of accel_ckpt -->\n```mermaid\n```\n\nb\n")
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(import_diagrams, "PAGES", (page,))
    monkeypatch.setattr(import_diagrams, "mermaid", lambda package: f"```mermaid\n{package}\n```\n")
    assert import_diagrams.main(["--check"]) == 1
    assert capsys.readouterr().out == "page.md: out of date; run: python tools/import_diagrams.py\n"
    assert import_diagrams.main([]) == 0
    assert page.read_text() == "a\n\n<!-- imports of accel_ckpt -->\n```mermaid\naccel_ckpt\n```\n\nb\n"
    assert import_diagrams.main(["--check"]) == 0


def test_the_declaration_on_the_page_is_that_of_the_package():
    page = DOCS / "extending" / "launched-strategies.md"
    shown = {block.file: block.text for block in markdown_blocks.parse(page) if block.file is not None}
    module = ROOT / "docs/examples/zero_redundancy/zero_redundancy/launchable.py"
    assert shown["launchable.py"].strip() == module.read_text(encoding="utf-8").strip()


# The examples


def test_the_tracker_on_the_page_writes_what_is_logged(tmp_path, monkeypatch):
    from accel_train import Accelerator

    page = DOCS / "extending" / "precisions-and-trackers.md"
    text = next(block.text for block in markdown_blocks.parse(page) if block.file == "json_lines.py")
    (tmp_path / "json_lines.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    tracker = importlib.import_module("json_lines").JSONLines("run", tmp_path / "logs")
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run", config={"lr": 0.1, "dtype": torch.float32})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    accelerator.end_training()
    lines = (tmp_path / "logs" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": None, "config": {"lr": 0.1, "dtype": "torch.float32"}},
        {"step": 3, "loss": 0.5},
    ]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example's module and its entry point, as pip installs them."""
    files = {
        block.file: block.text
        for block in markdown_blocks.parse(DOCS / "extending" / "strategies.md")
        if block.file is not None
    }
    (tmp_path / "averaging.py").write_text(files["averaging.py"])
    project = tomllib.loads(files["pyproject.toml"])["project"]
    about = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("averaging", None)


def check_equal(records: list[Record], expected: list[Record]) -> None:
    for here, there in zip(records, expected, strict=True):
        assert here.batch == there.batch
        assert here.windows == there.windows
        assert len(here.weights) == len(there.weights) > 0
        torch.testing.assert_close(here.norms, there.norms, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(here.weights, there.weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("items", [False, True])
def test_the_example_trains_as_ddp_does(installed, items):
    """5 micro-batches in windows of 3: the second window of an epoch is short."""
    case = Case("averaging", accumulation=3, items=items, clip_norm=0.3)
    records = worlds.run(train, 2, case)
    check_equal(records, worlds.run(train, 2, dataclasses.replace(case, strategy="ddp")))
    first, last = records[0].weights[0], records[0].weights[-1]
    assert not torch.equal(first["head.weight"], last["head.weight"])


def gradients(dtype: torch.dtype | None) -> tuple[str, float]:
    """The strategy that the type of the example's plugin selects, and a gradient that differs between ranks."""
    import averaging

    from accel_train import Accelerator

    accelerator = Accelerator(strategy=averaging.AveragingPlugin(dtype=dtype))
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.tensor([[1.0 + accelerator.process_index / 1000]])).sum())
    return accelerator.strategy.name, model.weight.grad.item()


def test_the_type_of_the_plugin_selects_the_example_with_its_options(installed):
    assert worlds.run(gradients, 2, None) == [("averaging", pytest.approx(1.0005, abs=1e-7))] * 2
    assert worlds.run(gradients, 2, torch.bfloat16) == [("averaging", 1.0)] * 2


@pytest.mark.full
def test_the_conformance_suite_has_the_example_among_its_members(installed):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests-integration/conformance",
        "--collect-only",
        "-q",
        "-k",
        "averaging",
    ]
    path = os.pathsep.join(str(folder) for folder in (installed, *sys.path) if folder)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for test in (
        "test_training[1-averaging-2]",
        "test_training[3-averaging-4]",
        "test_mobility[averaging-2]",
    ):
        assert test in done.stdout
