import pytest


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Each test starts without a process state, and on the CPU."""
    from accel_state.environment import patch_environment
    from accel_state.world.process import PartialState
    from accel_train.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch_environment(accelerate_use_cpu="true"):
        yield
    PartialState._reset_state()
