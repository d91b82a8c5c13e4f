"""The part of `Accelerator` that answers for the processes; the process itself is tested in accel-state."""

import pytest
import torch

from accel_state import PartialState
from accel_train import Accelerator

PROPERTIES = [
    "device", "is_last_process", "is_local_main_process", "is_main_process", "local_process_index", "multi_device",
    "num_processes", "process_index", "use_distributed",
]  # fmt: skip
METHODS = [
    "local_main_process_first", "main_process_first", "on_last_process", "on_local_main_process", "on_local_process",
    "on_main_process", "on_process", "print", "split_between_processes", "wait_for_everyone",
]  # fmt: skip


class Recorder:
    """A process that notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def method(*args, **kwargs):
            self.asked.append((name, args, kwargs))
            return f"answer of {name}"

        return method


def view_of(process):
    view = object.__new__(Accelerator)
    view._process = process
    return view


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name != "multi_device"])
def test_facts_are_the_processes(name):
    process = PartialState()
    assert getattr(view_of(process), name) == getattr(process, name)
    assert getattr(Accelerator(), name) == getattr(process, name)


@pytest.mark.parametrize(
    ("processes", "device", "expected"), [(1, "cpu", False), (2, "cpu", False), (2, "cuda:1", True)]
)
def test_several_devices_are_several_processes_with_one_each(monkeypatch, processes, device, expected):
    process = PartialState()
    monkeypatch.setattr(PartialState, "use_distributed", property(lambda self: processes > 1))
    monkeypatch.setitem(process._shared_state, "device", torch.device(device))
    assert view_of(process).multi_device is expected


CALLS = {
    "on_main_process": ((len,), {}, (len,), {}),
    "on_local_main_process": ((len,), {}, (len,), {}),
    "on_last_process": ((len,), {}, (len,), {}),
    "on_process": ((len, 2), {}, (len,), {"process_index": 2}),
    "on_local_process": ((len, 1), {}, (len,), {"local_process_index": 1}),
    "main_process_first": ((), {}, (), {}),
    "local_main_process_first": ((), {}, (), {}),
    "split_between_processes": (([1, 2], True), {}, ([1, 2],), {"apply_padding": True}),
    "print": (("a", 1), {"sep": "-"}, ("a", 1), {"sep": "-"}),
    "wait_for_everyone": ((), {}, (), {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_calls_go_to_the_process_with_their_arguments(name):
    args, kwargs, expected_args, expected_kwargs = CALLS[name]
    process = Recorder()
    answer = getattr(view_of(process), name)(*args, **kwargs)
    assert process.asked == [(name, expected_args, expected_kwargs)]
    assert answer == (None if name in ("print", "wait_for_everyone") else f"answer of {name}")


def test_on_one_process_everything_runs(capsys):
    accelerator = Accelerator()
    decorators = [
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=0),
        accelerator.on_local_process(local_process_index=0),
    ]
    assert [decorate(lambda: "ran")() for decorate in decorators] == ["ran"] * 5
    assert accelerator.on_process(lambda: "ran", process_index=1)() == "ran"  # there is no other to run it
    with accelerator.split_between_processes([1, 2, 3]) as part:
        assert part == [1, 2, 3]
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.print("once", end="!")
    accelerator.wait_for_everyone()
    assert capsys.readouterr().out == "once!"
