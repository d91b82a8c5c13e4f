"""What `log_with` may be, and what is refused before anything starts."""

import logging

import pytest

from accel_state.enums import LoggerType
from accel_train import Accelerator, ArgumentTypeError, OptionError, TrackerContractError, filter_trackers
from accel_train.tracking import selection
from accel_train.tracking.base import GeneralTracker

from .trackers import Recorder


class Installed(Recorder):
    name = "tensorboard"
    requires_logging_directory = True


class Absent(Recorder):
    name = "wandb"

    @classmethod
    def install_line(cls):
        return "pip install 'wandb>=0.31'"


class Free(Recorder):
    name = "trackio"


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Three trackers are known: one that needs a folder, one that is not installed, one that needs nothing."""
    classes = {kind.name: kind for kind in (Installed, Absent, Free)}
    monkeypatch.setattr(selection, "LOGGER_TYPE_TO_CLASS", classes)
    return classes


def test_nothing():
    assert filter_trackers(None) == []
    assert filter_trackers([]) == []


@pytest.mark.parametrize(
    "log_with", ["trackio", LoggerType.TRACKIO, ["trackio"], ("trackio", LoggerType.TRACKIO)]
)
def test_names_and_members_each_once(log_with):
    assert filter_trackers(log_with) == ["trackio"]


def test_objects_and_names_together():
    mine = Recorder()
    assert filter_trackers([mine, "trackio"]) == [mine, "trackio"]
    assert filter_trackers(mine) == [mine]


@pytest.mark.parametrize("everything", ["all", LoggerType.ALL])
def test_all_that_are_installed(everything):
    mine = Recorder()
    assert filter_trackers([everything, mine], "logs") == [mine, "tensorboard", "trackio"]


def test_all_and_none_is_installed(known, caplog):
    for name in ("tensorboard", "trackio"):
        del known[name]
    with caplog.at_level(logging.WARNING):
        assert Accelerator(log_with="all").log_with == []
    assert "no tracker is installed" in caplog.text


@pytest.mark.parametrize(
    ("log_with", "error", "message"),
    [
        (
            "tensorbord",
            OptionError,
            r"Unknown tracker 'tensorbord' in log_with; known: .*Did you mean 'tensorboard'\?",
        ),
        (
            ["trackio", "tensorboard"],
            OptionError,
            r"'tensorboard' needs a folder for its logs.*Accelerator\(project_dir=…\)",
        ),
        (
            7,
            ArgumentTypeError,
            "takes names of trackers, LoggerType members or GeneralTracker objects, got int: 7",
        ),
        (Recorder, ArgumentTypeError, "got type"),
        ([Recorder(), Recorder()], OptionError, "two trackers with the name 'recorder'"),
        ([Free(), "trackio"], OptionError, "'trackio' and also a tracker with that name"),
        (GeneralTracker(_blank=True), TrackerContractError, "lacks name"),
    ],
)
def test_what_is_refused(log_with, error, message):
    with pytest.raises(error, match=message):
        filter_trackers(log_with)
    with pytest.raises(error, match=message):
        Accelerator(log_with=log_with)


def test_what_is_not_installed_is_left_out_with_one_warning(caplog):
    # Before the rank is known, as in a script that begins with Accelerator(log_with=…).
    assert filter_trackers(["wandb"]) == []
    with caplog.at_level(logging.WARNING):
        accelerator = Accelerator(log_with="wandb")
        assert filter_trackers(["wandb", "trackio", "wandb"]) == ["trackio"]
    assert accelerator.log_with == []
    [record] = [item for item in caplog.records if "wandb" in item.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(
        "not installed, and nothing is logged with it: pip install 'wandb>=0.31'"
    )
    # What a script does with it later does nothing.
    accelerator.get_tracker("wandb", unwrap=True).define_metric("loss")
    accelerator.init_trackers("run", init_kwargs={"wandb": {"entity": "me"}})
    accelerator.log({"loss": 1.0}, log_kwargs={"wandb": {"commit": False}})
    accelerator.get_tracker("wandb").log_images({"image": []}, step=1)
    accelerator.end_training()
    with pytest.raises(OptionError, match="this tracker is not in log_with"):
        accelerator.get_tracker("tensorboard")


def test_available():
    assert selection.get_available_trackers() == ["tensorboard", "trackio"]


def test_the_folder_of_the_project(tmp_path):
    assert Accelerator(log_with="tensorboard", project_dir=tmp_path).log_with == ["tensorboard"]


def test_a_tracker_of_files_needs_a_folder_of_this_machine():
    with pytest.raises(OptionError, match=r"logging_dir is 's3://bucket/run'.*logging_dir=…\) with a folder"):
        filter_trackers("tensorboard", "s3://bucket/run")
    assert filter_trackers("trackio", "s3://bucket/run") == ["trackio"]
