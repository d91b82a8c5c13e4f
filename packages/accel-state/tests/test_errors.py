"""The tree of exceptions."""

import inspect

import pytest

from accel_state import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_an_accel_error_and_described(error):
    assert issubclass(error, errors.AccelError)
    assert inspect.getdoc(error)
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.ConfigError, ValueError),
        (errors.ConfigNotFoundError, FileNotFoundError),
        (errors.LaunchError, RuntimeError),
        (errors.DistributedOperationException, RuntimeError),
        (errors.MissingDependencyError, ImportError),
    ],
)
def test_scripts_can_catch_the_builtin_errors(error, base):
    with pytest.raises(base, match="why"):
        raise error("why")
