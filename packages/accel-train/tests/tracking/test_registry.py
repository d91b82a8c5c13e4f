"""Trackers by name."""

import sys
import types

import pytest

from accel_state.enums import LoggerType
from accel_train import LOGGER_TYPE_TO_CLASS, GeneralTracker, OptionError, register_tracker_class
from accel_train.tracking.base import check_contract
from accel_train.tracking.registry import TRACKERS, TrackerClasses
from testkit import plug_ins

from .trackers import Recorder


@pytest.fixture
def classes():
    """The names that a test adds are known no longer than it runs."""
    before = set(LOGGER_TYPE_TO_CLASS)
    yield LOGGER_TYPE_TO_CLASS
    for name in set(LOGGER_TYPE_TO_CLASS) - before:
        del LOGGER_TYPE_TO_CLASS[name]


def test_every_name_of_accelerate_is_there():
    assert set(LOGGER_TYPE_TO_CLASS) - {"kubeflow"} == {kind.value for kind in LoggerType} - {"all"}


@pytest.mark.parametrize("name", TRACKERS.names())
def test_every_class_has_the_name_that_it_is_registered_under(name):
    kind = TRACKERS.get(name)
    assert kind.name == name
    assert isinstance(kind.requires_logging_directory, bool)
    assert kind.main_process_only, "one run, of the main process, as with Accelerate"
    check_contract(kind)


@pytest.mark.parametrize("name", TRACKERS.names())
def test_a_class_needs_no_engine_until_it_starts(name):
    """As documented: nothing heavy happens before init_trackers."""
    engines = {
        "wandb",
        "mlflow",
        "comet_ml",
        "aim",
        "clearml",
        "dvclive",
        "swanlab",
        "trackio",
        "tensorboard",
    }
    loaded = engines & set(sys.modules)
    kind = TRACKERS.get(name)
    tracker = kind("run", "folder") if kind.requires_logging_directory else kind("run")
    assert tracker.tracker is None
    assert engines & set(sys.modules) == loaded


def test_a_class_of_the_script(classes):
    assert register_tracker_class(Recorder) is Recorder
    assert classes["recorder"] is Recorder
    assert "recorder" in set(classes)
    assert len(classes) == len(TRACKERS.names()) + 1


def test_a_name_is_replaced_with_a_warning(classes):
    class Other(Recorder):
        pass

    register_tracker_class(Recorder)
    with pytest.warns(UserWarning, match="'recorder' was Recorder and is .*Other from now on"):
        register_tracker_class(Other)
    assert classes["recorder"] is Other


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (dict, "takes a subclass of GeneralTracker, got <class 'dict'>"),
        (Recorder(), "takes a subclass of GeneralTracker"),
        (
            type("NoName", (GeneralTracker,), {"requires_logging_directory": True}),
            "NoName, which lacks .*'name'",
        ),
        (
            type("NoFolder", (GeneralTracker,), {"name": "x"}),
            "NoFolder, which lacks .*'requires_logging_directory'",
        ),
    ],
)
def test_what_is_no_class_of_trackers(kind, message):
    with pytest.raises(OptionError, match=message):
        register_tracker_class(kind)


def test_an_installed_package_adds_its_own(tmp_path, monkeypatch):
    module = types.ModuleType("installed_trackers")
    module.Recorder = Recorder
    points = {"accel_train.tracking": {"recorder": "Recorder"}}
    plug_ins.install(monkeypatch, tmp_path, "installed_trackers", "", points)
    monkeypatch.setitem(sys.modules, "installed_trackers", module)
    assert TrackerClasses(TRACKERS)["recorder"] is Recorder


def test_an_unknown_name():
    with pytest.raises(KeyError):
        LOGGER_TYPE_TO_CLASS["nothing"]
    with pytest.raises(KeyError):
        del LOGGER_TYPE_TO_CLASS["wandb"]
