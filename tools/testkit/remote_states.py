"""Training states whose content follows from a number, and what every object storage must do with them."""

from __future__ import annotations

import contextlib
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_ckpt import (
    BackgroundSaver,
    Checkpointer,
    Part,
    complete_checkpoints,
    load_checkpoint_in_model,
    open_training_state,
    prune_checkpoints,
    save_model,
    save_training_state,
)
from testkit import worlds

LARGE = 10_000_000
"""Elements: 40 MB, three parts of an upload."""


def values(step: int, elements: int = LARGE) -> Tensor:
    return torch.arange(elements, dtype=torch.float32) * (step + 1)


def save(place: str, step: int, elements: int = LARGE, **options: Any) -> Any:
    """Save the state of a step, of six objects."""
    return save_training_state(
        place,
        models=[{"w": values(step, elements)}],
        shared={"step": step, "moment": torch.full((1000,), float(step))},
        per_rank={"rng": torch.tensor([step])},
        **options,
    )


def check(place: str | Path) -> int:
    """Compare every value of a state with what its step says; returns the step."""
    checkpoint = open_training_state(place)
    step: int = checkpoint.shared["step"]
    weights = checkpoint.models[0]["w"]
    assert torch.equal(weights, values(step, len(weights)))
    assert torch.equal(checkpoint.shared["moment"], torch.full((1000,), float(step)))
    assert checkpoint.per_rank(0)["rng"].tolist() == [step]
    return step


def check_round_trip(place: str, objects: Callable[[], list[str]]) -> None:
    """Save, replace what was saved, and save in the background.

    Args:
        place: an empty bucket.
        objects: names of all objects in it.
    """
    save(f"{place}/run/c", 3)
    assert check(f"{place}/run/c") == 3
    save(f"{place}/run/c", 4)
    open_training_state(f"{place}/run/c").verify()
    assert check(f"{place}/run/c") == 4
    assert len(objects()) == 6  # nothing of the first one
    handle = BackgroundSaver().save(
        f"{place}/run/d", models=[{"w": values(5)}], shared={"step": 5}, per_rank={}
    )
    assert str(handle.result(120)) == f"{place}/run/d"


def check_checkpointer_and_weights(place: str) -> None:
    """Steps with pruning, and weights in several files."""
    model = torch.nn.Linear(8, 8)
    checkpointer = Checkpointer(f"{place}/steps", keep=2)
    for step in range(4):
        checkpointer.save(step, {"model": model})
    assert checkpointer.steps() == [2, 3]
    checkpointer.verify()
    assert checkpointer.load({"model": model}) == 3
    save_model(model, f"{place}/weights", max_shard_size="100B")
    other = torch.nn.Linear(8, 8)
    load_checkpoint_in_model(other, f"{place}/weights")
    assert torch.equal(other.weight, model.weight)


def check_two_ranks(environment: dict[str, str], place: str, objects: Callable[[], list[str]]) -> None:
    """Each rank writes its part, and reads the other's."""
    worlds.run(_parts, 2, environment, place, timeout=200)
    shards = ("model-shard-00000.safetensors", "model-shard-00001.safetensors")
    assert sum(name.endswith(shards) for name in objects()) == 2


def _parts(environment: dict[str, str], place: str) -> None:
    from accel_state import PartialState

    os.environ.update(environment)
    rank = PartialState().process_index
    whole = torch.arange(2.0 * LARGE).reshape(2, LARGE)
    mine = Part(whole[rank : rank + 1].clone(), offsets=(rank, 0), shape=(2, LARGE))
    save_training_state(f"{place}/c", models=[{"w": mine}], shared={"n": 1}, per_rank={"r": rank})
    other = Part(torch.empty(1, LARGE), offsets=(1 - rank, 0), shape=(2, LARGE))
    checkpoint = open_training_state(f"{place}/c")
    checkpoint.load_model(0, {"w": other})
    assert torch.equal(other.tensor, whole[1 - rank : 2 - rank])
    assert checkpoint.per_rank(rank)["r"] == rank
    PartialState().wait_for_everyone()


def _series(environment: dict[str, str], place: str, pipe: Any) -> None:
    """New checkpoints with pruning, and one that is replaced again and again."""
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    step = max((int(path.name.split("_")[1]) for path in complete_checkpoints(f"{place}/run")), default=0)
    while True:
        step += 1
        save(f"{place}/run/checkpoint_{step}", step, 4_300_000)  # two parts
        pipe.send(step)
        prune_checkpoints(f"{place}/run", 2)
        save(f"{place}/run/checkpoint_0", step, 1000)
        pipe.send(step)


def check_kills(
    environment: dict[str, str],
    place: str,
    objects: Callable[[], list[str]],
    *,
    kills: int,
    first: float,
    preload: Sequence[str] = (),
    disturb: Callable[[], object] = lambda: None,
    calm: Callable[[], object] = lambda: None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Kill processes while they save, and compare what is there with what they reported.

    Args:
        environment: in which the storage is found.
        place: an empty bucket.
        objects: names of all objects in it.
        kills: how many.
        first: seconds within which a process is killed during its first save.
        preload: modules that the server of processes imports once.
        disturb: called before a process is started.
        calm: called when it is killed.
        look: called after what is there was compared.
    """
    context = worlds.context(*preload, "accel_ckpt")
    generator = random.Random(0)
    reported, left = -1, 0
    for number in range(kills):
        disturb()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_series, args=(environment, place, theirs))
        process.start()
        theirs.close()
        began = time.monotonic()
        if number % 4:  # else during the first save
            reported = ours.recv()
        time.sleep(generator.uniform(0, 1.5 * (time.monotonic() - began) if number % 4 else first))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):  # what it managed to report since
            while True:
                reported = ours.recv()
        calm()
        found = {path.name: check(path) for path in complete_checkpoints(f"{place}/run")}
        assert max(found.values(), default=-1) >= reported  # what was reported as saved is there, bit for bit
        assert all(name in ("checkpoint_0", f"checkpoint_{step}") for name, step in found.items())
        left += any("/.accel-saving/" in name for name in objects())
        look()
    print(f"{left} of {kills} kills left a mark")
    assert left > kills // 10
    for step in (100000, 100001, 100002):
        save(f"{place}/run/checkpoint_{step}", step, 1000)
    complete = {path.name for path in complete_checkpoints(f"{place}/run")}
    assert {name.split("/")[1] for name in objects()} == complete
    assert len(objects()) == 6 * len(complete)  # nothing but what is listed
