"""What ranks receive from each other, as a function of their number: docs/architecture/growth.md has the table.

The kernel counts the bytes of each connection. Small worlds also send the messages of large ones, where the numbers of
ranks from which those begin are set lower.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from testkit import worlds
from testkit.traffic import GATHERED, REDUCED, SENT, STEP, Meter, Traffic, agreement, steps

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the counters are those of Linux")

PARAMETERS = 2 * (64 * 64 + 64) * 4
SMALL, LARGE = 16, 1 << 20
OBJECTS = 10_000
PICKLED = OBJECTS + 21


def as_in(regime: str) -> None:
    """Let a small world send what a world of `regime` sends."""
    from accel_ckpt.coordination import ranks
    from accel_state.communication import blocks

    if regime != "up to 8":
        blocks._DIRECT = ranks._FEW = 1
    if regime == "above 128":
        blocks._TOGETHER = 1


def scenario(folder: str, regime: str, fsdp: bool) -> dict[str, Traffic]:
    as_in(regime)
    warnings.simplefilter("ignore")
    from accel_state import broadcast_object_list, gather_object
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (Path(folder) / "met").mkdir(exist_ok=True)
    meter = Meter(rank, ranks, Path(folder) / "met")
    found: dict[str, Traffic] = {}
    made: list[Any] = []

    def measure(name: str, action: Callable[[], Any]) -> None:
        found[name] = meter(action)

    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if fsdp else None
    measure("Accelerator", lambda: made.append(Accelerator(fsdp_plugin=plugin)))
    accelerator = made[0]
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(64 * ranks, 64))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    measure("prepare model", lambda: made.extend(accelerator.prepare(model, optimizer)))
    measure("prepare loader", lambda: made.append(accelerator.prepare(loader)))
    _, model, optimizer, loader = made
    batches = iter(loader)

    def step() -> None:
        (x,) = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    for number in range(1, 7):
        measure(f"step {number}", step)
    small, large = torch.ones(SMALL // 4) * rank, torch.ones(LARGE // 4)
    measure("wait_for_everyone", accelerator.wait_for_everyone)
    measure("gather small", lambda: accelerator.gather(small))
    measure("gather large", lambda: accelerator.gather(large))
    measure("gather_for_metrics", lambda: accelerator.gather_for_metrics(small))
    measure("reduce small", lambda: accelerator.reduce(small))
    measure("reduce large", lambda: accelerator.reduce(large))
    measure("pad_across_processes", lambda: accelerator.pad_across_processes(small))
    measure("gather_object alike", lambda: gather_object(["x" * OBJECTS]))
    measure("gather_object", lambda: gather_object([str(rank) * OBJECTS]))
    measure("broadcast_object_list", lambda: broadcast_object_list(["x" * OBJECTS]))
    state = f"{folder}/state"
    measure("save_state", lambda: accelerator.save_state(state))
    measure("save_state again", lambda: accelerator.save_state(state))
    measure("load_state", lambda: accelerator.load_state(state))
    measure("save_model", lambda: accelerator.save_model(model, f"{folder}/model"))
    return found


def expected(regime: str, ranks: int, first: bool) -> dict[str, int]:
    """What the first and the last rank receive."""
    others, one = ranks - 1, agreement(regime, ranks, first)
    apart = regime == "above 128"  # data follow their check
    gathered = {size: one + others * (size + GATHERED) for size in (SMALL, 2 * SMALL, LARGE, PICKLED)}
    return {
        "prepare loader": one,
        "step 6": 2 * others * PARAMETERS // ranks + others * REDUCED,
        "wait_for_everyone": one,
        "gather small": gathered[SMALL] if apart else one,
        "gather large": gathered[LARGE],
        "gather_for_metrics": gathered[2 * SMALL] if apart else one,
        "reduce large": one + 2 * others * LARGE // ranks + others * REDUCED,
        "pad_across_processes": one,
        "gather_object alike": one if apart else gathered[PICKLED],
        "gather_object": gathered[PICKLED],
        "broadcast_object_list": one + (STEP * steps(ranks) if first else PICKLED + SENT),
    }


REGIMES = ["up to 8", "up to 128", "above 128"]
WORLDS = [2, 4, pytest.param(8, marks=pytest.mark.wide)]
LAST_SAVES = 1633
"""Bytes that any rank but the first receives in a save above 128 ranks."""


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_what_ranks_receive(tmp_path, regime, ranks):
    found = worlds.run(scenario, ranks, str(tmp_path), regime, False, timeout=120)
    for first, costs in ((True, found[0]), (False, found[-1])):
        one = agreement(regime, ranks, first)
        wanted = expected(regime, ranks, first)
        assert {name: costs[name].received for name in wanted} == wanted
        # Each of the first windows compares replicas by three small reductions.
        small = 0 if regime != "above 128" else REDUCED * ranks
        assert one <= costs["reduce small"].received <= one + small
        assert 3 * one <= costs["step 4"].received - costs["step 6"].received <= 3 * (one + small)
        assert_saves(costs, regime, ranks, first)
        assert_loads(costs, 3, regime, ranks, first)
        assert costs["save_state again"] == costs["save_state"]._replace(
            from_store=costs["save_state again"].from_store, at_store=costs["save_state again"].at_store
        )
        assert costs["save_model"].received == 0


def assert_saves(costs, regime, ranks, first):
    """Six agreements in a small world; in a larger one each is a comparison, and the first gets what was written."""
    received, one = costs["save_state"].received, agreement(regime, ranks, first)
    if regime == "up to 8":
        assert received == 6 * one
    elif first:
        assert 0 < received - 7 * one <= 1000 * (ranks - 1)
    elif regime == "above 128":
        assert received == LAST_SAVES
    else:
        assert received == 7 * one + STEP


def assert_loads(costs, agreements, regime, ranks, first):
    """The first rank gives the manifest and the shared trees to all; a tree sends them."""
    data = costs["load_state"].received - agreements * agreement(regime, ranks, first)
    if regime != "above 128":  # it travels in the agreement, as far as there is room
        assert 0 <= data < 20_000, data
    elif first:
        assert 0 <= data <= STEP * steps(ranks)
    else:
        assert 2000 < data < 20_000


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    "regime", ["up to 8", pytest.param("up to 128", marks=pytest.mark.wide), "above 128"]
)
def test_what_fsdp_receives(tmp_path, regime, ranks):
    found = worlds.run(scenario, ranks, str(tmp_path), regime, True, timeout=120)
    parts = (ranks - 1) * PARAMETERS // ranks
    for first, costs in ((True, found[0]), (False, found[-1])):
        # Two all-gathers and a reduce-scatter, from the second step on without a comparison.
        for number in (2, 6):
            assert costs[f"step {number}"].collectives == 3
            assert 3 * parts <= costs[f"step {number}"].received <= 3 * (parts + 500 * ranks)
        assert_loads(costs, 4, regime, ranks, first)
        assert_saves(costs, regime, ranks, first)


@pytest.mark.parametrize("ranks", WORLDS)
def test_what_the_store_gets(tmp_path, ranks):
    """Only the start and the watchdog's question, once a second, go through the store."""
    found = worlds.run(idle, ranks, str(tmp_path))
    for start, waiting, moving in found:
        # Two groups, in each of which gloo connects to every rank; who waits for a late rank asks a few times more.
        assert start.from_store <= 1000 * ranks + 1000
        assert waiting.from_store == pytest.approx(8 * SECONDS, abs=8)
        assert moving.received == 0
    start, waiting, _ = found[0]
    assert start.at_store <= 320 * ranks**2 + 4000 * ranks  # with what late ranks make the others ask
    assert waiting.at_store == pytest.approx(43 * ranks * SECONDS, abs=43 * ranks)


SECONDS = 3


def idle(folder: str) -> list[Traffic]:
    from accel_state import PartialState

    meter = Meter(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder))
    return [meter(lambda: PartialState(cpu=True)), meter(lambda: time.sleep(SECONDS)), meter(lambda: None)]
