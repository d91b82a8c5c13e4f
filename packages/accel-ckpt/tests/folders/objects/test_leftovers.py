"""What dead saves left, and who may remove it."""

import json
import time

import pytest
import torch

from accel_ckpt import (
    Checkpointer,
    CheckpointSaveError,
    checkpoints_from,
    complete_checkpoints,
    save_training_state,
)
from accel_state.host.process_identity import process_identity
from testkit.object_storage import objects


def leave(tmp_path, name, token, owner=None, began=None):
    """What a save leaves that dies before its manifest."""
    files = tmp_path / "bucket" / name / f"files-{token}"
    files.mkdir(parents=True)
    (files / "model.safetensors").write_bytes(b"half")
    marks = tmp_path / "bucket" / ".accel-saving"
    marks.mkdir(exist_ok=True)
    owner = owner or {**process_identity(), "born": "0"}
    content = {**owner, "began": time.time() if began is None else began}
    (marks / f"{name}.{token}.json").write_text(json.dumps(content))


def save(bucket, name="checkpoint_9"):
    save_training_state(f"{bucket}/{name}", models=[{"w": torch.ones(2)}], shared={}, per_rank={})


def check_removed(bucket, tmp_path):
    """The objects are gone, and so are those that come late."""
    assert {name.partition("/")[0] for name in objects(tmp_path)} == {"checkpoint_9", ".accel-saving"}
    late = tmp_path / "bucket/checkpoint_3/files-0123456789ab/state.json"
    late.parent.mkdir(parents=True)
    late.touch()  # by a request of the dead process that was still on its way
    with pytest.warns(UserWarning, match="a save that did not finish"):
        save(bucket)
    save(bucket)
    assert {name.partition("/")[0] for name in objects(tmp_path)} == {"checkpoint_9"}


def test_of_a_dead_process(bucket, tmp_path):
    leave(tmp_path, "checkpoint_3", "0123456789ab")
    with pytest.warns(UserWarning, match=f"a save that did not finish left objects in {bucket}/checkpoint_3"):
        save(bucket)
    check_removed(bucket, tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "owner",
    [
        process_identity(),
        {"machine": "another", "pid": 1, "born": "5"},
        {"machine": None, "pid": 1, "born": None},
    ],
)
def test_of_one_that_may_be_alive(bucket, tmp_path, owner):
    leave(tmp_path, "checkpoint_3", "0123456789ab", owner)
    save(bucket)
    assert "checkpoint_3/files-0123456789ab/model.safetensors" in objects(tmp_path)
    assert [path.name for path in complete_checkpoints(bucket)] == ["checkpoint_9"]


def test_of_another_machine_a_day_ago(bucket, tmp_path):
    leave(
        tmp_path,
        "checkpoint_3",
        "0123456789ab",
        {"machine": "m", "pid": 1, "born": "5"},
        time.time() - 25 * 3600,
    )
    with pytest.warns(UserWarning, match="a save that did not finish"):
        save(bucket)
    check_removed(bucket, tmp_path)


def test_a_living_save_of_the_same_name_is_left_alone(bucket, tmp_path):
    leave(tmp_path, "checkpoint_3", "0123456789ab")
    leave(tmp_path, "checkpoint_3", "ba9876543210", process_identity())
    with pytest.warns(UserWarning, match="a save that did not finish"):
        save(bucket)
    assert [name for name in objects(tmp_path) if name.startswith("checkpoint_3")] == [
        "checkpoint_3/files-ba9876543210/model.safetensors"
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["...json", "...0123456789ab.json", "x.json", "a.0123456789ab.json"])
def test_marks_that_nobody_wrote(bucket, tmp_path, name):
    marks = tmp_path / "bucket" / ".accel-saving"
    marks.mkdir(parents=True)
    (marks / name).write_text('{"machine": [], "pid": "../../etc"}')
    (tmp_path / "files-0123456789ab").mkdir()
    (tmp_path / "files-0123456789ab" / "mine").touch()
    save(bucket)
    assert (tmp_path / "files-0123456789ab" / "mine").exists()


def test_an_unfinished_checkpoint_takes_no_number(bucket, tmp_path):
    leave(tmp_path, "step_3", "0123456789ab")
    state = {"model": torch.nn.Linear(2, 2)}
    checkpointer = Checkpointer(bucket, keep=2)
    with pytest.warns(UserWarning, match="a save that did not finish"):
        checkpointer.save(3, state)
    for step in (4, 5):
        checkpointer.save(step, state)
    assert checkpointer.steps() == [4, 5]
    with pytest.raises(CheckpointSaveError, match=f"{bucket}/step_5 exists, so step 5 cannot be the newest"):
        checkpointer.save(5, state)
    assert [path.name for path in checkpoints_from(bucket, 5, "step_")] == ["step_5"]
    checkpointer.verify()
    assert checkpointer.load(state) == 5
