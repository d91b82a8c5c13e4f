"""A load in several ranks: the first reads the manifest and the shared trees, and the others open only their files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ckpt import Checkpointer, CheckpointError
from accel_train import Accelerator, ProjectConfiguration
from testkit import worlds
from testkit.object_storage import Objects, install, uri

SHARED = {"manifest.json", "state.json"}


def prepared(project: str | None = None) -> tuple[Any, Any, Any]:
    config = None if project is None else ProjectConfiguration(project, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def save(folder: str, project: str | None = None, times: int = 1) -> None:
    install()
    accelerator, model, optimizer = prepared(project)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    for time in range(times):
        torch.nn.init.constant_(accelerator.unwrap_model(model).bias, float(time))
        accelerator.save_state(None if project else folder)


def load(
    folder: str | None, project: str | None = None, elsewhere: str | None = None
) -> tuple[str, float, list[str]]:
    """What a load raised, the first bias, and the names of files that it opened."""
    install()
    accelerator, model, _ = prepared(project)
    with torch.no_grad():
        accelerator.unwrap_model(model).bias.fill_(-1)
    if elsewhere is not None and accelerator.process_index:
        folder = elsewhere
    opened: list[str] = []
    looked_at = str(folder or project).removeprefix("objects:")

    def note(event: str, args: Any) -> None:
        if event == "open" and looked_at in str(args[0]):
            opened.append(Path(str(args[0])).name)

    sys.addaudithook(note)
    Objects.watch = lambda kind, path: opened.append(f"{kind} {Path(path).name}")
    raised = ""
    try:
        accelerator.load_state(folder)
    except (CheckpointError, ValueError, TypeError) as error:
        raised = f"{type(error).__name__}: {error}"
    Objects.watch = None
    return raised, accelerator.unwrap_model(model).bias[0].item(), opened


def test_only_the_first_rank_reads_what_concerns_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    worlds.run(save, 2, folder)
    first, second = worlds.run(load, 2, folder)
    assert first[:2] == second[:2] == ("", 0.0)
    assert set(first[2]) >= SHARED
    assert second[2]
    assert not SHARED & set(second[2])


def test_other_ranks_ask_object_storage_for_their_files_alone(tmp_path: Path) -> None:
    folder = uri(tmp_path)
    worlds.run(save, 2, folder)
    first, second = worlds.run(load, 2, folder)
    assert first[:2] == second[:2] == ("", 0.0)
    kinds = {what.split()[0] for what in second[2]}
    assert kinds == {"get"}
    assert not {f"get {name}" for name in SHARED} & set(second[2])
    extra = [what for what in first[2] if what not in second[2] and "rank-00000" not in what]
    assert sorted(what.split()[0] for what in extra) == ["get", "get", "list"], first[2]


def test_all_ranks_take_the_newest_that_the_first_found(tmp_path: Path) -> None:
    project = str(tmp_path)
    worlds.run(save, 2, "", project, 3)
    first, second = worlds.run(load, 2, None, project)
    assert first[:2] == second[:2] == ("", 2.0)
    assert not SHARED & set(second[2])


@pytest.mark.parametrize(
    "what", ["no folder", "no manifest", "manifest.json", "state.json", "model.safetensors"]
)
def test_what_the_first_cannot_read_is_the_same_error_on_all(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "c"
    if what != "no folder":
        worlds.run(save, 2, str(folder))
    if what == "no manifest":
        (folder / "manifest.json").unlink()
    elif what != "no folder":
        path = folder / what
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    first, second = worlds.run(load, 2, str(folder))
    kind = "CheckpointNotFoundError" if what.startswith("no ") else "CorruptCheckpointError"
    assert first[0].startswith(kind), first
    assert second[0].startswith(kind), second
    assert first[1] == second[1] == -1.0, "nothing was changed"


def test_a_rank_that_is_given_another_folder_reads_that(tmp_path: Path) -> None:
    folder, other = tmp_path / "c", tmp_path / "copy"
    worlds.run(save, 2, str(folder))
    shutil.copytree(folder, other)
    first, second = worlds.run(load, 2, str(folder), None, str(other))
    assert first[:2] == second[:2] == ("", 0.0)
    assert set(second[2]) >= SHARED


def test_ranks_that_are_given_different_states_load_neither(tmp_path: Path) -> None:
    folder, other = tmp_path / "c", tmp_path / "other"
    worlds.run(save, 2, str(folder))
    worlds.run(save, 2, str(other), None, 2)
    first, second = worlds.run(load, 2, str(folder), None, str(other))
    assert "CheckpointError" in first[0]
    assert "other is another state than" in first[0]
    assert second[0].startswith("StateMismatchError")
    assert first[1] == second[1] == -1.0


@pytest.mark.parametrize("folder", ["memory://bucket/../c", "s3://"])
def test_what_is_no_folder_is_the_same_error_on_all(folder: str) -> None:
    first, second = worlds.run(load, 2, folder, timeout=20)
    assert first[0] == second[0]
    assert first[0].startswith("ValueError")


def steps_of(folder: str, own: bool) -> str:
    """Load a step by number, on the second rank perhaps another one."""
    dist.init_process_group("gloo")
    state = {"step": 0}
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, {"step": step})
    try:
        checkpointer.load(state, 1 + (own and dist.get_rank()))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return str(state["step"])


def test_each_rank_loads_the_step_that_it_asks_for(tmp_path: Path) -> None:
    assert worlds.run(steps_of, 2, str(tmp_path / "a"), False) == ["1", "1"]
    for said in worlds.run(steps_of, 2, str(tmp_path / "b"), True):
        assert "another state than" in said


def test_a_state_that_the_main_process_saved_alone_is_read_by_each(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    worlds.run(save_alone, 2, folder)
    first, second = worlds.run(load, 2, folder)
    assert first[:2] == second[:2] == ("", 0.0)


def save_alone(folder: str) -> None:
    accelerator, model, _ = prepared()
    torch.nn.init.constant_(accelerator.unwrap_model(model).bias, 0.0)
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
