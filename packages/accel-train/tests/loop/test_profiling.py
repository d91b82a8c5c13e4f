"""Profiling a part of a training loop."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from accel_train import Accelerator, ProfileKwargs
from accel_train.loop.profiling import profile
from testkit import worlds


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


def names_in(path):
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return {event.get("name") for event in json.loads(text)["traceEvents"]}


def test_the_file_has_the_last_cycle_that_is_done(tmp_path):
    """Five steps are one cycle of four, and the wait and the warm-up of another."""
    with profile(
        handler(tmp_path, schedule_option={"wait": 1, "warmup": 1, "active": 2}), 0, lambda: None
    ) as profiler:
        for _ in range(5):
            torch.ones(3).sum()
            profiler.step()
    names = names_in(tmp_path / "profile_0.json")
    assert {"ProfilerStep#2", "ProfilerStep#3", "aten::sum"} <= names
    assert not {"ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#4"} & names


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_the_script_may_export_the_trace_as_well(tmp_path, suffix):
    own, later = tmp_path / f"own.{suffix}", tmp_path / f"later.{suffix}"
    options = handler(tmp_path, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(own)))
    with profile(options, 0, lambda: None) as profiler:
        torch.ones(3).sum()
    profiler.export_chrome_trace(str(later))
    assert names_in(own) == names_in(later) == names_in(tmp_path / "profile_0.json")
    assert "aten::sum" in names_in(own)


def test_memory_and_flops_are_in_the_trace_and_in_the_table(tmp_path):
    options = handler(tmp_path, profile_memory=True, with_flops=True, record_shapes=True)
    with profile(options, 0, lambda: None) as profiler:
        torch.ones(32, 16) @ torch.ones(16, 8)
    assert "[memory]" in names_in(tmp_path / "profile_0.json")
    [product] = [event for event in profiler.key_averages() if event.key == "aten::mm"]
    assert product.flops == 2 * 32 * 16 * 8
    assert product.cpu_memory_usage == 4 * 32 * 8


def each_rank(folder):
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    model = accelerator.prepare(torch.nn.Linear(3, 1 + accelerator.process_index * 0))
    with accelerator.profile():
        accelerator.backward(model(torch.ones(2, 3)).sum())
        for _ in range(accelerator.process_index):
            torch.ones(3).cumsum(0)
    return sorted(path.name for path in Path(folder).iterdir())


def test_each_rank_writes_its_trace_and_leaves_when_all_are_there(tmp_path):
    assert worlds.run(each_rank, 2, str(tmp_path)) == [["profile_0.json", "profile_1.json"]] * 2
    first, second = (names_in(tmp_path / f"profile_{rank}.json") for rank in range(2))
    assert "aten::cumsum" in second - first
    assert "DistributedDataParallel.forward" in first & second
