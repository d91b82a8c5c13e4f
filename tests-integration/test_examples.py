"""The examples of the documentation run, on one process and on two, and do what they say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import limits, markdown_blocks, worlds

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
WORLDS = pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])


def _script(path: str, folder: str, arguments: list[str]) -> str:
    """Run a script as ``__main__`` in this rank, and return what it printed."""
    os.chdir(folder)
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _run(name: str, world: int, folder: Path, *arguments: str) -> str:
    """What rank 0 printed; the other ranks must have printed nothing."""
    outputs = worlds.run(_script, world, str(EXAMPLES / name), str(folder), list(arguments), timeout=120)
    assert outputs[1:] == [""] * (world - 1)
    return outputs[0]


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(match) for match in re.findall(pattern, text)]


@WORLDS
def test_accumulation(world, tmp_path):
    losses = _numbers(r"loss per token ([\d.]+)", _run("by_feature/accumulation.py", world, tmp_path))
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]


@WORLDS
def test_checkpointing_goes_on_exactly(world, tmp_path):
    final = r"weights add up to (\S+)"
    (tmp_path / "straight").mkdir()
    straight = _run("by_feature/checkpointing.py", world, tmp_path / "straight")
    assert _run("by_feature/checkpointing.py", world, tmp_path, "--stop_at", "20").startswith(
        "stopped after step 20"
    )
    resumed = _run("by_feature/checkpointing.py", world, tmp_path, "--resume")
    assert len(re.findall(final, straight)) == 1
    assert re.findall(final, straight) == re.findall(final, resumed)
    assert len(list((tmp_path / "checkpointing" / "checkpoints").iterdir())) == 2


@WORLDS
def test_a_data_mixture_goes_on_exactly(world, tmp_path):
    lines = _run("by_feature/data_mixture.py", world, tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in (20, 40, 60, 80)]
    assert _numbers(r"loss (\S+)", lines[-1])[0] < 0.05
    assert _run("by_feature/data_mixture.py", world, tmp_path, "--stop_at", "30").splitlines() == lines[:1]
    assert _run("by_feature/data_mixture.py", world, tmp_path, "--resume").splitlines() == lines[1:]


@WORLDS
def test_early_stopping(world, tmp_path):
    steps = _numbers(r"stopped after (\d+) steps", _run("by_feature/early_stopping.py", world, tmp_path))
    assert len(steps) == 1
    assert 5 < steps[0] < 20 * 29 / world


@WORLDS
def test_metrics(world, tmp_path):
    output = _run("by_feature/metrics.py", world, tmp_path)
    assert _numbers(r"accuracy ([\d.]+)", output)[-1] > 0.8
    assert _numbers(r"F1 ([\d.]+)", output)[-1] > 0.8


@WORLDS
def test_profiling_writes_a_trace_per_rank(world, tmp_path):
    assert "Self CPU" in _run("by_feature/profiling.py", world, tmp_path)
    assert len(list((tmp_path / "profiles").iterdir())) == world


@WORLDS
def test_cross_validation(world, tmp_path):
    output = _run("by_feature/cross_validation.py", world, tmp_path)
    folds, ensemble = (
        _numbers(r"fold \d: accuracy ([\d.]+)", output),
        _numbers(r"ensemble: accuracy (\S+)", output),
    )
    assert len(folds) == 3
    assert min(folds) > 0.7
    assert ensemble[0] > 0.7


@WORLDS
def test_memory_finds_a_batch_size_that_fits(world, tmp_path):
    output = _run("by_feature/memory.py", world, tmp_path)
    tried = _numbers(r"trying batches of (\d+)", output)
    assert tried == [64, 57, 51, 45, 40]  # nine tenths each time
    assert _numbers(r"trained with batches of (\d+)", output) == [40]


@WORLDS
def test_transformers_finetuning(world, tmp_path):
    output = _run("by_feature/transformers_finetuning.py", world, tmp_path)
    losses, rates = _numbers(r"loss ([\d.]+)", output), _numbers(r"learning rate (\S+)", output)
    assert losses[-1] < losses[0]
    assert rates[-1] == pytest.approx(0, abs=1e-6), "the schedule ends with training"
    from transformers import GPT2LMHeadModel

    assert GPT2LMHeadModel.from_pretrained(tmp_path / "finetuned").config.n_embd == 32


@WORLDS
def test_text_classification(world, tmp_path):
    assert _numbers(r"accuracy ([\d.]+)", _run("text_classification.py", world, tmp_path))[-1] > 0.8


@WORLDS
def test_image_classification(world, tmp_path):
    assert _numbers(r"accuracy ([\d.]+)", _run("image_classification.py", world, tmp_path))[-1] > 0.8


@WORLDS
def test_causal_lm_continues_inside_a_window(world, tmp_path):
    shown = r"perplexity ([\d.]+)"
    (tmp_path / "straight").mkdir()
    straight = _numbers(shown, _run("causal_lm.py", world, tmp_path / "straight", "--epochs", "1"))
    assert _run("causal_lm.py", world, tmp_path, "--epochs", "1", "--stop_after", "5") == ""
    resumed = _numbers(shown, _run("causal_lm.py", world, tmp_path, "--epochs", "1", "--resume"))
    assert resumed == straight
    assert 1 < straight[0] < 100, "256 tokens, untrained, have a perplexity of 256"


@WORLDS
def test_lora_trains_the_adapter_alone(world, tmp_path):
    from safetensors.torch import load_file

    output = _run("lora.py", world, tmp_path)
    assert min(_numbers(r"accuracy ([\d.]+)", output)) > 0.75
    assert "base unchanged: True" in output
    adapter = load_file(tmp_path / "adapter.safetensors")
    assert {name.rpartition(".")[2] for name in adapter} == {"down", "up"}
    assert sum(value.numel() for value in adapter.values()) == 4 * (64 + 128 + 128 + 10)


@WORLDS
def test_gan_reaches_the_circle(world, tmp_path):
    radius = _numbers(r"radius ([\d.]+)", _run("gan.py", world, tmp_path))
    assert len(radius) == 12
    assert radius[-1] == pytest.approx(2, abs=0.4)


@pytest.mark.full
@WORLDS
def test_diffusion_samples_digits(world, tmp_path):
    output = _run("diffusion.py", world, tmp_path)
    assert _numbers(r"samples: ([\d.]+)", output)[0] > 0.7, "one in ten by chance"


@WORLDS
def test_generation_scores_each_prompt_once(world, tmp_path):
    output = _run("generation.py", world, tmp_path)
    assert _numbers(r"(\d+) answers", output) == [13]
    assert _numbers(r"answers, ([\d.]+)", output)[0] > 0.9


@WORLDS
def test_digits_resumes_and_its_weights_score_the_same_alone(world, tmp_path):
    score = r"(\d+) of 599 right"
    first = _run("digits.py", world, tmp_path, "--epochs", "3", "--stop_after", "1")
    second = _run("digits.py", world, tmp_path, "--epochs", "3", "--resume")
    assert (len(re.findall(score, first)), len(re.findall(score, second))) == (1, 2)
    command = [
        sys.executable,
        str(EXAMPLES / "digits_check.py"),
        str(tmp_path / "digits/model/model.safetensors"),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    alone = subprocess.run(command, check=True, text=True, capture_output=True, env=environ).stdout
    assert re.findall(score, alone) == re.findall(score, second)[-1:]


@pytest.mark.wide
def test_the_demo_keeps_its_promises_in_90_seconds(tmp_path):
    environ = {**os.environ, **markdown_blocks.commands(tmp_path)}
    command = [sys.executable, str(EXAMPLES / "run_demo.py")]
    done = subprocess.run(command, text=True, capture_output=True, env=environ, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^kept  ", done.stdout, re.MULTILINE)) == 3
    assert "BROKEN" not in done.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_model_bigger_than_the_memory_that_its_process_may_use_answers(tmp_path):
    if reason := limits.why_not():
        pytest.skip(reason)
    script = str(EXAMPLES / "bigger_than_memory.py")
    command = [sys.executable, script, "--folder", str(tmp_path / "model"), "--length", "60"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], text=True, capture_output=True, timeout=500, check=False
        )

    ours = run("--steps", "50")
    assert ours.returncode == 0, ours.stdout + ours.stderr
    assert "step 50: loss" in ours.stdout
    unlimited = run("--answer", "--plain").stdout
    assert len(unlimited) >= 80
    assert ours.stdout.endswith(unlimited), "the same as with all weights in memory"
    assert run("--plain").returncode == 137


@pytest.mark.parametrize(
    ("file", "losses"), [("ddp", "ddp"), ("fsdp2", "fsdp2"), ("pp", "pp"), ("ep", "fsdp2_experts")]
)
@pytest.mark.full
def test_one_training_by_the_configuration_file_alone(file, losses, tmp_path):
    """`hatch run engines:deepspeed` does so with deepspeed.yaml."""
    from safetensors.torch import load_file

    experts = ["--experts", "4"] if file == "ep" else []
    single = "single_experts" if experts else "single"
    curves = {}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "page.md").write_text(
        (EXAMPLES.parent / "quickstart.md").read_text(encoding="utf-8")
    )
    for name in ("single", file):
        script = EXAMPLES / "strategies" / "char_llama.py"
        command = [
            sys.executable,
            "-m",
            "accel_cli",
            "launch",
            "--config_file",
            str(script.with_name(f"{name}.yaml")),
        ]
        done = subprocess.run(
            [*command, str(script), "--steps", "6", "--text", str(tmp_path / "text"), *experts],
            cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    for name in (single, losses):
        curves[name] = json.loads((tmp_path / f"losses_{name}.json").read_text())
    assert curves[losses] == pytest.approx(curves[single], rel=1e-4)
    assert curves[single][-1] < curves[single][0]
    names = [load_file(tmp_path / f"char_llama_{name}" / "model.safetensors").keys() for name in curves]
    assert names[0] == names[1]


def test_where_nothing_may_be_written_no_model_is_trained(tmp_path):
    (tmp_path / "file").touch()
    command = [
        sys.executable,
        str(EXAMPLES / "bigger_than_memory.py"),
        "--folder",
        str(tmp_path / "file" / "model"),
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert "NotADirectoryError" in done.stderr
    assert "training" not in done.stdout


def test_every_example_is_short_and_shown_on_the_page():
    page = EXAMPLES.parent / "examples.md"
    shown = {block.text for block in markdown_blocks.parse(page)}
    for script in EXAMPLES.rglob("*.py"):
        name, text = script.relative_to(EXAMPLES).as_posix(), script.read_text(encoding="utf-8")
        if name.startswith("zero_redundancy/"):
            name = "zero_redundancy/"  # a package, whose declaration docs/extending/ shows
            assert f"docs/examples/{name}" in (
                EXAMPLES.parent / "extending" / "launched-strategies.md"
            ).read_text(encoding="utf-8")
        if name.startswith("tutorial/"):
            name = "tutorial/"  # its chapters show them, which test_tutorial.py compares
        assert f"`{name}`" in page.read_text(encoding="utf-8"), name
        assert text in shown or name in ("run_demo.py", "tutorial/", "zero_redundancy/"), name
        if "by_feature" in name:
            assert len(text.splitlines()) <= 60, name
