"""Options of the profiler."""

import pytest
import torch

from accel_train import ProfileKwargs
from accel_train.errors import OptionError


def test_activities_are_named_in_lower_case():
    with ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert profiler.record_shapes
    assert any("mm" in event.key for event in profiler.key_averages())


def test_an_unknown_activity_is_named():
    with pytest.raises(OptionError, match=r"Unknown profiler activity 'gpu'; known: .*cuda"):
        ProfileKwargs(activities=["gpu"])


def test_a_schedule_and_its_callback_are_passed_on():
    ready = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 0, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=ready.append,
    )
    with handler.build() as profiler:
        for _ in range(3):
            profiler.step()
    assert ready == [profiler]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wait": 1, "warmup": 1, "actve": 1},
            r"has 'actve'; torch\.profiler\.schedule takes wait, warmup, active",
        ),
        ({"wait": 1, "active": 1}, "lacks 'warmup'"),
        ({"wait": 1, "warmup": 1, "active": 0}, "is no schedule: Invalid profiler schedule"),
    ],
)
def test_a_schedule_that_torch_does_not_take_is_refused_at_once(options, message):
    with pytest.raises(OptionError, match=message):
        ProfileKwargs(schedule_option=options)
