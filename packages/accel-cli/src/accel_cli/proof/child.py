"""The process of a proof that has loaded torch and forks its runs, because loading it takes longer than most runs; and
a rank of such a run, which does with the script what the job says.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from accel_cli.proof.runs import SEED, ProofJob
from accel_cli.proof.scratch import enter
from accel_cli.proof.smaller import cut_data, cut_models
from accel_state import environment
from accel_state.config.launched import launched_config
from accel_state.environment import get_int_from_env
from accel_state.launching import notebook
from accel_state.launching.ranks.worker import become
from accel_state.seeding import set_seed
from accel_train.proof.noise import RowNoise

__all__ = ["main"]


def main() -> None:
    """Fork one process for each line of standard input, and write its exit code."""
    import_module("accel_train.accelerator")  # scripts need it
    # Loads torch's compiler, which takes longer than most runs.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if not child:
            _become(task)
            notebook.notebook_launcher(run_script, (task["words"],), num_processes=task["ranks"])
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(task: Mapping[str, Any]) -> None:
    """Take streams, environment and path of a run."""
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT, 0o666)
    for descriptor, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, stream)
    environment.replace(task["environment"])
    more = [
        part for part in task["environment"].get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path
    ]
    sys.path[1:1] = more


def run_script(words: Sequence[str]) -> None:
    """Run the script; the recorder of its `Accelerator` ends it.

    Args:
        words: KIND, NAME and arguments; KIND is ``script`` or ``module``.
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
    notebook.notebook_launcher = notebook.debug_launcher = _called
    set_seed(SEED + get_int_from_env(["RANK"], 0))  # where the script sets none, ranks have their own
    _draw_by_sample()
    enter(Path(job.files), job.since, job.overwrite)
    become(kind, name, arguments)


def _called(function: Callable[..., Any], args: Iterable[Any] = (), *_: Any, **__: Any) -> None:
    """What a script that starts its own ranks gets here: this process is one already."""
    function(*args)


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
    main()
