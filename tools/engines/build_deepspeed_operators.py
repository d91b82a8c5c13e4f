"""Compile the operators of DeepSpeed that the tests use, before a test with a time-out needs them.

A build takes minutes. One that is killed leaves a lock behind, for which every later one waits for ever; locks older
than an hour, or all with ``--locks``, are removed first.

    python tools/engines/build_deepspeed_operators.py [--locks]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_OLD = 3600.0


def main(arguments: list[str]) -> int:
    """Remove stale locks, and build."""
    for lock in Path(get_default_build_root()).glob("*/*/lock"):
        if "--locks" in arguments or time.time() - lock.stat().st_mtime > _OLD:
            print(f"removing {lock}, which a killed build left")
            lock.unlink()
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    # The last one is what DeepSpeed without our strategy, and Accelerate, load when they start.
    for builder in (CPUAdamBuilder(), AsyncIOBuilder(), ShareMemCommBuilder()):
        began = time.perf_counter()
        builder.load(verbose=False)
        print(f"{builder.NAME}: ready after {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
