"""What the disk gives: 3 GB written past the page cache, one block at a time or several, and put on the disk.

GB/s, medians with the range in brackets; everything in turn, round after round. It says whether a writer with more
requests on their way would be faster than `accel_ckpt.format.blocks`, which has one.

    hatch run bench:disk
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

MB = 1 << 20


def write(path: Path, total: int, writers: int, block: int, preallocate: bool) -> float:
    """Seconds to write `total` bytes by so many threads, each with a block of its own."""
    blocks = [mmap.mmap(-1, block) for _ in range(writers)]
    for memory in blocks:
        memory.write(os.urandom(MB) * (block // MB))
    os.sync()
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    began = time.perf_counter()
    if preallocate:
        os.posix_fallocate(descriptor, 0, total)
    offsets = iter(range(0, total, block))
    lock = threading.Lock()

    def work(memory: mmap.mmap) -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.pwrite(descriptor, memory, offset)

    threads = [threading.Thread(target=work, args=(memory,)) for memory in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    os.close(descriptor)
    spent = time.perf_counter() - began
    path.unlink()
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; a new folder below the current one"
    )
    arguments = parser.parse_args()
    total = arguments.gigabytes << 30
    ways = [(1, 16, False), (2, 16, False), (4, 16, False), (4, 4, False), (1, 64, False), (1, 16, True)]
    rates: dict[tuple[int, int, bool], list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder or Path.cwd()) as folder:
        for _ in range(arguments.rounds):
            for writers, megabytes, preallocate in ways:
                spent = write(Path(folder) / "file", total, writers, megabytes * MB, preallocate)
                rates[writers, megabytes, preallocate].append(total / spent / 1e9)
    print("| blocks on their way | MB each | preallocated | GB/s |\n|---|---|---|---|")
    for (writers, megabytes, preallocate), found in rates.items():
        median, low, high = statistics.median(found), min(found), max(found)
        print(
            f"| {writers} | {megabytes} | {'yes' if preallocate else 'no'} | {median:.2f} [{low:.2f}-{high:.2f}] |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
