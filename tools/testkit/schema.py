"""Values for every option, made from the schema itself."""

from __future__ import annotations

from typing import Any

from hypothesis import find, settings
from hypothesis import strategies as st

from accel_state.config.option import Section
from accel_state.config.option_types import (
    Bool,
    BoolOrName,
    CommaList,
    Float,
    Int,
    JsonObject,
    OptionType,
    StringList,
    ThreeBools,
)
from accel_state.config.schema import BoundOption, build, schema_of

_LETTERS = st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_categories=("C", "Z"))
TEXT = st.text(_LETTERS, min_size=1, max_size=12)


def values(bound: BoundOption) -> st.SearchStrategy[Any]:
    """Values that the option allows."""
    about, option_type = bound.about, bound.option_type
    if isinstance(option_type, BoolOrName):
        return st.booleans() | st.sampled_from(about.choices)
    if about.choices:
        return st.sampled_from([choice for choice in about.choices if choice.lower() not in about.unset])
    if isinstance(option_type, Bool):
        return st.booleans()
    if isinstance(option_type, Int):
        low = -1000 if about.low is None else int(about.low)
        high = 10**9 if about.high is None else int(about.high)
        return st.integers(low, high)
    if isinstance(option_type, Float):
        return st.floats(
            -1e6 if about.low is None else about.low,
            1e6 if about.high is None else about.high,
            allow_nan=False,
        )
    if isinstance(option_type, CommaList):
        name = TEXT.filter(lambda text: "," not in text)
        return st.lists(name, min_size=1, max_size=3).map(tuple)
    if isinstance(option_type, StringList):
        return st.lists(TEXT, min_size=1, max_size=3).map(tuple)
    if isinstance(option_type, ThreeBools):
        return st.tuples(st.booleans(), st.booleans(), st.booleans())
    if isinstance(option_type, JsonObject):
        return st.dictionaries(TEXT, TEXT | st.integers() | st.booleans(), min_size=1, max_size=3)
    assert type(option_type) is OptionType, f"no values for {bound.path}"
    return TEXT.filter(lambda text: text.lower() not in about.unset)


def example(bound: BoundOption) -> Any:
    """The simplest value that the option allows and that is not its default."""
    quick = settings(max_examples=50, database=None)
    return find(values(bound), lambda value: value != bound.default, settings=quick)


def configs(root: type[Section], keep: Any = lambda bound: True) -> st.SearchStrategy[Any]:
    """Configurations in which any of the options that ``keep`` lets through are set."""
    options = [bound for bound in schema_of(root).options if keep(bound)]
    layer = st.fixed_dictionaries({}, optional={bound.path: values(bound) for bound in options})
    return layer.map(lambda found: build(root, found))
