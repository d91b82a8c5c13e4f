"""Saves to object storage that are interrupted at any request."""

import contextlib
import json
import pathlib
import shutil
import warnings

import pytest
import safetensors.torch
import torch

from accel_ckpt import (
    BackgroundSaver,
    CheckpointSaveError,
    RemotePath,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
    save_training_state,
)
from accel_ckpt.folders.objects import leftovers
from accel_ckpt.folders.objects.store import PART
from accel_ckpt.format.writer import BLOCK_HASHED
from testkit.object_storage import Objects, objects


def content(step, elements=1000):
    return {
        "models": [{"w": torch.arange(elements, dtype=torch.float32) * step}],
        "shared": {"step": step, "nested": [1, (2, torch.full((3,), float(step)))]},
        "per_rank": {"rng": torch.tensor([step])},
    }


def check(place, elements=1000):
    checkpoint = open_training_state(place)
    checkpoint.verify()
    step = checkpoint.shared["step"]
    assert torch.equal(checkpoint.models[0]["w"], content(step, elements)["models"][0]["w"])
    assert checkpoint.per_rank(0)["rng"].tolist() == [step]
    return step


@pytest.mark.parametrize("where", ["memory://run/c", "objects"])
def test_round_trip(where, bucket, tmp_path):
    place = f"{bucket}/c" if where == "objects" else where
    saved = save_training_state(place, **content(3))
    assert isinstance(saved, RemotePath)
    assert str(saved) == place
    local = save_training_state(tmp_path / "local", **content(3))
    here, there = open_training_state(local), open_training_state(saved)
    assert there.shared["nested"][1][1].tolist() == here.shared["nested"][1][1].tolist() == [3.0, 3.0, 3.0]
    assert {n: (r.size, r.xxh3) for n, r in there.manifest.files.items()} == {
        n: (r.size, r.xxh3) for n, r in here.manifest.files.items()
    }
    assert check(saved) == 3


def test_what_is_stored(bucket, tmp_path):
    save_training_state(f"{bucket}/c", **content(2))
    manifest = json.loads((tmp_path / "bucket/c/manifest.json").read_text())
    folder = tmp_path / "bucket/c" / manifest["folder"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(manifest["files"])
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert torch.equal(weights["w"], content(2)["models"][0]["w"])
    assert objects(tmp_path) == sorted(
        ["c/manifest.json", *(f"c/{manifest['folder']}/{name}" for name in manifest["files"])]
    )  # and no mark
    # A copy of the objects is a checkpoint on disk.
    assert check(tmp_path / "bucket/c") == 2


def test_a_local_checkpoint_that_was_copied_there(bucket, tmp_path):
    save_training_state(tmp_path / "bucket/c", **content(5))
    assert check(f"{bucket}/c") == 5


@pytest.mark.parametrize(
    "elements", [BLOCK_HASHED // 4 - 100, BLOCK_HASHED // 4, PART // 4 + 1, 3 * PART // 4]
)
def test_sizes_about_blocks_and_parts(bucket, elements, tmp_path):
    save_training_state(f"{bucket}/c", **content(1, elements))
    assert check(f"{bucket}/c", elements) == 1


def test_empty_files_and_states(bucket):
    def add(folder):
        (folder / "empty").touch()

    save_training_state(f"{bucket}/c", models=[], shared={}, per_rank={}, before_write=add)
    checkpoint = open_training_state(f"{bucket}/c")
    checkpoint.verify()
    assert (checkpoint.local_folder() / "empty").read_bytes() == b""


def test_a_checkpoint_is_replaced_as_a_whole(bucket, tmp_path):
    save_training_state(f"{bucket}/c", **content(1))
    (tmp_path / "bucket/c/notes.txt").write_text("mine")
    first = set(objects(tmp_path))
    save_training_state(f"{bucket}/c", **content(2))
    assert check(f"{bucket}/c") == 2
    assert first & set(objects(tmp_path)) == {"c/manifest.json", "c/notes.txt"}
    assert len(objects(tmp_path)) == len(first)


def test_files_of_hooks(bucket, tmp_path):
    def add(folder):
        (folder / "extra").mkdir()
        (folder / "extra" / "hook.bin").write_bytes(b"x" * 100)

    save_training_state(f"{bucket}/c", **content(1), before_write=add)
    checkpoint = open_training_state(f"{bucket}/c")
    assert checkpoint.manifest.files["extra/hook.bin"].size == 100
    assert (checkpoint.local_folder() / "extra/hook.bin").read_bytes() == b"x" * 100


def test_a_hook_that_takes_a_name_of_the_checkpoint(bucket, tmp_path):
    with pytest.raises(
        CheckpointSaveError, match=r"a save hook wrote state\.json, which is a file of the checkpoint"
    ):
        save_training_state(
            f"{bucket}/c", **content(1), before_write=lambda folder: (folder / "state.json").write_text("x")
        )
    assert objects(tmp_path) == []


def test_each_node_is_refused(bucket):
    with pytest.raises(CheckpointSaveError, match="is shared by all nodes, but save_on_each_node"):
        save_training_state(f"{bucket}/c", **content(1), each_node=True)


def test_a_manifest_of_something_else_is_not_replaced(bucket, tmp_path):
    (tmp_path / "bucket/c").mkdir(parents=True)
    (tmp_path / "bucket/c/manifest.json").write_text('{"format": "docker"}')
    with pytest.raises(CheckpointSaveError, match=r"holds a manifest\.json that cannot be read"):
        save_training_state(f"{bucket}/c", **content(1))
    assert (tmp_path / "bucket/c/manifest.json").read_text() == '{"format": "docker"}'


class Dies:
    """Lets a request fail, and every later one, as if the process were gone."""

    def __init__(self, at, done=False):
        self.left, self.done = at, done

    def __call__(self, kind, path):
        if kind in ("get", "list"):
            return
        self.left -= 1
        if self.left < 0:
            raise PermissionError("the process is dead")


REQUESTS = 7  # of a save that change something, until there is a manifest: the mark, 5 objects, the manifest


def bury(folder):
    """Make the marks those of a process that has ended."""
    marks = list(folder.glob("bucket/.accel-saving/*.json"))
    for mark in marks:
        mark.write_text(json.dumps({**json.loads(mark.read_text()), "born": "0"}))
    return marks


@pytest.mark.filterwarnings("ignore:the uploaded objects of", "ignore:the checkpoint .* is saved, but")
@pytest.mark.parametrize("replaced", [False, True])
def test_death_at_every_request(bucket, tmp_path, replaced):
    elements = 1000
    name = "checkpoint_1" if replaced else "checkpoint_2"
    for at in range(100):
        save_training_state(f"{bucket}/checkpoint_1", **content(1, elements))
        Objects.watch = Dies(at)
        said = f"{bucket}/{name} failed: .*what was there before is unchanged"
        with pytest.raises(CheckpointSaveError, match=said) if at < REQUESTS else contextlib.nullcontext():
            save_training_state(f"{bucket}/{name}", **content(2, elements))
        survived = Objects.watch.left >= 0
        Objects.watch = None
        found = {path.name: check(path, elements) for path in complete_checkpoints(bucket)}
        assert found.get("checkpoint_1") in ((1, 2) if replaced else (1,)), at
        assert found.get("checkpoint_2", 2) == 2
        if survived:
            break
        bury(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a save that did not finish left objects")
            save_training_state(f"{bucket}/checkpoint_7", **content(7))
            save_training_state(f"{bucket}/checkpoint_7", **content(7))  # which looks again
        listed = {"checkpoint_7", *found}
        assert {path.name for path in complete_checkpoints(bucket)} == listed
        expected = sorted(
            f"{name}/{part}"
            for name in listed
            for manifest in [json.loads((tmp_path / "bucket" / name / "manifest.json").read_text())]
            for part in ("manifest.json", *(f"{manifest['folder']}/{file}" for file in manifest["files"]))
        )
        assert objects(tmp_path) == expected, at  # nothing is left of the dead save
        shutil.rmtree(tmp_path / "bucket")
    assert survived


def test_a_failed_save_leaves_nothing(bucket, tmp_path):
    def refuse(kind, path):
        if kind == "put" and path.endswith("state.json"):
            raise PermissionError("Access Denied")

    Objects.watch = refuse
    with pytest.raises(
        CheckpointSaveError, match=r"refused: PermissionError: Access Denied; check the credentials"
    ):
        save_training_state(f"{bucket}/c", **content(1))
    assert objects(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_requests_are_repeated(bucket, monkeypatch):
    monkeypatch.setattr("accel_ckpt.folders.objects.store._PAUSES", (0.0, 0.0))
    failed = {}

    def fail_twice(kind, path):
        failed[kind, path] = failed.get((kind, path), 0) + 1
        if failed[kind, path] <= 2:
            raise ConnectionResetError("reset")

    Objects.watch = fail_twice
    save_training_state(f"{bucket}/c", **content(4))
    failed.clear()
    assert check(f"{bucket}/c") == 4


def test_a_manifest_whose_answer_is_lost(bucket, tmp_path, monkeypatch):
    """The request was carried out, and the client only knows that the connection is gone."""
    monkeypatch.setattr("accel_ckpt.folders.objects.store._PAUSES", ())
    original = Objects.pipe_file

    def lose(self, path, value, **options):
        original(self, path, value, **options)
        if path.endswith("manifest.json"):
            raise ConnectionResetError("reset")

    monkeypatch.setattr(Objects, "pipe_file", lose)
    save_training_state(f"{bucket}/c", **content(6))
    assert check(f"{bucket}/c") == 6


def test_a_manifest_that_may_arrive_later(bucket, tmp_path, monkeypatch):
    """What it lists stays, since the request may be on its way still."""
    monkeypatch.setattr("accel_ckpt.folders.objects.store._PAUSES", ())
    original = Objects.pipe_file
    late = []

    def delay(self, path, value, **options):
        if path.endswith("manifest.json"):
            late.append((path, value))
            raise TimeoutError("no answer")
        original(self, path, value, **options)

    monkeypatch.setattr(Objects, "pipe_file", delay)
    with pytest.raises(CheckpointSaveError, match="no answer"):
        save_training_state(f"{bucket}/c", **content(6))
    assert complete_checkpoints(bucket, "c") == []
    monkeypatch.undo()
    original(Objects(), *late[0])
    assert check(f"{bucket}/c") == 6


def test_an_object_that_the_storage_lost(bucket, tmp_path):
    def lose(kind, path):
        if kind == "list" and "files-" in path:
            for file in pathlib.Path("/", path).glob("model.safetensors"):
                file.unlink()

    Objects.watch = lose
    with pytest.raises(CheckpointSaveError, match="another process writes there, or the storage lost it"):
        save_training_state(f"{bucket}/c", **content(1))
    Objects.watch = None
    assert objects(tmp_path) == []


def test_in_the_background(bucket, tmp_path):
    saver = BackgroundSaver()
    handle = saver.save(f"{bucket}/checkpoint_1", **content(1, PART // 4 + 5))
    assert str(handle.result(60)) == f"{bucket}/checkpoint_1"
    assert check(f"{bucket}/checkpoint_1", PART // 4 + 5) == 1
    Objects.watch = lambda kind, path: Dies(0)(kind, path)
    with pytest.raises(CheckpointSaveError, match="the process is dead"):
        saver.save(f"{bucket}/checkpoint_2", **content(2))
    Objects.watch = None
    assert [path.name for path in complete_checkpoints(bucket)] == ["checkpoint_1"]


def test_pruning_removes_the_manifest_first(bucket, tmp_path):
    for step in (1, 2, 3):
        save_training_state(f"{bucket}/checkpoint_{step}", **content(step))
    deleted = []
    Objects.watch = lambda kind, path: deleted.append(path) if kind == "delete" else None
    assert [path.name for path in prune_checkpoints(bucket, 1)] == ["checkpoint_1", "checkpoint_2"]
    for step in (1, 2):
        own = [path for path in deleted if f"/checkpoint_{step}/" in path]
        assert own[0].endswith("manifest.json")
        assert len(own) > 3
    assert {name.partition("/")[0] for name in objects(tmp_path)} == {"checkpoint_3"}
    with pytest.raises(ValueError, match="at least one checkpoint must stay"):
        prune_checkpoints(bucket, 0)


def test_pruning_that_fails_is_a_warning(bucket):
    for step in (1, 2):
        save_training_state(f"{bucket}/checkpoint_{step}", **content(step))

    def refuse(kind, path):
        if kind == "delete":
            raise PermissionError("Access Denied")

    Objects.watch = refuse
    with pytest.warns(
        UserWarning, match="checkpoint_1 could not be removed, and stays.*removing .* was refused"
    ):
        assert prune_checkpoints(bucket, 1) == []
    assert check(f"{bucket}/checkpoint_2") == 2
    with pytest.warns(UserWarning, match="could not be removed"):
        save_training_state(f"{bucket}/checkpoint_3", **content(3))  # still refused: what is older stays
    assert check(f"{bucket}/checkpoint_3") == 3


def test_a_checkpoint_that_cannot_be_removed_does_not_keep_others_nor_stop_saves(bucket):
    for step in (1, 2, 3):
        save_training_state(f"{bucket}/checkpoint_{step}", **content(step))

    def refuse(kind, path):
        if kind == "delete" and "/checkpoint_1/files-" in path:
            raise PermissionError("Access Denied")

    Objects.watch = refuse
    with pytest.warns(UserWarning, match="checkpoint_1 could not be removed"):
        assert [path.name for path in prune_checkpoints(bucket, 1)] == ["checkpoint_2"]
    with pytest.warns(UserWarning, match="left in .*checkpoint_1 stays"):
        save_from_another_process(bucket)
    assert check(f"{bucket}/checkpoint_4") == 4


def save_from_another_process(bucket):
    """As after a restart: whoever began the removal has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leftovers, "has_ended", lambda owner: True)
        save_training_state(f"{bucket}/checkpoint_4", **content(4))
