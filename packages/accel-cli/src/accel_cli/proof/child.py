"""A rank of a proof: runs the script in the precision of the job.

``python -m accel_cli.proof.child KIND NAME ARGUMENTS…``, with ``ACCELERATE_PROOF``: KIND is ``script`` or ``module``.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from accel_cli.proof.runs import SEED
from accel_state.config.launched import launched_config
from accel_state.seeding import set_seed

__all__ = ["main"]


def main(words: Sequence[str]) -> None:
    """Run the script; the recorder of its `Accelerator` ends it.

    Args:
        words: see the module.
    """
    kind, name, *arguments = words
    proof = launched_config().runtime.proof
    assert proof is not None, "started by accel prove"
    if json.loads(Path(proof).read_text())["double"]:
        torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    set_seed(SEED % 2**32)  # where the script sets none
    sys.argv = [name, *arguments]
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
