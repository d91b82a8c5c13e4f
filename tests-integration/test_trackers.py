"""Trackers on two ranks: where they run, and that no call waits for another rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train import Accelerator, GeneralTracker
from testkit import worlds


class Lines(GeneralTracker):
    """Writes a line per call to a file of the rank."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__()
        self.file = Path(folder) / f"{rank}.jsonl"

    @property
    def tracker(self) -> Path:
        return self.file

    def _write(self, *line: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start(self) -> None:
        self._write("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write("log", values, step)

    def finish(self) -> None:
        self._write("finish")


class OnEveryRank(Lines):
    """A run for each rank."""

    main_process_only = False


def lines(folder: Path, rank: int) -> list[Any] | None:
    file = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else None


def train(kind: type[Lines], folder: str, start_on: str) -> dict[str, Any]:
    from accel_state.world.process import PartialState

    rank = PartialState().process_index
    accelerator = Accelerator(log_with=kind(folder, rank))
    if start_on == "all" or accelerator.is_main_process:
        accelerator.init_trackers("proj", {"lr": 0.1})
    accelerator.log({"loss": rank}, step=1)  # on every rank
    if accelerator.is_main_process:
        accelerator.log({"main": True}, step=2)  # on one of them
    else:
        accelerator.log({"other": True}, step=3)
    accelerator.wait_for_everyone()
    engine = accelerator.get_tracker("lines", unwrap=True) if start_on == "all" else None
    name = str(engine.name) if isinstance(engine, Path) else type(engine).__name__
    accelerator.end_training()
    return {"running": len(accelerator.trackers), "engine": name}


@pytest.mark.parametrize("start_on", ["all", "main"])
def test_on_the_main_process(tmp_path, start_on):
    first, second = worlds.run(train, 2, Lines, str(tmp_path), start_on)
    assert lines(tmp_path, 0) == [
        ["start"],
        ["config", {"lr": 0.1}],
        ["log", {"loss": 0}, 1],
        ["log", {"main": True}, 2],
        ["finish"],
    ]
    assert lines(tmp_path, 1) is None
    assert (first["running"], second["running"]) == (1, 0)
    if start_on == "all":
        assert (first["engine"], second["engine"]) == ("0.jsonl", "InertTracker")


def test_on_every_rank_if_the_class_says_so(tmp_path):
    found = worlds.run(train, 2, OnEveryRank, str(tmp_path), "all")
    assert [rank["running"] for rank in found] == [1, 1]
    for rank, own in enumerate(({"main": True}, {"other": True})):
        assert lines(tmp_path, rank) == [
            ["start"],
            ["config", {"lr": 0.1}],
            ["log", {"loss": rank}, 1],
            ["log", own, 2 + rank],
            ["finish"],
        ]


class DownAndUp(Lines):
    """Fails on the main process, which must not leave the other waiting."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ConnectionError("the server is down")


def train_without_server(folder: str) -> float:
    import torch

    accelerator = Accelerator(log_with=DownAndUp(folder, 0))
    accelerator.init_trackers("proj")
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    for _ in range(3):
        loss = model(torch.ones(4, 2)).sum()
        accelerator.backward(loss)
        accelerator.log({"loss": loss})
    total = accelerator.gather(torch.ones(1)).sum().item()
    accelerator.end_training()
    return total


def test_training_goes_on_without_the_server(tmp_path):
    assert worlds.run(train_without_server, 2, str(tmp_path)) == [2.0, 2.0]
