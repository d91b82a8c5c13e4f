"""What a value from a file must be like, and what the error says where it is not."""

import pytest

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format.forms import OTHERS, check_form, checksum, natural, positive

SUM = "0123456789abcdef"


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        (None, None),
        (None, (None, int)),
        (3, (None, int)),
        ("a", str),
        (object(), object),
        ([], [int]),
        ((1, 2), [int]),
        ([{"a": 1}], [{"a": int}]),
        ({"a": 1, "other": "anything"}, {"a": int}),
        ({"a": 1, "b": 2}, {"a": int, OTHERS: natural}),
        ({OTHERS: 1}, {OTHERS: natural}),
        ({"a": [1, None]}, {"a": [(None, natural)]}),
        ([[1], {"b": "c"}], [([int], {"b": str})]),
        (0, natural),
        (2**63 - 1, natural),
        (1, positive),
        (SUM, checksum),
    ],
)
def test_what_fits(value, form):
    check_form(value, form, "the file: x")


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (True, int, r"x is True, where an integer was expected\. The file is damaged"),
        (True, float, "x is True, where a number was expected"),
        ("1", int, "x is '1', where an integer was expected"),
        (0, None, "x is 0, where null was expected"),
        ("a", (None, int), "x is 'a', where null or an integer was expected"),
        (1, [int], "x is 1, where a list was expected"),
        ("ab", [str], "x is 'ab', where a list was expected"),
        ([1, "b"], [int], r"x\[1\] is 'b', where an integer was expected"),
        (1, {"a": int}, "x is 1, where a dictionary was expected"),
        ({}, {"a": int, "b": int}, "x lacks 'a', 'b'"),
        (
            {"a": {"b": []}},
            {"a": {"b": bool}},
            r"x\['a'\]\['b'\] is one list, where true or false was expected",
        ),
        ({"a": 1, "z": -1}, {"a": int, OTHERS: natural}, r"x\['z'\] is -1, where a natural number or 0"),
        ({OTHERS: -1}, {OTHERS: natural}, r"x\['\*'\] is -1, where a natural number or 0"),
        (2**63, natural, "is 9223372036854775808, where a natural number or 0, below"),
        (0, positive, "is 0, where a natural number below"),
        (1 << 300, positive, "is an integer of more than 256 bits"),
        (SUM.upper(), checksum, "where an xxh3 checksum, as 16 hexadecimal digits was expected"),
        (SUM + "\n", checksum, "where an xxh3 checksum"),
        (SUM[:-1], checksum, "where an xxh3 checksum"),
        ("y" * 100, int, r"x is 'y{79}…, where"),
    ],
)
def test_what_does_not(value, form, text):
    with pytest.raises(CorruptCheckpointError, match=f"the file: .*{text}"):
        check_form(value, form, "the file: x")


def test_one_misfit_is_named():
    with pytest.raises(CorruptCheckpointError) as caught:
        check_form([{"a": "?", "b": "?"}, 3], [{"a": int, "b": int}], "f")
    assert str(caught.value).startswith("f[0]['a'] is '?'")
