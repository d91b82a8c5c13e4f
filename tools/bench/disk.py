"""What the disk gives: 3 GB written past the page cache, one block at a time or several, and put on the disk.

GB/s, medians with the range in brackets; everything in turn, round after round. It says whether a writer with more
requests on their way would be faster than `accel_ckpt.format.blocks`, which has one.

    hatch run bench:disk
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from pathlib import Path

from measure import flags, spread, table, turns

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


def main() -> None:
    given = flags(__doc__, gigabytes=3, rounds=7, folder=Path.cwd())
    total = given.gigabytes << 30
    ways = [(1, 16, False), (2, 16, False), (4, 16, False), (4, 4, False), (1, 64, False), (1, 16, True)]
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=given.folder) as folder:
        file = Path(folder) / "file"
        calls = {
            way: lambda way=way: total / write(file, total, way[0], way[1] * MB, way[2]) / 1e9 for way in ways
        }
        found = turns(calls, given.rounds, warm=0)
    rows = [[*way[:2], "yes" if way[2] else "no", spread(rates)] for way, rates in found.items()]
    table(["blocks on their way", "MB each", "preallocated", "GB/s"], rows)


if __name__ == "__main__":
    main()
