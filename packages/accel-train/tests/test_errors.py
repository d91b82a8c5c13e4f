"""The hierarchy of errors, which callers catch by."""

import pytest

import accel_train
from accel_state.errors import AccelError
from accel_train import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_is_also_a_builtin_one_and_in_the_tree(name):
    kind = getattr(errors, name)
    assert issubclass(kind, AccelError)
    [line] = [line for line in errors.__doc__.splitlines() if f"─ {name} " in line]
    builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ in ("builtins", "_pickle"))
    nested = line.startswith("│")
    assert f"({builtin})" in line or nested, "a nested one is what its parent is"
    assert nested == (AccelError not in kind.__bases__)
    assert getattr(accel_train, name) is kind


def test_incompatible_options_are_option_errors():
    assert issubclass(errors.IncompatibleOptionsError, errors.OptionError)
