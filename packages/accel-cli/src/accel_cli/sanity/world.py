"""One rank of the world that ``accel test`` starts: runs the checks and writes their results to a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from accel_cli.sanity.checks import CHECKS, Bench

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the checks.

    Args:
        arguments: the folder for the results, which all ranks can write to.

    Returns:
        0, also if a check failed: the results tell.
    """
    from accel_train import Accelerator, gather_object

    folder = Path(arguments[0])
    bench = Bench(Accelerator(), folder)
    results: list[dict[str, Any]] = []
    for name, check in CHECKS:
        began = time.perf_counter()
        problem = ""
        bench.found = ""
        try:
            check(bench)
        except AssertionError as error:
            problem = f"rank {bench.accelerator.process_index}: {error}"
        # Ranks agree before the next check: one that failed alone would leave the others waiting in a collective.
        problems = [text for text in gather_object([problem]) if text]
        took = time.perf_counter() - began
        results.append({"name": name, "seconds": round(took, 3), "found": bench.found, "problems": problems})
        if bench.accelerator.is_main_process:
            (folder / "results.json").write_text(json.dumps(results))
        if problems:
            break  # the next checks use what this one has made
    bench.accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
