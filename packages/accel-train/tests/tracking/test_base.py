"""The contract of a tracker."""

import copy
import pickle

import pytest

from accel_train import GeneralTracker, TrackerContractError, on_main_process
from accel_train.tracking.base import InertTracker, LogsImages, LogsTables, check_contract

from .trackers import Recorder, WithMedia


@pytest.mark.parametrize("missing", ["name", "requires_logging_directory", "tracker"])
def test_what_each_must_have(missing):
    attributes = {"name": "mine", "requires_logging_directory": False, "tracker": property(lambda self: 1)}
    complete = type("Complete", (GeneralTracker,), attributes)
    assert complete().tracker == 1
    del attributes[missing]
    lacking = type("Lacking", (GeneralTracker,), attributes)
    with pytest.raises(
        NotImplementedError, match=f"Lacking is no complete tracker: it lacks {missing}."
    ) as caught:
        lacking()
    assert isinstance(caught.value, TrackerContractError)
    lacking(_blank=True)
    with pytest.raises(TrackerContractError):
        check_contract(lacking)


def test_all_that_is_missing_is_named():
    with pytest.raises(TrackerContractError, match="lacks name, requires_logging_directory, tracker"):
        GeneralTracker()


def test_the_base_does_nothing():
    tracker = GeneralTracker(_blank=True)
    assert tracker.start() is None
    assert tracker.log({"a": 1}, step=1) is None
    assert tracker.store_init_configuration({}) is None
    assert tracker.finish() is None
    assert tracker.main_process_only


@pytest.mark.parametrize(("only", "main", "runs"), [(True, True, 1), (True, False, 0), (False, False, 1)])
def test_on_main_process(monkeypatch, only, main, runs):
    from accel_state.world.process import PartialState

    class Mine(Recorder):
        main_process_only = only

        @on_main_process
        def count(self, by=1):
            """Docstring."""
            self.calls.append(("count", by))
            return len(self.calls)

    tracker = Mine()
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: main))
    before = len(tracker.calls)
    result = tracker.count(by=2)
    assert tracker.calls[before:] == [("count", 2)] * runs
    assert (result is not None) == bool(runs)
    assert Mine.count.__doc__ == "Docstring."


def test_abilities_are_told_by_methods():
    assert isinstance(WithMedia(), LogsImages)
    assert isinstance(WithMedia(), LogsTables)
    assert not isinstance(Recorder(), LogsImages)
    assert not isinstance(Recorder(), LogsTables)


def test_an_inert_tracker_takes_every_call():
    inert = InertTracker("wandb")
    assert isinstance(inert, GeneralTracker)
    assert inert.tracker.writer.add_scalar("a", 1) is inert
    assert inert.log({"a": 1}) is None
    assert inert.name == "wandb"
    assert repr(inert) == "InertTracker('wandb')"


def test_an_inert_tracker_can_be_copied():
    assert copy.deepcopy(InertTracker("wandb")).name == "wandb"
    assert pickle.loads(pickle.dumps(InertTracker("wandb"))).name == "wandb"
