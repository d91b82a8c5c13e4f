"""Profiling a part of a training loop."""

import json

import pytest
import torch

from accel_train import Accelerator, ProfileKwargs
from accel_train.loop.profiling import profile


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


def handler(folder=None, **options):
    return ProfileKwargs(
        activities=["cpu"], output_trace_dir=None if folder is None else str(folder), **options
    )


def test_ranks_wait_after_the_trace_with_their_number_is_written(tmp_path):
    folder = tmp_path / "made" / "here"
    waited = []
    with profile(handler(folder), 3, lambda: waited.append([path.name for path in folder.iterdir()])):
        torch.ones(3).sum()
        assert waited == []
    assert waited == [["profile_3.json"]]
    trace = json.loads((folder / "profile_3.json").read_text())
    assert "aten::sum" in {event.get("name") for event in trace["traceEvents"]}


def test_without_a_folder_nothing_is_written_and_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with profile(handler(), 0, lambda: pytest.fail("waited")) as profiler:
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profiler.key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_an_exception_stops_the_profiler_and_writes_no_trace(tmp_path):
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        profile(handler(tmp_path), 0, lambda: pytest.fail("waited")),
    ):
        raise RuntimeError("on purpose")
    assert list(tmp_path.iterdir()) == []
    with profile(handler(), 0, lambda: None) as profiler:  # torch allows one at a time
        torch.ones(3).sum()
    assert profiler.key_averages()


def test_a_schedule_goes_by_the_steps_of_the_loop(tmp_path):
    ready = []
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    options = handler(
        schedule_option=schedule, on_trace_ready=lambda profiler: ready.append(profiler.step_num)
    )
    with profile(options, 0, lambda: None) as profiler:
        for _ in range(5):
            torch.ones(3).sum()
            profiler.step()
    assert ready == [4]
