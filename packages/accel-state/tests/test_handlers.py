"""Handlers of keyword arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

from accel_state.environment import patch_environment
from accel_state.handlers import InitProcessGroupKwargs, KwargsHandler


@dataclass
class Handler(KwargsHandler):
    a: int = 0
    b: bool = False
    c: float = 3.0
    d: list[int] = field(default_factory=list)


@dataclass
class FromEnvironment(KwargsHandler):
    given: int
    computed: str = field(default_factory=lambda: os.environ.get("ACCELERATE_SOME_TEST", "default"))
    filled: str | None = None

    def __post_init__(self) -> None:
        if self.filled is None:
            self.filled = os.environ.get("ACCELERATE_SOME_TEST")


def test_only_what_differs_from_the_defaults_is_passed_on():
    assert Handler().to_kwargs() == {}
    assert Handler(a=2, b=False, d=[1]).to_kwargs() == {"a": 2, "d": [1]}


def test_what_has_no_declared_default_is_always_passed_on():
    assert FromEnvironment(1).to_kwargs() == {"given": 1, "computed": "default"}
    assert Handler.defaults() == {"a": 0, "b": False, "c": 3.0, "d": []}
    assert FromEnvironment.defaults() == {"filled": None}


def test_what_comes_from_the_environment_differs_from_the_defaults():
    with patch_environment(ACCELERATE_SOME_TEST="said"):
        handler = FromEnvironment(1)
        assert handler.to_kwargs() == {"given": 1, "computed": "said", "filled": "said"}
    assert handler.to_kwargs() == {"given": 1, "computed": "said", "filled": "said"}


def test_the_environment_is_neither_read_nor_changed(monkeypatch):
    # Other threads see os.environ: emptying it for a moment breaks whatever they read then.
    def forbidden(*args):
        raise AssertionError("the environment was touched")

    handler = Handler(a=1)
    with monkeypatch.context() as patch:
        for method in ("__getitem__", "__setitem__", "__delitem__", "__iter__"):
            patch.setattr(type(os.environ), method, forbidden)
        assert handler.to_kwargs() == {"a": 1}


def test_no_handler_is_built_to_learn_the_defaults():
    built = []

    @dataclass
    class Counting(KwargsHandler):
        a: int = 0

        def __post_init__(self) -> None:
            built.append(self)

    assert Counting(1).to_kwargs() == {"a": 1}
    assert len(built) == 1


def test_dictionaries_are_copies():
    handler = Handler(d=[1])
    handler.to_dict()["d"].append(2)
    assert handler.to_dict() == {"a": 0, "b": False, "c": 3.0, "d": [1]}


def test_process_group_options():
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs("nccl", None, None).to_kwargs() == {}
    timeout = timedelta(seconds=5)
    assert InitProcessGroupKwargs("gloo", timeout=timeout).to_kwargs() == {
        "backend": "gloo",
        "timeout": timeout,
    }
