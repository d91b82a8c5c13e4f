"""Checkpoints in Google Cloud Storage and Azure, by gcsfs and adlfs, on servers on this machine.

Run with ``hatch run engines:clouds``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
import warnings

import pytest
import torch

from accel_ckpt import (
    BackgroundSaver,
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    ObjectStorageError,
    Part,
    complete_checkpoints,
    load_checkpoint_in_model,
    open_training_state,
    prune_checkpoints,
    save_model,
    save_training_state,
)
from testkit import remote_states, worlds
from testkit.cloud_servers import KEY, AzureServer, GcsServer, azurite_folder
from testkit.remote_states import LARGE, check, values

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
    remote_states.save(f"{place}/run/c", 3)
    assert check(f"{place}/run/c") == 3
    remote_states.save(f"{place}/run/c", 4)
    open_training_state(f"{place}/run/c").verify()
    assert check(f"{place}/run/c") == 4
    assert len(cloud.objects(BUCKET)) == 6  # nothing of the first one
    handle = BackgroundSaver().save(
        f"{place}/run/d", models=[{"w": values(5)}], shared={"step": 5}, per_rank={}
    )
    assert str(handle.result(120)) == f"{place}/run/d"


def test_checkpointer_and_weights(place):
    model = torch.nn.Linear(8, 8)
    checkpointer = Checkpointer(f"{place}/steps", keep=2)
    for step in range(4):
        checkpointer.save(step, {"model": model})
    assert checkpointer.steps() == [2, 3]
    checkpointer.verify()
    assert checkpointer.load({"model": model}) == 3
    save_model(model, f"{place}/weights", max_shard_size="100B")
    other = torch.nn.Linear(8, 8)
    load_checkpoint_in_model(other, f"{place}/weights")
    assert torch.equal(other.weight, model.weight)


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


def series(environment, place, pipe):
    """New checkpoints with pruning, and one that is replaced again and again."""
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    step = max((int(path.name.split("_")[1]) for path in complete_checkpoints(f"{place}/run")), default=0)
    while True:
        step += 1
        remote_states.save(f"{place}/run/checkpoint_{step}", step, 4_300_000)  # two parts
        pipe.send(step)
        prune_checkpoints(f"{place}/run", 2)
        remote_states.save(f"{place}/run/checkpoint_0", step, 1000)
        pipe.send(step)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:a save that did not finish left objects")
def test_kills(cloud, place):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*worlds._PRELOAD, "accel_ckpt"])
    generator = random.Random(0)
    reported, left = -1, 0
    for number in range(KILLS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=series, args=(cloud.environment, place, theirs))
        process.start()
        theirs.close()
        began = time.monotonic()
        if number % 4:  # else during the first save
            reported = ours.recv()
        time.sleep(generator.uniform(0, 1.5 * (time.monotonic() - began) if number % 4 else 4.0))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):  # what it managed to report since
            while True:
                reported = ours.recv()
        found = {path.name: check(path) for path in complete_checkpoints(f"{place}/run")}
        assert max(found.values(), default=-1) >= reported  # what was reported as saved is there, bit for bit
        assert all(name in ("checkpoint_0", f"checkpoint_{step}") for name, step in found.items())
        left += any("/.accel-saving/" in name for name in cloud.objects(BUCKET))
    print(f"{left} of {KILLS} kills left a mark")
    assert left > KILLS // 10
    for step in (100000, 100001, 100002):
        remote_states.save(f"{place}/run/checkpoint_{step}", step, 1000)
    complete = {path.name for path in complete_checkpoints(f"{place}/run")}
    assert {name.split("/")[1] for name in cloud.objects(BUCKET)} == complete
    assert len(cloud.objects(BUCKET)) == 6 * len(complete)  # nothing but what is listed


def two_ranks(environment, place):
    from accel_state import PartialState

    os.environ.update(environment)
    rank = PartialState().process_index
    whole = torch.arange(2.0 * LARGE).reshape(2, LARGE)
    mine = Part(whole[rank : rank + 1].clone(), offsets=(rank, 0), shape=(2, LARGE))
    save_training_state(f"{place}/c", models=[{"w": mine}], shared={"n": 1}, per_rank={"r": rank})
    other = Part(torch.empty(1, LARGE), offsets=(1 - rank, 0), shape=(2, LARGE))
    checkpoint = open_training_state(f"{place}/c")
    checkpoint.load_model(0, {"w": other})
    assert torch.equal(other.tensor, whole[1 - rank : 2 - rank])
    assert checkpoint.per_rank(rank)["r"] == rank
    PartialState().wait_for_everyone()


def test_two_ranks(cloud, place):
    worlds.run(two_ranks, 2, cloud.environment, place, timeout=200)
    shards = ("model-shard-00000.safetensors", "model-shard-00001.safetensors")
    assert sum(name.endswith(shards) for name in cloud.objects(BUCKET)) == 2


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
