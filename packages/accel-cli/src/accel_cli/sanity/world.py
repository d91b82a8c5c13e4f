"""One rank of the world that ``accel test`` starts: runs the checks and writes their results to a file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.whole_files import write_whole

if TYPE_CHECKING:
    from accel_train import Accelerator

__all__ = ["main", "run_checks"]


def main(arguments: list[str]) -> int:
    """Run the checks.

    Args:
        arguments: the folder for the results, which all ranks can write to.

    Returns:
        0, also if a check failed: the results record that.
    """
    from accel_train import Accelerator

    accelerator = Accelerator()
    run_checks(accelerator, Path(arguments[0]))
    accelerator.end_training()
    return 0


def run_checks(
    accelerator: Accelerator, folder: Path, names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Run checks in the world of an accelerator, up to the first that fails, and write their results to a file.

    Args:
        accelerator: one that has prepared nothing.
        folder: one that all ranks can write to.
        names: names of the checks to run; None: all.

    Returns:
        The results, the same on all ranks.
    """
    from accel_cli.sanity.checks import CHECKS, Bench
    from accel_train import gather_object

    bench = Bench(accelerator, folder)
    results: list[dict[str, Any]] = []
    for name, check in CHECKS:
        if names is not None and name not in names:
            continue
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
            write_whole(folder / "results.json", json.dumps(results))  # accel test reads it meanwhile
        if problems:
            break  # the next checks use what this one has made
    return results


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        if sys.platform != "win32":  # ended by Ctrl-C, as without this handler, but without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(130)
