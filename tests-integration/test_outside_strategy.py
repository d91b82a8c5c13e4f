"""A strategy of an outside package: every command and the conformance suite know it by its entry points alone."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "zero_redundancy"
TRAIN = EXAMPLE / "train.py"


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The environment of processes in which the example is installed, with the entry points of its pyproject.toml."""
    place = tmp_path_factory.mktemp("installed")
    metadata = place / "zero_redundancy-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zero-redundancy\nVersion: 0.1\n")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    path = os.pathsep.join([str(place), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    home = tmp_path_factory.mktemp("home")
    return {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(home), "COLUMNS": "120"}


@pytest.fixture
def accel(environ, tmp_path):
    """Run a command in a folder of its own; its exit code and what it prints."""

    def run(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "accel_cli", *map(str, words)],
            capture_output=True, text=True, timeout=200, env=environ, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_help_and_completion(accel, environ, tmp_path):
    assert "zero_redundancy" in accel("launch", "--help")
    text = accel("launch", "--help", "zero_redundancy")
    assert "Used with --use_zero_redundancy, or distributed_type: ZERO_REDUNDANCY in a file." in text
    assert "--zero_redundancy_parameters_as_bucket_view" in text
    words = {"COMP_WORDS": "accel\nlaunch\n--use_z", "COMP_CWORD": "2", "_ACCEL_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli"], env=environ | words, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "--use_zero_redundancy\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use_zero_redundancy", "--use_fsdp"], "--use_zero_redundancy and --use_fsdp exclude each other"),
        (["--use_zero_redundanzy"], "did you mean --use_zero_redundancy?"),
        (["--zero_redundancy_parameters_as_buckets", "true"], "--zero_redundancy_parameters_as_bucket_view?"),
        (
            ["--use_zero_redundancy", "--use_parallelism_config"],
            "--use_parallelism_config contradicts --use_zero_redundancy, which divides models in its own way",
        ),
        (["--use_zero_redundancy", "--num_processes", "1"], "--use_zero_redundancy needs at least 2 processes"),
        (
            ["--use_zero_redundancy", "--zero_redundancy_parameters_as_bucket_view", "--dynamo_mode=reduce-overhead"],
            "--zero_redundancy_parameters_as_bucket_view contradicts --dynamo_mode reduce-overhead: CUDA graphs",
        ),
    ],
)  # fmt: skip
def test_mistakes(accel, flags, message):
    assert message in accel("launch", "--cpu", *flags, TRAIN, code=2)


def test_a_file_and_what_is_in_effect(accel, tmp_path):
    (tmp_path / "c.yaml").write_text("distributed_type: ZERO_REDUNDANCY\nuse_cpu: true\nnum_processes: 2\n")
    assert "is valid: a local run" in accel("config", "validate", "c.yaml")
    shown = json.loads(accel("config", "show", "--config_file", "c.yaml", "--json"))["values"]
    assert shown["distributed_type"] == "ZERO_REDUNDANCY"
    assert shown["zero_redundancy_config.zero_redundancy_parameters_as_bucket_view"] is False
    assert "ZERO_REDUNDANCY_PARAMETERS_AS_BUCKET_VIEW=false" in accel(
        "launch", "--config_file", "c.yaml", "--dry_run", TRAIN
    )
    (tmp_path / "c.yaml").write_text("zero_redundancy_config:\n  parameters_as_buckets: true\n")
    assert "zero_redundancy_config.parameters_as_buckets does not exist" in accel(
        "config", "validate", "c.yaml", code=2
    )


def test_the_wizard_asks_its_questions(accel, environ, tmp_path):
    (tmp_path / "ask.py").write_text(
        textwrap.dedent("""
        import sys
        from accel_cli.wizard import outcome
        from accel_cli.wizard.answers import Situation
        from accel_cli.wizard.interview import Interview
        from accel_cli.machine import Machine
        from accel_cli.wizard.table import QUESTIONS
        from accel_state.config.files import save

        given = {
            "devices": "cpu", "distributed_type": "ZERO_REDUNDANCY", "num_processes": 3,
            "zero_redundancy.parameters_as_bucket_view": True,
        }

        def ask(question):
            if question.name == "distributed_type":
                print(*[choice.label for choice in question.choices], sep="\\n")
            return given.pop(question.name, question.default)

        answers = Interview(QUESTIONS, Situation(Machine(cores=8), {}, outcome.offers), ask).run()
        assert not given, given
        save(outcome.configuration(answers), sys.argv[1])
    """)
    )
    done = subprocess.run(
        [sys.executable, "ask.py", "c.yaml"], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ZeRO-1: a replica on each process, optimizer states divided" in done.stdout.splitlines()
    written = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert written["distributed_type"] == "ZERO_REDUNDANCY"
    assert written["zero_redundancy_config"] == {"zero_redundancy_parameters_as_bucket_view": True}
    assert "is valid: a local run, " in accel("config", "validate", "c.yaml")


def test_the_plan_has_its_memory(accel, tmp_path):
    save_file({f"layers.{n}.weight": torch.empty(200, 100) for n in range(8)}, tmp_path / "model.safetensors")
    text = accel("plan", "model.safetensors", "--devices", "4", "--memory", "1GB", "--reserve", "0", "--json")
    rows = {row["name"]: row for row in json.loads(text)["strategies"]}
    ddp, zero = rows["ddp"], rows["zero redundancy"]
    assert zero["parts"]["weights"] == ddp["parts"]["weights"] == 8 * 20_000 * 4
    assert zero["parts"]["optimizer"] == ddp["parts"]["optimizer"] / 4
    assert zero["traffic"] == pytest.approx(1.5 * ddp["traffic"])


@pytest.mark.full
def test_a_rehearsal(accel):
    text = accel("rehearse", "--use_zero_redundancy", "--num_processes", "6", "--ranks", "0,5", TRAIN)
    assert "zero_redundancy" in text


def expected(steps):
    """The weights after so many steps of one process, without the library."""
    model, optimizer, scheduler, loader = runpy.run_path(str(TRAIN))["objects"]()
    batches = [*loader] * (steps // 4)
    for inputs, targets in batches:
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def close(file, steps):
    torch.testing.assert_close(torch.load(file), expected(steps), rtol=1e-12, atol=1e-14)


@pytest.fixture(scope="module")
def saved(environ, tmp_path_factory):
    """A state that two ranks saved, and the weights in it."""
    folder = tmp_path_factory.mktemp("saved")
    words = [
        "--cpu",
        "--num_processes",
        "2",
        "--use_zero_redundancy",
        TRAIN,
        "--save",
        "state",
        "--weights",
        "w.pt",
    ]
    subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *map(str, words)], env=environ, cwd=folder, check=True
    )  # fmt: skip
    return folder


@pytest.mark.wide
def test_a_run_is_that_of_one_process(saved):
    close(saved / "w.pt", 4)


@pytest.mark.wide
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--num_processes", "1"], marks=pytest.mark.full),
        pytest.param(["--num_processes", "3", "--use_zero_redundancy"], marks=pytest.mark.full),
        pytest.param(
            ["--num_processes", "3", "--use_zero_redundancy", "--zero_redundancy_parameters_as_bucket_view"],
            marks=pytest.mark.full,
        ),
        ["--num_processes", "2", "--use_fsdp", "--fsdp_version", "2"],
    ],
    ids=["single", "three ranks", "bucket views", "fsdp2"],
)  # fmt: skip
def test_a_state_continues_elsewhere(accel, saved, tmp_path, flags):
    accel("launch", "--cpu", *flags, TRAIN, "--load", saved / "state", "--weights", tmp_path / "w.pt")
    close(tmp_path / "w.pt", 8)


@pytest.mark.full
def test_it_continues_what_another_strategy_saved(accel, tmp_path):
    accel("launch", "--cpu", "--num_processes", "1", TRAIN, "--save", "state")
    flags = ["--cpu", "--num_processes", "2", "--use_zero_redundancy"]
    accel("launch", *flags, TRAIN, "--load", "state", "--weights", tmp_path / "w.pt")
    close(tmp_path / "w.pt", 8)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_conformance_suite_has_it_as_a_member(environ):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests-integration/conformance", "-k",
         "zero_redundancy"],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
