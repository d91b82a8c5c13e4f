"""The acceptance of what needs an accelerator: its checks with small sizes on the CPU, and what runs them."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from gpu import acceptance
from gpu.figures import Figure, NotRunError, Run
from gpu.registry import CHECKS, ROOT, Check, marked_files
from gpu.runner import FAILED, MEASURED, NOT_RUN, OK, Row
from gpu.stable_diffusion import PARAMETERS, VAE, TextEncoder, UNet
from testkit import worlds

MODULE = """
import os, subprocess, sys, time
from gpu.figures import Figure, NotRunError

def good(run, word=""):
    yield run.exact("answer", 42, 42, "things", word)
    yield run.at_most("seconds", 9, 5)

def bad(run):
    yield run.exact("answer", 41, 42)

def raises(run):
    yield Figure("before", 1)
    raise ValueError("the reason\\nand details")

def crashes(run):
    yield Figure("before", 1)
    os.kill(os.getpid(), 11)

def leaves(run):
    os._exit(3)

def hangs(run):
    yield Figure("before", 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (run.folder.parents[1] / "pid").write_text(str(child.pid))
    time.sleep(600)

def lacks(run):
    raise NotRunError("there is no moon")
    yield

def imports(run):
    import a_package_that_is_not_there
    yield

def imports_own(run):
    import accel_missing
    yield

def nothing(run):
    return iter(())

def nan(run):
    yield run.within("error", float("nan"), 1)

def writes(run):
    print("seen by those who look")
    yield Figure("environment", 0, os.environ.get("ACCELERATE_USE_CPU", "none"))
    assert not list(run.folder.iterdir())

def sleeps(run):
    time.sleep(0.3)
    yield Figure("began", time.monotonic())
"""


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """Checks by the names of the functions above."""
    (tmp_path / "checks_of_this_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(*names, **options):
        return [Check(name, f"checks_of_this_test:{name}", **options) for name in names]

    return make


@pytest.fixture
def accept(tmp_path, capsys):
    """Runs checks; returns the exit code, what was printed, and the rows as JSON by check."""

    def run(checks, *argv):
        path = tmp_path / "rows.json"
        code = acceptance.main(["--cpu", "--scale", "small", "--json", str(path), *argv], checks)
        rows = {}
        for row in json.loads(path.read_text())["rows"]:
            rows.setdefault(row["check"], []).append(row)
        return code, capsys.readouterr().out, rows

    return run


def test_one_table_of_what_passed_failed_and_did_not_run(checks, accept, tmp_path):
    names = (
        "good",
        "bad",
        "raises",
        "crashes",
        "leaves",
        "lacks",
        "imports",
        "imports_own",
        "nothing",
        "nan",
    )
    code, out, rows = accept(checks(*names), "--jobs", "2", "--output", str(tmp_path / "table.txt"))
    assert code == 1
    assert {name: [row["status"] for row in found] for name, found in rows.items()} == {
        "good": [OK, MEASURED], "bad": [FAILED], "raises": [MEASURED, FAILED], "crashes": [MEASURED, FAILED],
        "leaves": [FAILED], "lacks": [NOT_RUN], "imports": [NOT_RUN], "imports_own": [FAILED], "nothing": [FAILED],
        "nan": [FAILED],
    }  # fmt: skip
    notes = {name: found[-1]["note"] for name, found in rows.items()}
    assert notes["good"] == "not judged at this size"
    assert notes["raises"] == "ValueError: the reason"
    assert notes["crashes"] == "the process was killed by SIGSEGV"
    assert notes["leaves"] == "the process ended with code 3 and no answer"
    assert notes["lacks"] == "there is no moon"
    assert notes["imports"] == "No module named 'a_package_that_is_not_there'"
    assert notes["nothing"] == "it ended without a figure"
    table = (tmp_path / "table.txt").read_text()
    assert table.split("\n\n")[1] in out
    assert "and details" in out, "the end of what a failed check printed"
    assert table.splitlines()[-1].startswith("1 ok, 3 measured, 7 FAILED, 2 NOT RUN; ")


def test_the_table_is_aligned_and_in_the_order_of_the_checks(checks, accept):
    code, out, _ = accept(checks("sleeps", "good"), "--jobs", "2")
    assert code == 0
    head, *lines = out.strip().split("\n\n")[-2].splitlines()
    assert [line.split()[0] for line in lines] == ["sleeps", "good", "good"]
    assert [line.index(word) for line, word in zip(lines, (MEASURED, OK, MEASURED), strict=True)] == [
        head.index("status")
    ] * 3
    assert "42" in lines[1]
    assert "= 42" in lines[1]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if sys.platform == "linux" else ""
    )
    return state != "Z"


def test_a_check_that_hangs_is_killed_with_what_it_started(checks, accept, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    removed = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **options: removed.append(path))
    began = time.monotonic()
    code, _, rows = accept([*checks("hangs", seconds=1.5), *checks("good")], "--jobs", "1")
    assert time.monotonic() - began < 30
    assert code == 1
    assert [row["status"] for row in rows["hangs"]] == [MEASURED, FAILED]
    assert rows["hangs"][-1]["note"] == "still ran after 1.5 s, its limit; killed"
    assert rows["good"][0]["status"] == OK
    assert removed
    [pid] = tmp_path.glob("*/pid")
    deadline = time.monotonic() + 10
    while alive(int(pid.read_text())):
        assert time.monotonic() < deadline, "the child of the check survived"
        time.sleep(0.01)


def test_the_budget_ends_what_runs_and_what_waits(checks, accept):
    code, out, rows = accept([*checks("hangs", seconds=600), *checks("good")], "--jobs", "1", "--budget", "6")
    assert code == 0, "nothing failed"
    assert [row["status"] for row in rows["hangs"]] == [MEASURED, NOT_RUN]
    assert rows["hangs"][-1]["note"].startswith("time: stopped after ")
    assert rows["good"][0]["status"] == NOT_RUN
    assert "for everything are over" in rows["good"][0]["note"]
    assert "2 NOT RUN" in out


def test_without_its_package_a_check_does_not_run(checks, accept):
    code, out, rows = accept(checks("good", needs=("a_package_that_is_not_there", "sys")))
    assert code == 2, "nothing ran"
    assert rows["good"][0]["note"] == "a_package_that_is_not_there is not installed"
    assert "1 NOT RUN" in out


def test_without_an_accelerator_nothing_runs(checks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(acceptance, "probe", lambda: (None, "9.9"))
    assert acceptance.main([], checks("good")) == 2
    assert "no accelerator was found by torch 9.9" in capsys.readouterr().out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_the_probe_and_the_run_agree_that_there_is_none(tmp_path):
    assert acceptance.probe() == (None, torch.__version__)
    with pytest.raises(NotRunError, match="no accelerator was found"):
        _ = Run("accelerator", True, tmp_path).device


def test_checks_do_not_see_how_the_user_has_configured_the_packages(checks, accept, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    code, out, rows = accept(checks("writes"))
    assert (code, rows["writes"][0]["figure"]["unit"]) == (0, "none")
    assert "seen by those who look" not in out


def test_at_full_size_what_measures_time_runs_alone_and_last(checks, tmp_path, capsys):
    path = tmp_path / "rows.json"
    alone = [Check(f"alone {n}", "checks_of_this_test:sleeps", alone=True) for n in range(2)]
    shared = [Check(f"shared {n}", "checks_of_this_test:sleeps") for n in range(2)]
    assert acceptance.main(["--cpu", "--json", str(path), "--jobs", "2"], [*alone, *shared]) == 0
    assert checks
    times = {row["check"]: row["figure"]["value"] for row in json.loads(path.read_text())["rows"]}
    assert max(times["shared 0"], times["shared 1"]) + 0.29 <= times["alone 0"]
    assert times["alone 0"] + 0.29 <= times["alone 1"]


def test_an_interrupt_leaves_a_table(checks, monkeypatch, capsys):
    polls = iter([None] * 3)

    def sleep(seconds):
        if next(polls, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("gpu.runner.time.sleep", sleep)
    assert acceptance.main(["--cpu", "--scale", "small", "--jobs", "1"], checks("hangs", "good")) == 2
    out = capsys.readouterr().out
    assert "interrupted before it began" in out
    assert "2 NOT RUN" in out


def test_words_choose_and_unknown_ones_are_refused(capsys):
    assert acceptance.main(["--list", "--only", "fp16"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["train fp16", "fp16 overflow"]
    with pytest.raises(SystemExit, match="--only fp17: no check has this in its name"):
        acceptance.main(["--only", "fp17"])


@pytest.mark.parametrize(
    ("judged", "value", "passed"),
    [(True, 1.0, True), (True, 1.1, False), (True, float("nan"), False), (False, 1.1, None)],
)
def test_speed_is_judged_at_full_size_on_an_accelerator_only(tmp_path, judged, value, passed):
    run = Run("accelerator" if judged else "cpu", True, tmp_path)
    figure = run.at_most("x", value, 1.01, note="why")
    assert figure.passed is passed
    assert figure.note == ("why" if judged else "not judged on the CPU; why")
    assert run.within("x", value, 1.01).passed is (value <= 1.01)


def test_the_table_shows_what_it_is_given():
    rows = [
        Row("a", OK, Figure("f", 1.5, "s", "≤ 2", True), "note"),
        Row("bb", FAILED, Figure("g", 12345678, "B"), ""),
        Row("c", NOT_RUN, note="why"),
    ]
    assert acceptance.table(rows).splitlines() == [
        "check  figure  value      unit  goal  status   note",
        "a      f       1.5        s     ≤ 2   ok       note",
        "bb     g       1.235e+07  B           FAILED",
        "c                                     NOT RUN  why",
    ]


# The files of marked tests

TESTS = """
import pytest

@pytest.mark.gpu
def test_passes(): pass

@pytest.mark.gpu
def test_skips(): pytest.skip("no such thing here")

@pytest.mark.gpu
def test_fails(): assert False

@pytest.mark.gpu
def test_cannot_be_set_up(missing): pass

def test_is_not_marked(): assert False
"""


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "packages" / "one" / "tests"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu: needs one']\n")
    contents = {
        "test_mixed.py": TESTS,
        "test_absent.py": "import a_package_that_is_not_there\nimport pytest\npytestmark = pytest.mark.gpu\n",
        "test_broken.py": "import accel_missing\npytestmark = 'mark.gpu'\n",
        "test_skipped.py": "import pytest\npytest.importorskip('not_there', reason='too heavy')  # mark.gpu\n",
        "test_good.py": TESTS[: TESTS.index("@pytest.mark.gpu\ndef test_fails")],
        "test_without.py": "def test_is_not_marked(): assert False\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(textwrap.dedent(text))
    return tmp_path


def test_each_file_of_marked_tests_is_a_row(repository, tmp_path, capsys):
    found = marked_files(repository)
    assert [Path(check.name).name for check in found] == [
        f"test_{name}.py" for name in ("absent", "broken", "good", "mixed", "skipped")
    ]
    everywhere = [Check(check.name, check.target, arguments=check.arguments) for check in found]
    path = tmp_path / "rows.json"
    assert acceptance.main(["--cpu", "--scale", "small", "--json", str(path)], everywhere) == 1
    rows = {Path(row["check"]).stem: row for row in json.loads(path.read_text())["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "test_absent": NOT_RUN, "test_broken": FAILED, "test_good": OK, "test_mixed": FAILED, "test_skipped": NOT_RUN,
    }  # fmt: skip
    assert rows["test_absent"]["note"] == "a_package_that_is_not_there is not installed"
    assert rows["test_skipped"]["note"] == "too heavy"
    assert rows["test_good"]["note"] == "1 skipped: no such thing here"
    assert rows["test_good"]["figure"]["value"] == 1
    assert rows["test_mixed"]["note"] == (
        "failed: test_fails, test_cannot_be_set_up; 1 skipped: no such thing here"
    )


def test_the_marked_files_of_this_repository():
    names = [check.name for check in marked_files()]
    assert "packages/accel-train/tests/data/test_transfer.py" in names
    assert "tests-integration/engines/test_quantization.py" in names
    assert Path(__file__).relative_to(ROOT).as_posix() not in names, "its checks are rows of their own"
    assert all((ROOT / name).is_file() for name in names)


# The checks themselves


def test_stable_diffusion_has_its_true_sizes():
    with torch.device("meta"):
        models = {"text_encoder": TextEncoder(), "unet": UNet(), "vae": VAE()}
        assert models["unet"](torch.empty(2, 4, 64, 64), 1.0, torch.empty(2, 77, 768)).shape == (2, 4, 64, 64)
        assert models["vae"](torch.empty(1, 4, 64, 64)).shape == (1, 3, 512, 512)
        assert models["vae"].encode(torch.empty(1, 3, 512, 512)).shape == (1, 8, 64, 64)
    counts = {name: sum(each.numel() for each in model.parameters()) for name, model in models.items()}
    assert counts == PARAMETERS


def figures_of(check, folder):
    """What a check yields, or why it does not run; in a fresh process."""
    module, _, name = check.target.partition(":")
    try:
        return list(getattr(importlib.import_module(module), name)(Run("cpu", False, folder)))
    except NotRunError as error:
        return str(error)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_with_small_sizes_on_the_cpu(check, tmp_path):
    absent = [name for name in check.needs if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed; hatch run engines:quantization runs it")
    figures = worlds.run(figures_of, 1, check, tmp_path, timeout=120)
    assert not isinstance(figures, str), figures
    assert [figure for figure in figures[0] if figure.passed is False] == []
    assert any(figure.passed for figure in figures[0]), "nothing was compared with anything"


def test_checks_of_the_repository_by_the_command(tmp_path):
    table = tmp_path / "table.txt"
    command = [sys.executable, str(ROOT / "tools/gpu/acceptance.py"), "--cpu", "--scale", "small"]
    options = ["--jobs", "2", "--output", str(table), "--only", "train fp32", "quantise", "cpu_offload"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = table.read_text().splitlines()
    assert lines[0].startswith("CPU, ")
    assert [line.split()[0] for line in lines[3:-2]] == [
        "train", "train", "quantise", "quantise", "packages/accel-bigmodel/tests/hooks/test_cpu_offload.py"
    ]  # fmt: skip
    assert "  needs an accelerator" in lines[7]


@pytest.mark.gpu
def test_every_check_with_small_sizes_on_the_accelerator(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert acceptance.main(["--scale", "small", "--json", str(path)], CHECKS) == 0, capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    for check in CHECKS:
        found = {row["status"] for row in rows if row["check"] == check.name}
        assert OK in found or (check.needs and found == {NOT_RUN})
