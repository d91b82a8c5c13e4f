import importlib.util
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from accel_ckpt import ObjectStorageError, complete_checkpoints, open_training_state, save_training_state
from accel_ckpt.folders.objects.store import requests_at_once
from accel_ckpt.folders.objects.stores import open_store
from accel_ckpt.locations import location
from accel_state.errors import MissingDependencyError
from testkit.object_storage import Objects


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs")])
def test_file_systems_that_are_not_installed(scheme, package):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    said = rf"{scheme}://bucket/run.* needs {package}, which is not installed: pip install '{package}>="
    with pytest.raises(MissingDependencyError, match=said):
        save_training_state(f"{scheme}://bucket/run", models=[], shared={}, per_rank={})
    with pytest.raises(MissingDependencyError, match=said):
        open_training_state(f"{scheme}://bucket/run")


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingDependencyError, match=r"opened by fsspec.*pip install 'fsspec>="):
        open_training_state("memory://run/c")


def test_unknown_schemes():
    with pytest.raises(
        ObjectStorageError, match=r"nonsense://bucket/run cannot be opened.*such as s3://bucket/run"
    ):
        open_training_state("nonsense://bucket/run")


@pytest.mark.wide
def test_local_saves_import_nothing_of_it(tmp_path):
    script = f"""
import sys
from accel_ckpt import Checkpointer, open_training_state, save_model
import torch
before = set(sys.modules)
model = torch.nn.Linear(2, 2)
checkpointer = Checkpointer({str(tmp_path)!r}, keep=1)
for step in (1, 2):
    checkpointer.save(step, {{"model": model}})
checkpointer.load({{"model": model}})
save_model(model, {str(tmp_path / "model")!r})
later = set(sys.modules) - before
print([n for n in later if n.startswith("fsspec")], [n for n in sys.modules if "accel_ckpt.folders.objects" in n])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_listing_fails_loudly(bucket, monkeypatch):
    monkeypatch.setattr("accel_ckpt.folders.objects.store._PAUSES", (0.0, 0.0))
    save_training_state(f"{bucket}/checkpoint_1", models=[], shared={}, per_rank={})

    def refuse(kind, path):
        if kind == "list":
            raise ConnectionResetError("reset")

    Objects.watch = refuse
    with pytest.raises(
        ObjectStorageError, match=r"listing .* failed: ConnectionResetError: reset; check that the"
    ):
        complete_checkpoints(bucket)  # not "there are none", after which a run would begin anew


def test_names_and_ranges(bucket):
    store = open_store(location(bucket))
    assert store.children() == []
    assert store.sizes() == {}
    store.put("a/b", b"0123456789")
    store.put("c", b"")
    assert store.sizes() == {"a/b": 10, "c": 0}
    assert store.sizes("a") == {"a/b": 10}
    assert store.children() == ["a", "c"]
    assert store.read("a/b", 3, 6) == b"345"
    assert store.read("a/b", 3, 3) == b""
    store.delete(["a/b", "not-there"])
    assert store.sizes() == {"c": 0}


@pytest.mark.parametrize(
    ("about", "time"),
    [
        ({"LastModified": datetime(2026, 1, 1, tzinfo=UTC)}, 1767225600.0),  # s3fs
        ({"last_modified": datetime(2026, 1, 1, tzinfo=UTC)}, 1767225600.0),  # adlfs
        ({"mtime": datetime(2026, 1, 1, tzinfo=UTC), "created": None}, 1767225600.0),  # gcsfs
        ({"mtime": 5.5}, 5.5),
        ({"size": 3}, None),
    ],
)
def test_when_an_object_was_written(about, time, monkeypatch):
    store = open_store(location("memory://times"))
    monkeypatch.setattr(store.fs, "info", lambda path: about)
    assert store.modified("manifest.json") == time


@pytest.mark.parametrize(("ranks", "each"), [(1, 8), (4, 8), (8, 4), (32, 1), (64, 1)])
def test_ranks_of_a_machine_share_the_memory_of_requests(monkeypatch, ranks, each):
    for name, value in {"RANK": 0, "WORLD_SIZE": 128, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert requests_at_once() == each
