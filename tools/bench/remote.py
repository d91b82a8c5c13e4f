"""Saving to S3: `save_training_state` to a URI, and the same bytes as plain uploads in parallel.

A server (moto) runs in a process of its own on this machine. In each round, in turn: a training state is saved; its
files are uploaded by boto3's transfer manager, one after the other, each in parallel parts of the same size; the same
by s3fs from memory. Numbers are medians of seconds with the range in brackets; the first round is not counted.

    hatch run bench:remote
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import boto3
import s3fs
import torch
from boto3.s3.transfer import TransferConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from accel_ckpt import open_training_state, save_training_state
from accel_ckpt.folders.objects.store import PARALLEL, PART
from testkit.s3_server import S3Server

BUCKET = "bench"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--megabytes", type=int, default=400, help="of the state: as much of weights as of the rest"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
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
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        here: dict[str, list[float]] = {name: [] for name in ways}
        there: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                for key in fs.find(BUCKET):
                    fs.rm_file(key)
                began, used, served = time.perf_counter(), time.process_time(), server.processor_seconds()
                way()
                if number:
                    seconds[name].append(time.perf_counter() - began)
                    here[name].append(time.process_time() - used)
                    there[name].append(server.processor_seconds() - served)
        print(f"{total / 1e6:.0f} MB in {len(files)} files\n")
        print("| | s | MB/s | processor s | of the server |\n|---|---|---|---|---|")
        for name, found in seconds.items():
            speed = total / statistics.median(found) / 1e6
            print(
                f"| {name} | {spread(found)} | {speed:.0f} | {spread(here[name])} | {spread(there[name])} |"
            )
        for name in ("boto3", "s3fs"):
            ratios = [a / b for a, b in zip(seconds["save_training_state"], seconds[name], strict=True)]
            print(f"\nours / {name}: {spread(ratios)}")
    return 0


def spread(values: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


if __name__ == "__main__":
    raise SystemExit(main())
