"""What `import accel_train` and the construction of an `Accelerator` cost on top of `import torch`.

Every measurement is a fresh interpreter; contenders take turns, round after round.

    hatch run bench:import
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import flags, installed, quartiles, turns

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


def main() -> None:
    rounds = flags(__doc__, rounds=9).rounds
    there = installed(dict.fromkeys(package for package, _ in CONTENDERS.values()))
    with tempfile.TemporaryDirectory() as cache:
        calls = {
            name: lambda statement=statement: seconds(statement, cache)
            for name, (package, statement) in CONTENDERS.items()
            if package in there
        }
        found = turns(calls, rounds)  # the round that does not count fills the caches of bytecode and pages
    for name, values in found.items():
        print(f"{name:52} {quartiles([1e3 * value for value in values], '.1f')} ms over import torch")


if __name__ == "__main__":
    main()
