"""Option types: text, data and their inverses."""

import pytest

from accel_state.config.option_types import OPTION_TYPES, option_type_of


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        ("str", "abc", "abc"),
        ("bool", " Yes ", True),
        ("bool | None", "off", False),
        ("int | None", "12", 12),
        ("int", "1e3", 1000),
        ("float", "0.5", 0.5),
        ("bool | str", "TRUE", True),
        ("bool | str | None", "FULL_SHARD", "FULL_SHARD"),
        ("tuple[str, ...] | None", "one item, not two", ("one item, not two",)),
        ("tuple[bool, bool, bool]", "(true, no, 1)", (True, False, True)),
        ("Mapping[str, Any] | None", '{"a": 1}', {"a": 1}),
    ],
)
def test_text_is_parsed(annotation, text, value):
    assert option_type_of(annotation).parse(text) == value
    assert option_type_of(annotation).read(text) == value


def test_names_are_separated_by_commas():
    names = option_type_of("tuple[str, ...] | None", comma_list=True)
    assert names.parse("A, B,,C ") == ("A", "B", "C")
    assert names.read(["A", "B"]) == ("A", "B")
    assert names.format(("A", "B")) == names.dump(("A", "B")) == "A,B"


@pytest.mark.parametrize(
    ("annotation", "data"),
    [
        ("bool", 2),
        ("bool", "perhaps"),
        ("int", True),
        ("int", "1.5"),
        ("int", [1]),
        ("float", "nan"),
        ("float", "inf"),
        ("float", False),
        ("str", True),
        ("tuple[bool, bool, bool]", [True, False]),
        ("tuple[bool, bool, bool]", [True, False, "perhaps"]),
        ("tuple[str, ...]", 3),
        ("Mapping[str, Any]", "[1]"),
        ("Mapping[str, Any]", "{"),
        ("Mapping[str, Any]", {1: 2}),
    ],
)
def test_other_data_is_refused_with_what_was_expected(annotation, data):
    found = option_type_of(annotation)
    with pytest.raises(ValueError, match="^" + found.expected.replace("(", r"\(") + "$"):
        found.read(data)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [("bool", False), ("int", 7), ("float", 1e-5), ("bool | str", True), ("bool | str", "X"),
     ("tuple[bool, bool, bool]", (True, False, True)), ("Mapping[str, Any]", {"b": [1], "a": None})],
)  # fmt: skip
def test_written_values_are_read_back(annotation, value):
    found = option_type_of(annotation)
    assert found.parse(found.format(value)) == value
    assert found.read(found.dump(value)) == value


def test_lists_have_no_single_text_form():
    with pytest.raises(TypeError, match="no single text form"):
        OPTION_TYPES["tuple[str, ...]"].format(("a",))


def test_a_list_in_the_place_of_text_is_written_as_text():
    with pytest.raises(ValueError, match=r"^text such as '0,1'$"):
        option_type_of("str | None").read([0, 1])
    for other in ([], [[0]], [0] * 17, {"a": 1}):
        with pytest.raises(ValueError, match=r"^text$"):
            option_type_of("str | None").read(other)
