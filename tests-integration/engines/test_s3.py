"""Checkpoints in S3, by s3fs, on a real server (moto) whose answers fail, and with saves that are killed.

Run with ``hatch run engines:s3``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import pytest

import accel_ckpt.folders.objects.s3
from accel_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    ObjectStorageError,
    complete_checkpoints,
    open_training_state,
    save_training_state,
)
from testkit import remote_states, worlds
from testkit.remote_states import LARGE, check
from testkit.s3_server import S3Server

pytest.importorskip("s3fs", reason="needs s3fs and moto: hatch run engines:s3")
pytest.importorskip("moto", reason="needs s3fs and moto: hatch run engines:s3")

import boto3
import s3fs

KILLS = 100
BUCKET = "checkpoints"
PLACE = f"s3://{BUCKET}"


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
    remote_states.check_round_trip(PLACE, lambda: objects(s3))
    assert uploads(s3) == []


def test_checkpointer_and_weights(s3):
    remote_states.check_checkpointer_and_weights(PLACE)


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


@pytest.mark.filterwarnings("ignore:the uploaded objects of")
def test_a_server_that_stops_reading_is_not_waited_for_forever(s3, server, monkeypatch):
    monkeypatch.setattr(accel_ckpt.folders.objects.s3, "LIMIT", 5.0)
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
@pytest.mark.filterwarnings("ignore:the uploaded objects of")
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

import accel_ckpt.folders.objects.s3
from accel_ckpt import BackgroundSaver
saver = BackgroundSaver()
saver.save("s3://{BUCKET}/c", models=[{{"w": torch.arange({LARGE}, dtype=torch.float32) * 8}}],
    shared={{"step": 7, "moment": torch.full((1000,), 7.0)}}, per_rank={{"rng": torch.tensor([7])}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert check(f"s3://{BUCKET}/c") == 7


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:a save that did not finish left objects")
def test_kills(s3, server):
    unfinished = []
    remote_states.check_kills(
        server.environment,
        PLACE,
        lambda: objects(s3),
        kills=KILLS,
        first=2.0,
        preload=["s3fs"],
        disturb=lambda: server.faults(
            {"kind": "error", "times": 1000, "chance": 0.02}, {"kind": "reset", "times": 1000, "chance": 0.01}
        ),
        calm=server.faults,
        look=lambda: unfinished.append(bool(uploads(s3))),
    )
    print(f"{sum(unfinished)} left an unfinished upload")
    assert sum(unfinished) > 0
    assert uploads(s3) == []


def test_two_ranks(s3, server):
    remote_states.check_two_ranks(server.environment, PLACE, lambda: objects(s3))


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


def test_the_command_lists_compares_and_removes(s3, capsys):
    from accel_cli.app import main

    checkpointer = Checkpointer(f"{PLACE}/run")
    for step in (1, 2, 3):
        checkpointer.save(step, {"step": step})
    assert main(["checkpoint", "ls", f"{PLACE}/run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["state"]) for one in found] == [(step, "complete") for step in (1, 2, 3)]
    assert all(abs(one["saved"] - time.time()) < 600 for one in found)
    assert main(["checkpoint", "diff", f"{PLACE}/run/step_1", f"{PLACE}/run/step_2"]) == 1
    assert main(["checkpoint", "verify", f"{PLACE}/run/step_1"]) == 0
    assert main(["checkpoint", "prune", f"{PLACE}/run", "--keep", "1", "--yes"]) == 0
    assert checkpointer.steps() == [3]
    assert main(["checkpoint", "ls", "s3://no-such-bucket/run"]) == 2
