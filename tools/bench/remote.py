"""Saving to S3: `save_training_state` to a URI, and the same bytes as plain uploads in parallel.

A server (moto) runs in a process of its own on this machine. In each round, in turn: a training state is saved; its
files are uploaded by boto3's transfer manager, one after the other, each in parallel parts of the same size; the same
by s3fs from memory. Numbers are medians of seconds with the range in brackets; the first round is not counted.

    hatch run bench:remote
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import boto3
import s3fs
import torch
from boto3.s3.transfer import TransferConfig
from measure import flags, ratios, spread, table, turns

from accel_ckpt import open_training_state, save_training_state
from accel_ckpt.folders.objects.store import PARALLEL, PART
from testkit.s3_server import S3Server

BUCKET = "bench"


def main() -> None:
    arguments = flags(__doc__, megabytes=400, rounds=5)  # as much of weights as of the rest
    weights = {f"layer_{i}": torch.randn(arguments.megabytes << 15) for i in range(4)}
    moments = {f"moment_{i}": torch.randn(arguments.megabytes << 15) for i in range(4)}
    with S3Server() as server:
        os.environ.update(server.environment)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        fs = s3fs.S3FileSystem(use_listings_cache=False)
        config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=PARALLEL)

        def save() -> None:
            save_training_state(
                f"s3://{BUCKET}/ours", models=[weights], shared={"state": moments}, per_rank={}
            )

        save()
        checkpoint = open_training_state(f"s3://{BUCKET}/ours")
        folder = checkpoint.local_folder()
        files = [folder / name for name in checkpoint.manifest.files]
        content = {path.name: path.read_bytes() for path in files}
        total = sum(map(len, content.values()))

        def boto() -> None:
            for path in files:
                client.upload_file(str(path), BUCKET, f"boto/{path.name}", Config=config)

        def s3() -> None:
            for name, data in content.items():
                fs.pipe_file(f"{BUCKET}/s3fs/{name}", data, chunksize=PART, max_concurrency=PARALLEL)

        ways: dict[str, Callable[[], None]] = {"save_training_state": save, "boto3": boto, "s3fs": s3}

        def measured(way: Callable[[], None]) -> tuple[float, float, float]:
            for key in fs.find(BUCKET):
                fs.rm_file(key)
            began, used, served = time.perf_counter(), time.process_time(), server.processor_seconds()
            way()
            here = time.process_time() - used
            return time.perf_counter() - began, here, server.processor_seconds() - served

        found = turns({name: lambda way=way: measured(way) for name, way in ways.items()}, arguments.rounds)
    print(f"{total / 1e6:.0f} MB in {len(files)} files")
    rows, first = [], [took for took, _, _ in found["save_training_state"]]
    for name, samples in found.items():
        took, here, there = zip(*samples, strict=True)
        over = spread(ratios(first, took))
        rows.append(
            [name, spread(took), total / statistics.median(took) // 1e6, spread(here), spread(there), over]
        )
    table(["", "s", "MB/s", "processor s", "of the server", "ours in ratio to it"], rows)


if __name__ == "__main__":
    main()
