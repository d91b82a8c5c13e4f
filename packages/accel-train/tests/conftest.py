import sys
import types

import pytest


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
        entries = []
        for strategy in strategies:
            setattr(module, strategy.__name__, strategy)
            entries.append(f"{strategy.name} = installed_strategies:{strategy.__name__}\n")
        monkeypatch.setitem(sys.modules, "installed_strategies", module)
        folder = tmp_path / "installed"
        metadata = folder / "installed_strategies-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: installed-strategies\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text("[accel_train.strategies]\n" + "".join(entries))
        monkeypatch.syspath_prepend(folder)

    return install
