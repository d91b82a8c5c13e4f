"""What an engine of DeepSpeed is asked to move; the real one is tested in ``tests-integration/engines``."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from accel_state.errors import NotAvailableError
from accel_train.errors import OffloadedStatesError
from accel_train.strategies.deepspeed.offload import EngineOffload, check_engine


class Engine:
    """Notes what it is asked; fails at a kind of state."""

    def __init__(self, fails_at=None, offload_param=None):
        self.optimizer = SimpleNamespace(offload_states=None)
        self.fails_at, self.offload_param, self.calls = fails_at, offload_param, []

    def zero_offload_param(self):
        return self.offload_param

    def offload_states(self, include, pin_memory):
        if self.fails_at in include:
            raise RuntimeError("no room")
        self.calls.append((include, pin_memory))

    def reload_states(self):
        self.calls.append("reload")


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    config = types.ModuleType("deepspeed.runtime.zero.offload_config")
    config.OffloadStateTypeEnum = str
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, config.__name__, config)


def test_kinds_are_the_engines_own_in_host_memory_without_pinning():
    engine = Engine()
    moved = EngineOffload(engine, {"parameters", "gradients"}, torch.device("cpu"), True)
    assert engine.calls == [(["lp_grads", "contiguous_grad_buffer"], False), (["lp_params"], False)]
    assert not moved.freed
    moved.check_reload([])
    moved.reload()
    assert engine.calls[-1] == "reload"


def test_an_error_in_the_middle_moves_all_back():
    engine = Engine(fails_at="lp_params")
    with pytest.raises(RuntimeError, match="no room"):
        EngineOffload(engine, {"parameters", "gradients"}, torch.device("cpu"), True)
    assert engine.calls[-1] == "reload"


def test_what_engines_cannot_is_refused():
    kinds = ["parameters"]
    check_engine(Engine(), stage=2, kinds=kinds, waiting=False)
    plain = Engine()
    plain.optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(NotAvailableError, match=r"SGD \(stage 0\).*zero_stage=1"):
        check_engine(plain, stage=0, kinds=kinds, waiting=False)
    with pytest.raises(NotAvailableError, match="Leave offload_param out"):
        check_engine(Engine(offload_param=SimpleNamespace(device="cpu")), stage=3, kinds=kinds, waiting=False)
    check_engine(Engine(offload_param=SimpleNamespace(device="none")), stage=3, kinds=kinds, waiting=False)
    with pytest.raises(OffloadedStatesError, match=r"after optimizer\.step\(\)"):
        check_engine(Engine(), stage=2, kinds=kinds, waiting=True)
