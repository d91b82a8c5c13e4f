import sys
import types

import pytest

from testkit import plug_ins


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Each test starts without a process state, and on the CPU."""
    from accel_state.environment import patch_environment
    from accel_state.world.process import PartialState
    from accel_train.loop.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch_environment(accelerate_use_cpu="true"):
        yield
    PartialState._reset_state()


@pytest.fixture
def register(tmp_path, monkeypatch):
    """Makes strategies known under their names, as an installed package does by its entry points."""

    def install(*strategies):
        module = types.ModuleType("installed_strategies")
        for strategy in strategies:
            setattr(module, strategy.__name__, strategy)
        folder = tmp_path / "installed"
        folder.mkdir()
        points = {"accel_train.strategies": {each.name: each.__name__ for each in strategies}}
        plug_ins.install(monkeypatch, folder, "installed_strategies", "", points)
        monkeypatch.setitem(sys.modules, "installed_strategies", module)

    return install
