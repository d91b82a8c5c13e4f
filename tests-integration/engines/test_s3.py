"""Checkpoints in S3, by s3fs, on a real server (moto) whose answers fail, and with saves that are killed.

Run with ``hatch run engines:s3``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import time
import warnings

import pytest
import torch

import accel_ckpt.remote.s3
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
from testkit.remote_states import LARGE, check, values
from testkit.s3_server import S3Server

pytest.importorskip("s3fs", reason="needs s3fs and moto: hatch run engines:s3")
pytest.importorskip("moto", reason="needs s3fs and moto: hatch run engines:s3")

import boto3
import s3fs

KILLS = 100
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def server():
    with S3Server() as found:
        yield found


@pytest.fixture
def s3(server, monkeypatch):
    """A client of a server without faults and with one empty bucket."""
    server.faults()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    with contextlib.suppress(client.exceptions.NoSuchBucket):
        empty(client)
        client.delete_bucket(Bucket=BUCKET)
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.faults()


def objects(client):
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))


def uploads(client):
    return [one["Key"] for one in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


def empty(client):
    for key in objects(client):
        client.delete_object(Bucket=BUCKET, Key=key)
    for one in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])


def save(name, step, elements=LARGE, **options):
    return remote_states.save(f"s3://{BUCKET}/{name}", step, elements, **options)


def test_round_trip(s3):
    save("run/c", 3)
    assert check(f"s3://{BUCKET}/run/c") == 3
    save("run/c", 4)
    open_training_state(f"s3://{BUCKET}/run/c").verify()
    assert check(f"s3://{BUCKET}/run/c") == 4
    assert len(objects(s3)) == 6  # nothing of the first one
    assert uploads(s3) == []
    handle = BackgroundSaver().save(
        f"s3://{BUCKET}/run/d", models=[{"w": values(5)}], shared={"step": 5}, per_rank={}
    )
    assert str(handle.result(120)) == f"s3://{BUCKET}/run/d"


def test_checkpointer_and_weights(s3):
    model = torch.nn.Linear(8, 8)
    checkpointer = Checkpointer(f"s3://{BUCKET}/steps", keep=2)
    for step in range(4):
        checkpointer.save(step, {"model": model})
    assert checkpointer.steps() == [2, 3]
    checkpointer.verify()
    assert checkpointer.load({"model": model}) == 3
    save_model(model, f"s3://{BUCKET}/weights", max_shard_size="100B")
    other = torch.nn.Linear(8, 8)
    load_checkpoint_in_model(other, f"s3://{BUCKET}/weights")
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "method": "PUT|POST", "times": 3},
        {"kind": "slow_down", "method": "PUT|POST", "times": 3},
        {"kind": "reset", "method": "PUT", "path": "partNumber", "times": 2},
        {"kind": "reset", "method": "PUT", "path": "manifest", "times": 1},
        {"kind": "lost", "method": "PUT", "path": "manifest", "times": 1},
        {"kind": "lost", "method": "POST", "path": "uploadId", "times": 1},  # the end of an upload
        {"kind": "lost", "method": "POST", "path": r"\?uploads", "times": 1},  # its beginning
        {"kind": "slow", "times": 3},
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('method', 'any')}-{fault.get('path', 'any')}",
)
def test_saves_survive(s3, server, fault):
    server.faults(fault)
    save("c", 1)
    assert server.faults()[fault["kind"]] >= 1
    assert check(f"s3://{BUCKET}/c") == 1
    assert uploads(s3) == []


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "method": "GET", "times": 3},
        {"kind": "reset", "method": "GET", "path": "safetensors", "times": 2},
        {"kind": "truncated", "method": "GET", "path": "safetensors", "times": 2},
        {"kind": "slow", "method": "GET", "times": 3},
    ],
    ids=lambda fault: fault["kind"],
)
def test_loads_survive(s3, server, fault):
    save("c", 1)
    server.faults(fault)
    assert check(f"s3://{BUCKET}/c") == 1
    assert server.faults()[fault["kind"]] >= 1


@pytest.mark.filterwarnings("ignore:what was uploaded of")
def test_a_server_that_stops_reading_is_not_waited_for_forever(s3, server, monkeypatch):
    monkeypatch.setattr(accel_ckpt.remote.s3, "LIMIT", 5.0)
    server.faults({"kind": "stuck", "method": "PUT", "path": "partNumber", "times": 1})
    save("c", 1)
    assert server.faults()["stuck"] == 1
    assert check(f"s3://{BUCKET}/c") == 1
    server.faults({"kind": "stuck", "method": "PUT", "path": "partNumber", "times": 1000})
    began = time.monotonic()
    with pytest.raises(CheckpointSaveError, match=r"upload_part of .* failed: FSTimeoutError.*is unchanged"):
        save("c", 2)
    assert time.monotonic() - began < 100
    server.faults()
    assert check(f"s3://{BUCKET}/c") == 1


@pytest.mark.parametrize("path", ["partNumber", "state.json", "manifest", "accel-saving"])
@pytest.mark.parametrize("kind", ["denied", "bad_key"])
@pytest.mark.filterwarnings("ignore:what was uploaded of")
def test_saves_that_are_refused(s3, server, path, kind):
    save("c", 1)
    server.faults({"kind": kind, "method": "PUT", "path": path, "times": 1000})
    with pytest.raises(
        CheckpointSaveError, match=rf"s3://{BUCKET}/.*check the credentials.*is unchanged"
    ) as caught:
        save("c", 2)
    assert "PermissionError" in str(caught.value)
    server.faults()
    assert check(f"s3://{BUCKET}/c") == 1
    assert len(objects(s3)) == 6
    assert uploads(s3) == []


def test_loads_that_are_refused(s3, server):
    save("c", 1)
    server.faults({"kind": "denied", "method": "GET", "times": 1000})
    with pytest.raises(
        ObjectStorageError, match=rf"s3://{BUCKET}/c/manifest.json was refused.*check the credentials"
    ):
        open_training_state(f"s3://{BUCKET}/c")
    with pytest.raises(ObjectStorageError, match="was refused"):  # and not: there are none
        complete_checkpoints(f"s3://{BUCKET}")


def test_missing_objects(s3, server):
    save("c", 1)
    checkpoint = open_training_state(f"s3://{BUCKET}/c")
    server.faults({"kind": "missing", "method": "GET", "path": "model.safetensors", "times": 1000})
    with pytest.raises(CheckpointNotFoundError, match=rf"there is no s3://{BUCKET}/c/files-"):
        _ = checkpoint.models[0]
    server.faults()
    key = next(key for key in objects(s3) if key.endswith("model.safetensors"))
    content = bytearray(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[-1] ^= 1
    s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    with pytest.raises(CorruptCheckpointError, match=rf"s3://{BUCKET}/{key} is not what was saved"):
        check(f"s3://{BUCKET}/c")
    s3.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(CorruptCheckpointError, match=rf"s3://{BUCKET}/{key} is missing"):
        check(f"s3://{BUCKET}/c")


def test_no_credentials(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    script = f"from accel_ckpt import *; open_training_state('s3://{BUCKET}/c')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "ObjectStorageError" in done.stderr
    assert "NoCredentialsError" in done.stderr
    assert "check the credentials" in done.stderr


def test_a_bucket_that_vanishes(s3):
    save("run/checkpoint_1", 1)
    checkpoint = open_training_state(f"s3://{BUCKET}/run/checkpoint_1")
    empty(s3)
    s3.delete_bucket(Bucket=BUCKET)
    gone = "there is no s3://checkpoints/run.*bucket is gone.*check the name, and that the bucket exists"
    with pytest.raises(CheckpointSaveError, match=gone):
        save("run/checkpoint_2", 2)
    for look in (
        lambda: checkpoint.models[0],
        lambda: open_training_state(f"s3://{BUCKET}/run/checkpoint_1"),
        lambda: complete_checkpoints(f"s3://{BUCKET}/run"),
    ):
        with pytest.raises(CheckpointError, match=gone):
            look()


def test_a_server_that_is_gone(monkeypatch):
    with S3Server() as other:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # which has the address of the first server
    began = time.monotonic()
    with pytest.raises(
        ObjectStorageError, match=r"EndpointConnectionError.*check that the storage can be reached"
    ):
        open_training_state(f"s3://{BUCKET}/c")
    assert time.monotonic() - began < 180


def test_the_end_of_a_script_waits_for_a_save(s3):
    script = f"""
import torch

import accel_ckpt.remote.s3
from accel_ckpt import BackgroundSaver
saver = BackgroundSaver()
saver.save("s3://{BUCKET}/c", models=[{{"w": torch.arange({LARGE}, dtype=torch.float32) * 8}}],
    shared={{"step": 7, "moment": torch.full((1000,), 7.0)}}, per_rank={{"rng": torch.tensor([7])}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert check(f"s3://{BUCKET}/c") == 7


def series(environment, pipe):
    """New checkpoints with pruning, and one that is replaced again and again."""
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    step = max(
        (int(path.name.split("_")[1]) for path in complete_checkpoints(f"s3://{BUCKET}/run")), default=0
    )
    while True:
        step += 1
        save(f"run/checkpoint_{step}", step, 4_300_000)  # two parts
        pipe.send(step)
        prune_checkpoints(f"s3://{BUCKET}/run", 2)
        save("run/checkpoint_0", step, 1000)
        pipe.send(step)


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:a save that did not finish left objects")
def test_kills(s3, server):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*worlds._PRELOAD, "s3fs", "accel_ckpt"])
    generator = random.Random(0)
    left = unfinished = 0
    reported = -1
    for number in range(KILLS):
        server.faults(
            {"kind": "error", "times": 1000, "chance": 0.02}, {"kind": "reset", "times": 1000, "chance": 0.01}
        )
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=series, args=(server.environment, theirs))
        process.start()
        theirs.close()
        began = time.monotonic()
        if number % 4:  # else during the first save
            reported = ours.recv()
        time.sleep(generator.uniform(0, 1.5 * (time.monotonic() - began) if number % 4 else 2.0))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):  # what it managed to report since
            while True:
                reported = ours.recv()
        server.faults()
        found = {path.name: check(path) for path in complete_checkpoints(f"s3://{BUCKET}/run")}
        assert max(found.values(), default=-1) >= reported  # what was reported as saved is there, bit for bit
        assert all(name in ("checkpoint_0", f"checkpoint_{step}") for name, step in found.items())
        keys = objects(s3)
        left += any("/.accel-saving/" in key for key in keys)
        unfinished += bool(uploads(s3))
    print(f"{left} of {KILLS} kills left a mark, {unfinished} an unfinished upload")
    assert left > KILLS // 10
    assert unfinished > 0
    for step in (100000, 100001, 100002):
        save(f"run/checkpoint_{step}", step, 1000)
    complete = {path.name for path in complete_checkpoints(f"s3://{BUCKET}/run")}
    assert {key.split("/")[1] for key in objects(s3)} == complete
    assert len(objects(s3)) == 6 * len(complete)  # nothing but what is listed
    assert uploads(s3) == []


def two_ranks(environment):
    from accel_state import PartialState

    os.environ.update(environment)
    rank = PartialState().process_index
    whole = torch.arange(2.0 * LARGE).reshape(2, LARGE)
    mine = Part(whole[rank : rank + 1].clone(), offsets=(rank, 0), shape=(2, LARGE))
    save_training_state(f"s3://{BUCKET}/c", models=[{"w": mine}], shared={"n": 1}, per_rank={"r": rank})
    other = Part(torch.empty(1, LARGE), offsets=(1 - rank, 0), shape=(2, LARGE))
    checkpoint = open_training_state(f"s3://{BUCKET}/c")
    checkpoint.load_model(0, {"w": other})
    assert torch.equal(other.tensor, whole[1 - rank : 2 - rank])
    assert checkpoint.per_rank(rank)["r"] == rank
    PartialState().wait_for_everyone()


def test_two_ranks(s3, server):
    worlds.run(two_ranks, 2, server.environment, timeout=200)
    assert (
        sum(
            key.endswith(("model-shard-00000.safetensors", "model-shard-00001.safetensors"))
            for key in objects(s3)
        )
        == 2
    )


def one_dies(environment, victim, delay):
    import signal
    import threading

    from accel_state import PartialState

    os.environ.update(environment)
    rank = PartialState().process_index
    save_training_state(f"s3://{BUCKET}/c", models=[], shared={"step": 0}, per_rank={"r": rank})
    PartialState().wait_for_everyone()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step = 0
    while True:
        step += 1
        save_training_state(f"s3://{BUCKET}/c", models=[], shared={"step": step}, per_rank={"r": rank})


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_killed(s3, server, victim):
    generator = random.Random(victim)
    for _ in range(3):
        with pytest.raises(worlds.RankError):
            worlds.run(one_dies, 2, server.environment, victim, generator.uniform(0.2, 1.5), timeout=200)
        checkpoint = open_training_state(f"s3://{BUCKET}/c")
        checkpoint.verify()
        assert [checkpoint.per_rank(rank)["r"] for rank in (0, 1)] == [0, 1]
