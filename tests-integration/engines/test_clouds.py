"""Checkpoints in Google Cloud Storage and Azure, by gcsfs and adlfs, on servers on this machine.

Run with ``hatch run engines:clouds``.
"""

from __future__ import annotations

import time

import pytest

from accel_ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    ObjectStorageError,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
)
from testkit import remote_states
from testkit.cloud_servers import KEY, AzureServer, GcsServer, azurite_folder
from testkit.remote_states import check

pytest.importorskip("gcsfs", reason="needs gcsfs and an emulator: hatch run engines:clouds")
pytest.importorskip("adlfs", reason="needs adlfs and Azurite: hatch run engines:clouds")

BUCKET = "checkpoints"
KILLS = 25


@pytest.fixture(params=["gs", "az"])
def server(request):
    """One for each test: the emulator of Google Cloud Storage never lets go of a bucket in which a save was killed."""
    with GcsServer() if request.param == "gs" else AzureServer(azurite_folder()) as found:
        yield found


@pytest.fixture
def cloud(server, monkeypatch):
    """A server with one empty bucket, which file systems find."""
    import fsspec

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class(server.scheme).clear_instance_cache()
    server.make(BUCKET)
    return server


@pytest.fixture
def place(cloud):
    return f"{cloud.scheme}://{BUCKET}"


def test_round_trip(cloud, place):
    remote_states.check_round_trip(place, lambda: cloud.objects(BUCKET))


def test_checkpointer_and_weights(place):
    remote_states.check_checkpointer_and_weights(place)


def test_pruning(cloud, place):
    for step in (1, 2, 3):
        remote_states.save(f"{place}/run/checkpoint_{step}", step, 1000)
    prune_checkpoints(f"{place}/run", 1)
    assert [path.name for path in complete_checkpoints(f"{place}/run")] == ["checkpoint_3"]
    assert {name.split("/")[1] for name in cloud.objects(BUCKET)} == {"checkpoint_3"}


def test_an_empty_bucket_has_no_checkpoints(place):
    assert complete_checkpoints(f"{place}/run") == []
    with pytest.raises(CheckpointNotFoundError, match=r"holds no manifest\.json"):
        open_training_state(f"{place}/run/c")


def test_a_bucket_that_vanishes(cloud, place):
    remote_states.save(f"{place}/run/checkpoint_1", 1)
    checkpoint = open_training_state(f"{place}/run/checkpoint_1")
    cloud.remove(BUCKET)
    gone = rf"there is no {place}/.*bucket is gone.*check the name, and that the bucket exists"
    began = time.monotonic()
    with pytest.raises(CheckpointSaveError, match=gone) as caught:
        remote_states.save(f"{place}/run/checkpoint_2", 2)
    assert "\n" not in str(caught.value)
    for look in (
        lambda: checkpoint.models[0],
        lambda: open_training_state(f"{place}/run/checkpoint_1"),
        lambda: complete_checkpoints(f"{place}/run"),  # and not: there are none
    ):
        with pytest.raises(CheckpointError, match=gone):
            look()
    assert time.monotonic() - began < 60


def test_changed_objects(cloud, place):
    import fsspec

    remote_states.save(f"{place}/c", 1)
    fs = fsspec.filesystem(cloud.scheme)
    name = next(name for name in cloud.objects(BUCKET) if name.endswith("model.safetensors"))
    content = bytearray(fs.cat_file(f"{BUCKET}/{name}"))
    content[-1] ^= 1
    fs.pipe_file(f"{BUCKET}/{name}", bytes(content))
    with pytest.raises(CorruptCheckpointError, match=rf"{place}/{name} is not what was saved"):
        check(f"{place}/c")
    fs.rm_file(f"{BUCKET}/{name}")
    with pytest.raises(CorruptCheckpointError, match=rf"{place}/{name} is missing"):
        check(f"{place}/c")


def test_wrong_credentials(cloud, place, monkeypatch):
    if cloud.scheme == "gs":
        pytest.skip("the emulator of Google Cloud Storage lets everybody in")
    remote_states.save(f"{place}/c", 1, 1000)
    wrong = "A" * (len(KEY) - 2) + "=="
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", cloud.connection(wrong))
    import adlfs

    adlfs.AzureBlobFileSystem.clear_instance_cache()
    for look in (
        lambda: open_training_state(f"{place}/c"),
        lambda: complete_checkpoints(place),
        lambda: remote_states.save(f"{place}/c", 2, 1000),
    ):
        with pytest.raises(CheckpointError, match=r"was refused.*check the credentials"):
            look()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", cloud.connection(KEY))
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    assert check(f"{place}/c") == 1


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:a save that did not finish left objects")
def test_kills(cloud, place):
    remote_states.check_kills(cloud.environment, place, lambda: cloud.objects(BUCKET), kills=KILLS, first=4.0)


def test_two_ranks(cloud, place):
    remote_states.check_two_ranks(cloud.environment, place, lambda: cloud.objects(BUCKET))


@pytest.mark.timeout(600)
def test_a_server_that_is_gone(cloud, monkeypatch):
    kind = GcsServer() if cloud.scheme == "gs" else AzureServer(azurite_folder())
    with kind as other:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
    import fsspec

    fsspec.get_filesystem_class(cloud.scheme).clear_instance_cache()
    began = time.monotonic()
    with pytest.raises(ObjectStorageError, match="check that the storage can be reached"):
        open_training_state(f"{cloud.scheme}://{BUCKET}/c")
    assert time.monotonic() - began < 450  # Azure's client repeats a request for 80 s, and we the call twice
