"""Profiling a part of a training loop."""

import pytest
import torch

from accel_train import Accelerator, ProfileKwargs


def test_profile_writes_a_trace(tmp_path):
    accelerator = Accelerator(
        kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))]
    )
    with accelerator.profile() as profiler:
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profiler.key_averages()}
    assert (tmp_path / "profile_0.json").stat().st_size > 0
    with pytest.raises(ValueError, match="Unknown profiler activity 'gpu'"):
        ProfileKwargs(activities=["gpu"]).build()


def test_a_profile_that_never_became_active_says_so(tmp_path):
    schedule = {"wait": 5, "warmup": 1, "active": 1}
    handler = ProfileKwargs(schedule_option=schedule, output_trace_dir=str(tmp_path))

    def profiled():
        with Accelerator().profile(handler) as profiler:
            for _ in range(2):
                profiler.step()

    with pytest.warns(UserWarning, match="never got past waiting in 2 steps"):
        profiled()
    assert not list(tmp_path.iterdir())
