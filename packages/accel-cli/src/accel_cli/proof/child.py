"""A rank of a proof: runs the script as the job says.

``python -m accel_cli.proof.child KIND NAME ARGUMENTS…``, with ``ACCELERATE_PROOF``: KIND is ``script`` or ``module``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from accel_cli.proof.runs import SEED, ProofJob
from accel_cli.proof.scratch import enter
from accel_cli.proof.smaller import cut_data, cut_models
from accel_state.config.launched import launched_config
from accel_state.environment import get_int_from_env
from accel_state.seeding import set_seed
from accel_train.proof.noise import RowNoise

__all__ = ["main"]


def main(words: Sequence[str]) -> None:
    """Run the script; the recorder of its `Accelerator` ends it.

    Args:
        words: see the module.
    """
    kind, name, *arguments = words
    proof = launched_config().runtime.proof
    assert proof is not None, "started by accel prove"
    job, folder = ProofJob(**json.loads(Path(proof).read_text())), Path(proof).parent
    faulthandler.dump_traceback_later(job.limit, exit=True, file=(folder / f"stuck-{os.getpid()}").open("w"))
    if sys.platform == "linux":  # elsewhere the limit counts other things, or does nothing
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory, resource.RLIM_INFINITY))
    if job.double:
        torch.set_default_dtype(torch.float64)
    if job.cut:
        cut_data(job.cut == "odd", folder / "cut", 1 if job.split else get_int_from_env(["WORLD_SIZE"], 1))
    if job.layers:
        cut_models(job.layers)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    set_seed(SEED)  # where the script sets none
    _draw_by_sample()
    sys.argv = [name, *arguments]
    place = str(Path(name).resolve().parent)
    enter(Path(job.files), job.since, job.overwrite)
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = place
        runpy.run_path(name, run_name="__main__")


def _draw_by_sample() -> None:
    """Let a dataset that draws, such as one that augments images, draw the same for a sample on any rank."""
    fetch: Any = _MapDatasetFetcher.fetch
    fetch_next: Any = _IterableDatasetFetcher.fetch

    def plain(self: Any, indices: Any) -> Any:
        self.fetched = getattr(self, "fetched", 0) + 1
        with _drawing(SEED + self.fetched), RowNoise({}):  # wherever ranks fetch ahead
            return fetch_next(self, indices)

    def seeded(self: Any, indices: Any) -> Any:
        numbers = indices if isinstance(indices, list) else [indices]
        if not all(isinstance(number, int) for number in numbers):
            with RowNoise({}):
                return fetch(self, indices)
        collate, auto = self.collate_fn, self.auto_collation
        self.collate_fn = lambda samples: samples
        samples: list[Any] = []
        try:
            for number in numbers:
                with _drawing(SEED + number), RowNoise({}):
                    found = fetch(self, [number] if auto else number)
                samples += found if auto else [found]
        finally:
            self.collate_fn = collate
        with _drawing(SEED), RowNoise({len(numbers): numbers}):
            return collate(samples if auto else samples[0])

    # This process runs nothing but the script.
    _MapDatasetFetcher.fetch = seeded  # type: ignore[method-assign]
    _IterableDatasetFetcher.fetch = plain  # type: ignore[method-assign]


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        set_seed(seed)
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])


if __name__ == "__main__":
    main(sys.argv[1:])
