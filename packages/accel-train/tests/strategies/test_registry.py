"""The names of strategies."""

import pytest

from accel_train.errors import OptionError
from accel_train.strategies.base import Strategy
from accel_train.strategies.registry import STRATEGIES


def test_every_class_has_the_name_that_it_is_registered_under():
    for name in STRATEGIES.names():
        assert STRATEGIES.get(name).name == name


def test_an_unknown_name_is_explained():
    with pytest.raises(OptionError, match=r"^Unknown strategy 'nothing'; known: "):
        STRATEGIES.get("nothing")


def test_plain_pytorch_is_a_strategy():
    assert STRATEGIES.get("single") is Strategy
