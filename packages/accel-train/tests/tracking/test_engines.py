"""What is checked before an engine starts."""

import logging

import pytest

from accel_train import Accelerator, OptionError
from accel_train.tracking.engines import EngineTracker, check_arguments, not_logged_in, say_left_out


def test_the_command_that_installs_an_engine():
    class Absent(EngineTracker):
        name = "comet_ml"
        is_installed = staticmethod(lambda: False)

    class Present(Absent):
        is_installed = staticmethod(lambda: True)

    assert Absent.install_line() == "pip install 'comet-ml>=3.58'"
    assert Present.install_line() is None


def test_arguments_of_an_engine():
    def init(project=None, name=None):
        """An engine's function."""

    check_arguments("engine", init, {"project": 1, "name": 2})
    with pytest.raises(
        OptionError, match=r"init_kwargs\['engine'\] has 'projct', which .*init\(\).* 'project'\?"
    ):
        check_arguments("engine", init, {"projct": 1})
    with pytest.raises(OptionError, match=r"'zzz'.* It takes project, name\."):
        check_arguments("engine", init, {"zzz": 1})
    check_arguments("engine", lambda **kwargs: None, {"zzz": 1})


def test_no_credentials():
    error = not_logged_in("wandb", "Run `wandb login`.")
    assert str(error) == "The tracker 'wandb' is not logged in. Run `wandb login`."
    assert isinstance(error, OptionError)


def test_values_that_an_engine_does_not_store(caplog):
    Accelerator()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            say_left_out("engine", ["b", "a"], "numbers")
        say_left_out("engine", [], "numbers")
    assert [record.getMessage().partition("The ")[2] for record in caplog.records] == [
        "tracker 'engine' stores numbers; left out: a, b."
    ]
