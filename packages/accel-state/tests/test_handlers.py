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
    e: str = field(default_factory=lambda: os.environ.get("ACCELERATE_SOME_TEST", "default"))


def test_only_what_differs_from_the_defaults_is_passed_on():
    assert Handler().to_kwargs() == {}
    assert Handler(a=2, b=False, d=[1]).to_kwargs() == {"a": 2, "d": [1]}


def test_what_comes_from_the_environment_differs_from_the_defaults():
    with patch_environment(ACCELERATE_SOME_TEST="said"):
        assert Handler().to_kwargs() == {"e": "said"}
        assert os.environ["ACCELERATE_SOME_TEST"] == "said"


def test_dictionaries_are_copies():
    handler = Handler(d=[1])
    handler.to_dict()["d"].append(2)
    assert handler.to_dict() == {"a": 0, "b": False, "c": 3.0, "d": [1], "e": "default"}


def test_process_group_options():
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs("nccl", None, None).to_kwargs() == {}
    timeout = timedelta(seconds=5)
    assert InitProcessGroupKwargs("gloo", timeout=timeout).to_kwargs() == {
        "backend": "gloo",
        "timeout": timeout,
    }
