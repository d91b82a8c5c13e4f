"""``accel checkpoint``, over checkpoints that an `Accelerator` has saved, in a folder and in object storage."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import fsspec
import pytest
import torch

import accel_ckpt
from accel_ckpt.folders.leftovers import TemporaryFolder, host_token, temporary_name
from accel_cli.app import main
from accel_train import Accelerator, ProjectConfiguration
from testkit.small_run import build


def save(base, count):
    project = ProjectConfiguration(str(base), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", project_config=project)
    model, optimizer, scheduler, loader = build(accelerator)
    for batch in [*loader][:count]:
        accelerator.backward(model(batch[0]).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.step += 1
        accelerator.save_state()
    accelerator.end_training()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints of a training."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 3)
    return folder / "checkpoints"


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


@pytest.fixture
def accel(capsys):
    """Run a command; its code, and what it prints to standard output and standard error."""

    def run(*words):
        code = main(["checkpoint", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def damage(file):
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


# ls


def test_the_list_has_the_newest_last(accel, folder):
    (folder / "checkpoint_2").rename(folder / "checkpoint_10")
    code, out, _ = accel("ls", folder.parent.parent)
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split() == ["checkpoint", "step", "ranks", "strategy", "size", "saved", "state"]
    names = [f"run/checkpoints/checkpoint_{number}" for number in (0, 1, 10)]
    assert [line.split()[0] for line in lines] == names
    assert lines[2].split()[1:4] == ["3", "1", "single"]
    assert all(line.endswith("complete") for line in lines)
    code, out, _ = accel("ls", folder, "--json")
    (first, *_) = json.loads(out)
    files = accel_ckpt.open_training_state(folder / "checkpoint_0").manifest.files.values()
    assert first["size"] == sum(file.size for file in files)
    assert first["saved"] == (folder / "checkpoint_0" / "manifest.json").stat().st_mtime


def test_the_list_says_what_is_not_complete(accel, folder):
    dead = temporary_name(folder / "checkpoint_3", host_token("0" * 12))
    dead.mkdir()
    alive = TemporaryFolder(temporary_name(folder / "checkpoint_4", host_token("1" * 12)))
    (folder / "checkpoint_0" / "manifest.json").unlink()
    (folder / "checkpoint_1" / "model.safetensors").unlink()
    (folder / "notes").mkdir()
    foreign = folder / "of_accelerate"
    foreign.mkdir()
    torch.save({}, foreign / "optimizer.bin")
    found = {one["name"]: one["state"] for one in json.loads(accel("ls", folder, "--json")[1])}
    alive.release()
    assert found.pop("checkpoint_1").startswith("damaged: ")
    assert found == {
        "checkpoint_0": "incomplete",
        "checkpoint_2": "complete",
        dead.name: "left by an interrupted save",
        alive.path.name: "being saved",
        "of_accelerate": "of Accelerate",
    }


# show


def test_what_a_checkpoint_holds(accel, folder):
    code, out, _ = accel("show", folder / "checkpoint_1")
    assert code == 0
    facts = dict(re.findall(r"^  (\S.*?)  +(.*)$", out, re.MULTILINE))
    assert (facts["step"], facts["world size"], facts["strategy"], facts["precision"]) == (
        "2",
        "1",
        "single",
        "bf16",
    )
    assert (facts["models"], facts["optimizers"]) == ("Linear", "AdamW")
    assert facts["schedulers"] == "StepLR of optimizer 0"
    assert facts["random states"] == "numpy, python, torch"
    assert "loader_0" in facts["parts of each rank"]
    assert {"model.safetensors", "state.json", "rank-00000.json"} < facts.keys()
    assert "float32" not in out
    assert "  model 0: weight  " in accel("show", folder / "checkpoint_1", "--tensors")[1]
    data = json.loads(accel("show", folder / "checkpoint_1", "--tensors", "--json")[1])
    assert data["files"]["state.json"] == (folder / "checkpoint_1" / "state.json").stat().st_size
    assert data["tensors"]["model 0: bias"].startswith("float32 [")
    assert data["tensors"]["optimizer_0.state.model_0.weight.exp_avg"].startswith("float32 [")


# verify


def test_damage_is_named(accel, folder):
    damage(folder / "checkpoint_1" / "state.safetensors")
    (folder / "checkpoint_2" / "manifest.json").write_text("{")
    code, out, _ = accel("verify", *(folder / f"checkpoint_{number}" for number in range(3)))
    assert code == 1
    first, second, third = out.splitlines()
    assert first == f"{folder}/checkpoint_0: not damaged"
    assert "checkpoint_1/state.safetensors" in second
    assert "checkpoint_2/manifest.json" in third
    code, out, _ = accel("verify", folder / "checkpoint_0", "--json")
    assert (code, json.loads(out)) == (0, {f"{folder}/checkpoint_0": None})


# diff


def test_the_exit_code_is_that_of_diff(accel, folder, tmp_path):
    same = shutil.copytree(folder / "checkpoint_0", tmp_path / "same")
    code, out, _ = accel("diff", folder / "checkpoint_0", same)
    assert (code, out) == (0, f"{folder}/checkpoint_0 and {same} are equal\n")
    code, out, _ = accel("diff", folder / "checkpoint_0", folder / "checkpoint_1")
    assert code == 1
    assert re.search(r"^1 → 2 +step$", out, re.MULTILINE)
    assert re.search(r"^float32 \[.*\], by up to \d\S* +model 0: weight$", out, re.MULTILINE)
    data = json.loads(accel("diff", folder / "checkpoint_0", folder / "checkpoint_1", "--json")[1])
    weights = [accel_ckpt.open_training_state(folder / f"checkpoint_{n}").models[0]["weight"] for n in (0, 1)]
    (weight,) = [one for one in data if one["name"] == "model 0: weight"]
    assert weight["largest"] == (weights[0].double() - weights[1].double()).abs().max().item()
    damage(folder / "checkpoint_1" / "model.safetensors")
    code, _, err = accel("diff", folder / "checkpoint_0", folder / "checkpoint_1")
    assert code == 2
    assert "model.safetensors" in err


# prune


def test_prune_shows_then_removes(accel, folder):
    (folder / "checkpoint_1").rename(folder / "checkpoint_10")
    (folder / "best").mkdir()
    shutil.copytree(folder / "checkpoint_0", folder / "final")
    (folder / "checkpoint_11").mkdir()
    alive = TemporaryFolder(temporary_name(folder / "checkpoint_4", host_token("1" * 12)))
    before = sorted(os.listdir(folder))
    for words in ([], ["--yes", "--dry_run"]):
        code, out, err = accel("prune", folder, "--keep", "1", *words)
        assert (code, out) == (0, f"{folder}/checkpoint_0\n{folder}/checkpoint_2\n")
        assert err == "2 of 3 complete checkpoints would be removed; --yes removes them\n"
    assert sorted(os.listdir(folder)) == before
    code, out, err = accel("prune", folder, "--keep", "1", "--yes")
    assert (code, out) == (0, f"{folder}/checkpoint_0\n{folder}/checkpoint_2\n")
    assert err == "2 of 3 complete checkpoints removed\n"
    alive.release()
    assert sorted(os.listdir(folder)) == [
        name for name in before if name not in ("checkpoint_0", "checkpoint_2")
    ]


def test_prune_keeps_the_newest_of_each_prefix(accel, folder):
    for number in range(3):
        shutil.copytree(folder / f"checkpoint_{number}", folder / f"step_{number}")
        shutil.copytree(folder / f"checkpoint_{number}", folder / f"epoch_{number}")
    data = json.loads(accel("prune", folder, "--keep", "2", "--json")[1])
    assert data == {"to_remove": [f"{folder}/checkpoint_0", f"{folder}/step_0"], "removed": []}
    data = json.loads(accel("prune", folder, "--keep", "2", "--json", "--yes", "--prefix", "epoch_")[1])
    assert data["removed"] == [f"{folder}/epoch_0"]


def test_what_cannot_be_removed_is_a_failure(accel, folder, monkeypatch):
    def fails(self, source, target):
        raise OSError("read-only")

    monkeypatch.setattr("accel_ckpt.disk.Disk.rename", fails)
    with pytest.warns(UserWarning, match="could not be removed, and stays"):
        code, out, err = accel("prune", folder, "--keep", "2", "--yes")
    assert (code, out, err) == (1, "", "0 of 3 complete checkpoints removed\n")


# Object storage


def test_object_storage(accel, folder):
    storage = fsspec.filesystem("memory")
    try:
        checkpointer = accel_ckpt.Checkpointer("memory://commands/run")
        for step in (1, 2, 3):
            checkpointer.save(step, {"model": torch.nn.Linear(2, 2), "step": step})
        storage.pipe_file(
            "/commands/run/.accel-saving/step_4.0123456789ab.json",
            b'{"machine": "elsewhere", "pid": 1, "born": 1, "began": 1}',
        )
        storage.pipe_file("/commands/run/step_4/files-0123456789ab/model.safetensors", b"half")
        found = json.loads(accel("ls", "memory://commands/run", "--json")[1])
        assert [(one["name"], one["state"]) for one in found] == [
            (".accel-saving/step_4.0123456789ab.json", "left by an interrupted save"),
            ("step_1", "complete"),
            ("step_2", "complete"),
            ("step_3", "complete"),
            ("step_4", "incomplete"),
        ]
        assert [one["step"] for one in found[1:4]] == [1, 2, 3]
        assert all(one["saved"] > 1e9 for one in found[1:4])
        code, out, _ = accel("show", "memory://commands/run/step_2")
        assert code == 0
        assert out.startswith("memory://commands/run/step_2:\n")
        assert accel("verify", "memory://commands/run/step_2")[0] == 0
        assert accel("diff", "memory://commands/run/step_1", "memory://commands/run/step_2")[0] == 1
        assert accel("diff", "memory://commands/run/step_1", "memory://commands/run/step_1")[0] == 0
        assert accel("diff", "memory://commands/run/step_1", folder / "checkpoint_0")[0] == 1
        (weights,) = storage.glob("/commands/run/step_2/files-*/model.safetensors")
        storage.pipe_file(weights, storage.cat_file(weights)[:-1] + b"x")
        code, out, _ = accel("verify", "memory://commands/run/step_2", "memory://commands/run/step_3")
        assert code == 1
        assert "model.safetensors" in out.splitlines()[0]
        assert out.splitlines()[1] == "memory://commands/run/step_3: not damaged"
        assert accel("prune", "memory://commands/run", "--keep", "1", "--yes")[0] == 0
        assert [one["name"] for one in json.loads(accel("ls", "memory://commands/run", "--json")[1])][1:] == [
            "step_3",
            "step_4",
        ]
    finally:
        storage.rm("/commands", recursive=True)


# Mistakes


@pytest.fixture
def mistakes(folder):
    """Places that are no checkpoints, by name."""
    (folder / "a_file").write_text("")
    (folder / "empty").mkdir()
    damaged = shutil.copytree(folder / "checkpoint_0", folder / "empty" / "a" / "b" / "c" / "damaged")
    damage(damaged / "manifest.json")
    foreign = folder / "empty" / "a" / "b" / "c" / "foreign"
    foreign.mkdir()
    torch.save({"state": {}, "param_groups": []}, foreign / "optimizer.bin")
    torch.save({}, foreign / "random_states_0.pkl")
    return {
        "gone": folder / "gone", "file": folder / "a_file", "empty": folder / "empty", "damaged": damaged,
        "foreign": foreign, "uri": "memory://", "nothing": "memory://nothing/here",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "where", "message"),
    [
        (["ls"], "gone", "gone does not exist; give the folder that holds checkpoints"),
        (["ls"], "file", "a_file is a file; give the folder that holds checkpoints"),
        (["ls"], "empty", "there is no checkpoint in .*empty, nor up to two folders below it"),
        (["ls"], "uri", "'memory:.*' is not a location for checkpoints"),
        (["ls"], "nothing", "there is no checkpoint in memory://nothing/here"),
        (
            ["show"],
            "gone",
            "there is no checkpoint folder .*; the newest complete checkpoint in .* is checkpoint_2",
        ),
        (["show"], "file", "is a file; pass the folder of the checkpoint"),
        (["show"], "empty", "empty holds no manifest.json"),
        (["show"], "damaged", "damaged/manifest.json"),
        (
            ["show"],
            "foreign",
            r"is a checkpoint of Accelerate \(single process or DDP\) with optimizers: 1, random states: 1; load_state",
        ),
        (["verify"], "foreign", "is a checkpoint of Accelerate"),
        (["verify"], "gone", "there is no checkpoint folder"),
        (["diff", "checkpoint_0"], "damaged", "damaged/manifest.json"),
        (["diff", "checkpoint_0"], "gone", "there is no checkpoint folder"),
        (["diff", "checkpoint_0"], "foreign", "is a checkpoint of Accelerate"),
        (["prune", "--keep", "1"], "gone", "gone does not exist"),
        (["prune", "--keep", "1"], "empty", "no complete checkpoint checkpoint_<number> or step_<number> in"),
        (["prune", "--keep", "0"], "empty", "--keep is '0'"),
        (["prune"], "empty", r"missing option '--keep' \(Number of the newest checkpoints to keep\); accel"),
    ],
)
def test_mistakes_are_one_error_with_code_2(accel, folder, mistakes, words, where, message):
    words = [folder / word if word == "checkpoint_0" else word for word in words]
    code, out, err = accel(*words, mistakes[where])
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1
    assert err.startswith("accel checkpoint")


def test_a_foreign_pickle_is_not_run(accel, tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("optimizer.bin", "random_states_0.pkl", "scheduler.bin", "custom_checkpoint_0.pkl"):
        (tmp_path / "c").mkdir(exist_ok=True)
        torch.save(Runs(), tmp_path / "c" / name)
    for words in (["show"], ["verify"], ["diff", tmp_path / "c"]):
        assert accel(*words, tmp_path / "c")[0] == 2
    assert accel("ls", tmp_path)[0] == 0
    assert not (tmp_path / "ran").exists()


def test_help_and_completion(tmp_path):
    for name in ("ls", "show", "verify", "diff", "prune"):
        assert main(["checkpoint", name, "--help"]) == 0
    words = {"COMP_WORDS": "accel\ncheckpoint\n", "COMP_CWORD": "2", "_ACCEL_COMPLETE": "complete_bash"}
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(tmp_path)} | words
    done = subprocess.run([sys.executable, "-m", "accel_cli"], env=environ, capture_output=True, text=True)
    assert done.stdout.split() == ["ls", "show", "verify", "diff", "prune"]
