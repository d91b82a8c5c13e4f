"""Progress bars."""

from __future__ import annotations

import io
import os

import pytest

from accel_state import progress
from accel_state.constants import BAR_INTERVAL, RANK_PREFIXED
from accel_state.errors import ConfigError
from accel_state.progress import tqdm
from accel_state.world.process import PartialState
from testkit import worlds


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PartialState._reset_state()
    yield
    PartialState._reset_state()


def bars(**kwargs):
    PartialState()
    out = io.StringIO()
    values = list(tqdm(range(3), file=out, **kwargs))
    assert values == [0, 1, 2]
    return "3/3" in out.getvalue()


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({}, [True, False]),
        ({"main_process_only": False}, [True, True]),
        ({"disable": True}, [False, False]),
        ({"disable": True, "main_process_only": False}, [False, False]),
    ],
)
def test_who_shows_a_bar(kwargs, shown):
    assert worlds.run(bars, 2, **kwargs) == shown


def test_alone_it_is_shown():
    assert bars()
    assert not bars(disable=True)


@pytest.mark.parametrize("flag", [True, False])
def test_the_old_way_is_an_error(flag):
    with pytest.raises(ConfigError, match=f"pass main_process_only={flag} by name") as caught:
        tqdm(flag, range(3))
    assert isinstance(caught.value, ValueError)


def written(tmp_path, work):
    with open(tmp_path / "log", "w+", newline="") as file:
        work({"file": file, "mininterval": 0, "bar_format": "{desc} {n}"})
        file.seek(0)
        return file.read()


def nested(settings, leave=True):
    for _ in tqdm(range(2), desc="epoch", **settings):
        for _ in tqdm(range(3), desc="step", leave=leave, **settings):
            tqdm(disable=True).write("note", file=settings["file"])


def test_in_a_file_a_bar_is_one_line(tmp_path):
    notes = "note\n" * 3
    assert written(tmp_path, nested) == f"{notes}step 3\n" * 2 + "epoch 2\n"
    assert written(tmp_path, lambda settings: nested(settings, leave=False)) == notes * 2 + "epoch 2\n"


def test_a_long_bar_in_a_file_shows_that_it_goes_on(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def work(settings):
        for _ in tqdm(range(5), desc="step", **settings):
            now[0] += BAR_INTERVAL / 2

    assert written(tmp_path, work) == "step 2\nstep 4\nstep 5\n"


def test_where_a_launcher_reads_or_a_terminal_is_it_is_drawn(tmp_path, monkeypatch):
    work = lambda settings: list(tqdm(range(2), desc="step", **settings))  # noqa: E731
    assert "\r" not in written(tmp_path, work)
    monkeypatch.setenv(RANK_PREFIXED, "")
    assert "\rstep 1" in written(tmp_path, work)
    monkeypatch.delenv(RANK_PREFIXED)
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        work({"file": terminal, "mininterval": 0, "bar_format": "{desc} {n}"})
        assert b"\rstep 1" in os.read(master, 4096)
    os.close(master)


def test_a_bar_may_ask_for_a_terminal(tmp_path):
    assert written(tmp_path, lambda settings: list(tqdm(range(2), disable=None, **settings))) == ""
