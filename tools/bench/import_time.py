"""What `import accel_train` and the construction of an `Accelerator` cost on top of `import torch`.

Every measurement is a fresh interpreter; contenders take turns, round after round.

    hatch run bench:import
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import time
import torch
began = time.perf_counter()
{}
print(time.perf_counter() - began)
"""

ALIAS = Path(__file__).parents[2] / "packages/accel-cli/src/accel_cli/as_accelerate/path"
_USE_ALIAS = f"import sys; sys.path.insert(0, {str(ALIAS)!r}); "
# Of each contender the package that must be installed, and the statement.
CONTENDERS = {
    "import accel_train": ("accel_train", "import accel_train"),
    "from accel_train import Accelerator": ("accel_train", "from accel_train import Accelerator"),
    "… and Accelerator()": ("accel_train", "from accel_train import Accelerator; Accelerator(cpu=True)"),
    "import accelerate, answered by accel": ("accel_cli", f"{_USE_ALIAS}import accelerate"),
    "from accelerate import Accelerator, answered by accel": (
        "accel_cli",
        f"{_USE_ALIAS}from accelerate import Accelerator",
    ),
    "import accelerate": ("accelerate", "import accelerate"),
    "from accelerate import Accelerator; Accelerator()": (
        "accelerate",
        "from accelerate import Accelerator; Accelerator(cpu=True)",
    ),
    "import lightning_fabric": ("lightning_fabric", "import lightning_fabric"),
}


def seconds(statement: str, cache: str) -> float:
    """Time of a statement in a fresh interpreter that has imported torch.

    Installed packages come with compiled bytecode; these get theirs in the folder `cache`.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = cache
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(statement)],
        check=True,
        capture_output=True,
        text=True,
        env=environ,
    )
    return float(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    contenders = {
        name: statement
        for name, (package, statement) in CONTENDERS.items()
        if importlib.util.find_spec(package) is not None
    }
    for name in CONTENDERS.keys() - contenders.keys():
        print(f"{name}: NOT RUN, the package is not installed")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(rounds + 1):
            for name, statement in contenders.items():
                elapsed = seconds(statement, cache)
                if turn:  # the first round fills the caches of bytecode and pages
                    times[name].append(elapsed)
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"{name:52}{middle * 1e3:8.1f} ms over import torch   quartiles {low * 1e3:.1f} to {high * 1e3:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
