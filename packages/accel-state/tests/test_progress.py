"""Progress bars."""

from __future__ import annotations

import io

import pytest

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
