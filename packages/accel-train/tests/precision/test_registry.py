"""The names of precisions."""

import pytest

from accel_train.errors import OptionError
from accel_train.precision.registry import PRECISIONS


def test_every_class_has_the_name_that_it_is_registered_under():
    for name in PRECISIONS.names():
        assert PRECISIONS.get(name).name == name


def test_an_unknown_name_is_explained():
    with pytest.raises(OptionError, match=r"^Unknown precision 'nothing'; known: "):
        PRECISIONS.get("nothing")
