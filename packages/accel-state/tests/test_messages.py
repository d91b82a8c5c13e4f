"""Pieces of messages."""

import pytest

from accel_state.messages import first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [("one", "one"), ("\n  one \ntwo", "one"), ("", "RuntimeError"), ("\n \n", "RuntimeError")],
)
def test_the_first_line_of_an_error(text, line):
    assert first_line(RuntimeError(text)) == line
