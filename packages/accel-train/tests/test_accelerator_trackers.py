"""The methods of `Accelerator` that log: they have the parameters of Accelerate's, and hand over."""

import inspect
from types import SimpleNamespace

import pytest

from accel_train import Accelerator

# Parameters of Accelerate 1.15, in their order.
SIGNATURES = {
    "init_trackers": ["project_name", "config", "init_kwargs"],
    "log": ["values", "step", "log_kwargs"],
    "get_tracker": ["name", "unwrap"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_parameters_of_accelerate(name):
    parameters = inspect.signature(getattr(Accelerator, name)).parameters.values()
    positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    assert positional == ["self", *SIGNATURES[name]]


def test_calls_are_handed_over(tmp_path):
    calls = []

    class Trackers:
        chosen = ["a"]
        running = ["b"]

        def __getattr__(self, name):
            return lambda *args: calls.append((name, *args)) or name

    class View(Accelerator):
        def __init__(self):
            from accel_train import ProjectConfiguration

            self._trackers = Trackers()
            self._accumulator = SimpleNamespace(observers=[])
            self.project_configuration = ProjectConfiguration(logging_dir="logs")

    view = View()
    assert (view.log_with, view.trackers) == (["a"], ["b"])
    view.init_trackers("proj", {"lr": 1}, {"a": {}}, on_failure="raise")
    view.log({"loss": 1}, 2, {"a": {}})
    view.log_images({"image": 1}, 2)
    view.log_table("table", ["a"], [[1]], step=3)
    assert view.get_tracker("a", unwrap=True) == "get"
    assert calls == [
        ("start", "proj", {"lr": 1}, {"a": {}}, "raise", "logs"),
        ("log", {"loss": 1}, 2, {"a": {}}),
        ("log_images", {"image": 1}, 2, None),
        ("log_table", "table", ["a"], [[1]], None, 3, None),
        ("get", "a", True),
    ]
