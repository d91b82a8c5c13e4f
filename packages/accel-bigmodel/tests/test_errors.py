"""The exception tree: the docstring draws it, and callers may catch the nearest built-in."""

import inspect

import pytest

from accel_bigmodel import errors
from accel_state.errors import AccelError


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_drawn_and_derive_from_the_root(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.BigModelError)
    assert issubclass(error, AccelError)
    assert name in inspect.getdoc(errors)


def test_builtin_bases():
    assert issubclass(errors.BigModelError, RuntimeError)
    values = {name for name in errors.__all__ if issubclass(getattr(errors, name), ValueError)}
    assert values == {"DeviceMapError", "QuantizationError", "PipelineError", "EstimateError"}
