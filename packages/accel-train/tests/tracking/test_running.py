"""The trackers of an `Accelerator`: the order of calls, and what happens when one fails."""

import copy
import logging
import pickle
import timeit

import numpy as np
import pytest
import torch

from accel_train import (
    LOGGER_TYPE_TO_CLASS,
    Accelerator,
    ArgumentTypeError,
    GeneralTracker,
    OptionError,
    TrackerError,
    register_tracker_class,
)
from accel_train.tracking.base import InertTracker

from .trackers import Failing, Recorder, WithMedia


@pytest.fixture
def said(caplog):
    """Warnings that were logged."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records]


@pytest.fixture
def registered():
    """`Recorder` and a class that needs a folder, known by their names."""

    class InFolder(Recorder):
        name = "in_folder"
        requires_logging_directory = True

        def __init__(self, run_name, logging_dir, **kwargs):
            super().__init__(run_name, logging_dir=logging_dir, **kwargs)

    for kind in (Recorder, InFolder):
        register_tracker_class(kind)
    yield
    for kind in (Recorder, InFolder):
        del LOGGER_TYPE_TO_CLASS[kind.name]


def test_the_life_of_a_tracker():
    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    assert accelerator.log_with == [mine]
    assert accelerator.trackers == []
    accelerator.init_trackers("proj", {"lr": torch.tensor(0.5), "path": "a"})
    assert accelerator.trackers == [mine]
    accelerator.log({"loss": torch.tensor(2.0), "epoch": 1}, step=np.int64(3))
    accelerator.log({"loss": 1.0}, log_kwargs={"recorder": {"commit": False}, "wandb": None})
    accelerator.end_training()
    assert mine.calls[1:] == [
        ("start",),
        ("config", {"lr": 0.5, "path": "a"}),
        ("log", {"loss": 2.0, "epoch": 1}, 3, {}),
        ("log", {"loss": 1.0}, None, {"commit": False}),
        ("finish",),
    ]


@pytest.mark.usefixtures("registered")
def test_names_are_constructed_with_the_project_and_the_options(tmp_path):
    accelerator = Accelerator(log_with=["recorder", "in_folder"], project_dir=tmp_path)
    kwargs = {"recorder": {"tags": ["a"]}, "in_folder": None, "wandb": {"mode": "offline"}}
    accelerator.init_trackers("proj", init_kwargs=kwargs)
    first, second = accelerator.trackers
    assert first.calls == [("init", "proj", {"tags": ["a"]}), ("start",)]
    assert second.calls == [("init", "proj", {"logging_dir": str(tmp_path)}), ("start",)]


def test_no_configuration_is_none_and_none_is_no_tracker():
    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    accelerator.init_trackers("proj", None, None)
    accelerator.log({}, None, None)
    assert mine.calls[1:] == [("start",), ("log", {}, None, {})]
    without = Accelerator()
    without.init_trackers("proj", {"lr": 1})
    without.log({"loss": 1.0}, step=1)
    without.log_images({"image": "not even read"})
    without.log_table("table")
    without.end_training()
    assert without.trackers == []


def test_all_are_checked_before_the_first_starts():
    class LoggedOut(Recorder):
        name = "logged_out"

        def check_ready(self):
            raise OptionError("The tracker 'logged_out' is not logged in.")

    class Broken(Recorder):
        name = "broken"

        def check_ready(self):
            raise ImportError("libfoo.so")

    mine = Recorder()
    with pytest.raises(OptionError, match="not logged in"):
        Accelerator(log_with=[mine, LoggedOut()]).init_trackers("proj")
    with pytest.raises(OptionError, match=r"'broken' cannot be used: ImportError: libfoo\.so"):
        Accelerator(log_with=[mine, Broken()]).init_trackers("proj")
    assert len(mine.calls) == 1


def test_a_second_call_ends_the_first_runs():
    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    accelerator.init_trackers("one")
    accelerator.init_trackers("two")
    accelerator.end_training()
    assert mine.calls[1:] == [("start",), ("finish",), ("start",), ("finish",)]


def test_images_and_tables_go_to_those_that_store_them(said):
    plain, rich = Recorder(), WithMedia()
    accelerator = Accelerator(log_with=[plain, rich])
    accelerator.init_trackers("proj")
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    for step in (1, 2):
        accelerator.log_images({"image": image}, step, {"with_media": {"quality": 1}})
        accelerator.log_table("table", ["a"], [[1]], step=step)
    assert plain.calls[1:] == [("start",)]
    assert rich.calls[2] == ("images", {"image": image}, 1, {"quality": 1})
    assert rich.calls[3] == (
        "table",
        "table",
        {"columns": ["a"], "data": [[1]], "dataframe": None, "step": 1},
    )
    assert len(rich.calls) == 6
    assert said() == [
        "The tracker 'recorder' stores no images: they are left out.",
        "The tracker 'recorder' stores no tables: they are left out.",
    ]


def test_a_mistake_of_the_script_is_no_failure_of_a_tracker():
    accelerator = Accelerator(log_with=WithMedia())
    accelerator.init_trackers("proj")
    with pytest.raises(ArgumentTypeError, match="not an image"):
        accelerator.log_images({"image": "file.png"})
    with pytest.raises(OptionError, match="no rows"):
        accelerator.log_table("table")
    with pytest.raises(ArgumentTypeError, match=r"log\(\) takes a dictionary .* got float: 0.5"):
        accelerator.log(0.5)
    with pytest.raises(ArgumentTypeError, match="step takes a whole number"):
        accelerator.log({"loss": 1.0}, step="three")
    with pytest.raises(ArgumentTypeError, match=r"log_kwargs takes a dictionary .* got list"):
        accelerator.log({"loss": 1.0}, log_kwargs=["a"])
    with pytest.raises(OptionError, match=r"Unknown tracker 'wandbb' in log_kwargs.*'wandb'\?"):
        accelerator.log({"loss": 1.0}, log_kwargs={"wandbb": {}})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on_failure": "ignore"}, OptionError, r"on_failure='ignore'\): expected 'warn' or 'raise'"),
        ({"config": "lr=1"}, ArgumentTypeError, r"config=…\) takes a dictionary, got str"),
        ({"init_kwargs": [1]}, ArgumentTypeError, "init_kwargs takes a dictionary .* got list"),
        ({"init_kwargs": {"tensorbord": {}}}, OptionError, r"'tensorbord' in init_kwargs.*'tensorboard'\?"),
    ],
)
def test_arguments_of_init_trackers(arguments, error, message):
    mine = Recorder()
    with pytest.raises(error, match=message):
        Accelerator(log_with=mine).init_trackers("proj", **arguments)
    assert len(mine.calls) == 1


def test_a_rehearsal_starts_nothing(monkeypatch):
    from accel_state.world.process import PartialState

    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    monkeypatch.setattr(PartialState(), "rehearsal", object())
    accelerator.init_trackers("proj", {"lr": 1})
    accelerator.log({"loss": 1.0})
    accelerator.get_tracker("recorder", unwrap=True).append(1)
    accelerator.end_training()
    assert len(mine.calls) == 1


# A tracker that fails


def test_a_tracker_that_does_not_start_never_stops_training(said):
    broken, mine = Failing("start"), Recorder()
    accelerator = Accelerator(log_with=[broken, mine])
    accelerator.init_trackers("proj", {"lr": 1})
    assert accelerator.trackers == [mine]
    accelerator.log({"loss": 1.0})
    assert isinstance(accelerator.get_tracker("failing"), InertTracker)
    accelerator.get_tracker("failing", unwrap=True).log_metric("a", 1)
    accelerator.end_training()
    assert broken.calls[1:] == [("start",)]
    assert [call[0] for call in mine.calls[1:]] == ["start", "config", "log", "finish"]
    [message] = said()
    assert message == (
        "The tracker 'failing' failed in start(): ConnectionError: the server is down (start). Training "
        "continues without these logs; further failures are not reported. "
        "init_trackers(on_failure='raise') raises instead."
    )


def test_failures_are_said_once_and_counted(said):
    broken = Failing("log", "store_init_configuration")
    accelerator = Accelerator(log_with=broken)
    accelerator.init_trackers("proj", {"lr": 1})
    for _ in range(10):
        accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert [call[0] for call in broken.calls[1:]] == [
        "start",
        "store_init_configuration",
        "log",
        "log",
        "finish",
    ]
    assert len(said()) == 2
    assert "failed in store_init_configuration()" in said()[0]
    assert said()[1] == "The tracker 'failing' did not take 11 calls."


def test_a_tracker_that_recovers_goes_on():
    class Flaky(Recorder):
        name = "flaky"

        def log(self, values, step=None, **kwargs):
            super().log(values, step)
            if step % 3:
                raise TimeoutError("slow")

    flaky = Flaky()
    accelerator = Accelerator(log_with=flaky)
    accelerator.init_trackers("proj")
    for step in range(12):
        accelerator.log({"loss": 1.0}, step=step)
    assert [call[2] for call in flaky.calls[2:]] == list(range(12))


def test_a_tracker_that_does_not_end(said):
    accelerator = Accelerator(log_with=Failing("finish"))
    accelerator.init_trackers("proj")
    accelerator.end_training()
    assert len(said()) == 1


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log"])
def test_asked_to_raise(method):
    accelerator = Accelerator(log_with=Failing(method))

    def train():
        accelerator.init_trackers("proj", {"lr": 1}, on_failure="raise")
        accelerator.log({"loss": 1.0})

    with pytest.raises(
        TrackerError, match=rf"'failing' failed in {method}\(\): ConnectionError: the server"
    ) as caught:
        train()
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_every_run_ends_although_one_raises():
    mine = Recorder()
    accelerator = Accelerator(log_with=[Failing("finish"), mine])
    accelerator.init_trackers("proj", on_failure="raise")
    with pytest.raises(TrackerError, match="finish"):
        accelerator.end_training()
    assert mine.calls[-1] == ("finish",)
    accelerator.end_training()
    assert mine.calls.count(("finish",)) == 1


def test_preemption_ends_with_its_code_although_a_tracker_raises():
    accelerator = Accelerator(log_with=Failing("finish"))
    accelerator.init_trackers("proj", on_failure="raise")
    with pytest.warns(UserWarning, match=r"failed in finish\(\)"), pytest.raises(SystemExit) as left:
        accelerator.exit_preempted()
    assert left.value.code == 75


def test_an_interruption_is_no_failure():
    class Interrupted(Recorder):
        def log(self, values, step=None, **kwargs):
            raise KeyboardInterrupt

    accelerator = Accelerator(log_with=Interrupted())
    accelerator.init_trackers("proj")
    with pytest.raises(KeyboardInterrupt):
        accelerator.log({})


# Values that are lost, and trackers by name


def test_logging_without_a_start_is_said_once(said):
    accelerator = Accelerator(log_with=Recorder())
    for _ in range(3):
        accelerator.log({"loss": 1.0})
    assert said() == ["What is logged is lost: init_trackers() was not called on this rank."]


def test_logging_after_the_end_is_said_once(said):
    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    accelerator.init_trackers("proj")
    accelerator.end_training()
    for _ in range(3):
        accelerator.log({"loss": 1.0})
    assert said() == ["What is logged is lost: the trackers were ended by end_training() on this rank."]
    assert mine.calls[-1] == ("finish",)
    assert accelerator.get_tracker("recorder") is mine, "a script may ask for the address of its run"


def test_by_name():
    mine = Recorder()
    accelerator = Accelerator(log_with=mine)
    with pytest.raises(
        OptionError, match=r"get_tracker\('recorder'\): no tracker runs yet. Call init_trackers\(\)"
    ):
        accelerator.get_tracker("recorder")
    accelerator.init_trackers("proj")
    assert accelerator.get_tracker("recorder") is mine
    assert accelerator.get_tracker("recorder", unwrap=True) is mine.calls
    with pytest.raises(ValueError, match="this tracker is not in log_with, which has recorder"):
        accelerator.get_tracker("wandb")
    with pytest.raises(OptionError, match="which has none"):
        Accelerator().get_tracker("wandb")


# Several accelerators, copies, and the classes of users


def test_two_accelerators_have_trackers_of_their_own():
    first, second = Recorder(), Recorder()
    one, other = Accelerator(log_with=first), Accelerator(log_with=second)
    one.init_trackers("one")
    other.init_trackers("other")
    one.log({"a": 1})
    other.log({"b": 2})
    one.end_training()
    other.log({"c": 3})
    assert [call[1] for call in first.calls if call[0] == "log"] == [{"a": 1}]
    assert [call[1] for call in second.calls if call[0] == "log"] == [{"b": 2}, {"c": 3}]


def test_a_pickled_copy_has_no_run():
    class Unpicklable(Recorder):
        def __reduce__(self):
            raise TypeError("a thread cannot be pickled")

    accelerator = Accelerator(log_with=Unpicklable())
    accelerator.init_trackers("proj")
    copied = pickle.loads(pickle.dumps(accelerator._trackers))
    assert copied.chosen == ["recorder"]
    assert copied.running == []
    assert len(accelerator.trackers) == 1
    assert copy.deepcopy(accelerator).trackers == accelerator.trackers


def test_a_class_as_accelerate_documents_it():
    """Everything in the constructor, and only what its own guide shows."""
    from accel_train import on_main_process

    lines = []

    class Mine(GeneralTracker):
        name = "mine"
        requires_logging_directory = False

        @on_main_process
        def __init__(self, run_name):
            self.run_name = run_name
            self.run = lines

        @property
        def tracker(self):
            return self.run

        @on_main_process
        def store_init_configuration(self, values):
            self.run.append(values)

        @on_main_process
        def log(self, values, step=None):
            self.run.append((values, step))

    accelerator = Accelerator(log_with=Mine("mine"))
    accelerator.init_trackers("proj", {"lr": 1})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert lines == [{"lr": 1}, ({"loss": 1.0}, 1)]


def test_a_tracker_that_changes_its_values_changes_only_its_own():
    class Greedy(Recorder):
        name = "greedy"

        def log(self, values, step=None, **kwargs):
            values.clear()

    mine, values = Recorder(), {"loss": 1.0}
    accelerator = Accelerator(log_with=[Greedy(), mine])
    accelerator.init_trackers("proj")
    accelerator.log(values)
    assert values == {"loss": 1.0}
    assert mine.calls[-1][1] == values


def test_a_step_costs_little():
    """At most 50 µs besides the tracker's own, for five values, two of them tensors; the best of many, for noise."""

    class Nothing(Recorder):
        def log(self, values, step=None, **kwargs):
            pass

    accelerator = Accelerator(log_with=Nothing())
    accelerator.init_trackers("proj")
    values = {
        "loss": torch.tensor(1.0),
        "accuracy": torch.tensor(0.5),
        "lr": 0.1,
        "epoch": 1,
        "grad_norm": 2.0,
    }
    times = timeit.repeat(lambda: accelerator.log(values, step=1), number=100, repeat=50)
    assert min(times) / 100 < 50e-6
