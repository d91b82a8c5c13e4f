"""Checks of the types and structure of values from files, before they are used.

A *form* is written as the value is: a type, ``None``, a list of one form, a dictionary of forms by key, a tuple of
forms of which one fits, or a function that says whether a value fits. A float may be an integer; a
boolean is no number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from accel_ckpt.errors import CorruptCheckpointError

__all__ = ["OTHERS", "Form", "check_form", "checksum", "natural", "positive"]

Form: TypeAlias = Any

OTHERS = "*"
"""The key of a dictionary's form that stands for all keys that it does not name."""

_CHECKSUM = re.compile("[0-9a-f]{16}")
_SHOWN = 80  # characters of a value in a message


def check_form(value: Any, form: Form, where: str) -> None:
    """Check a value that a file holds.

    Args:
        value: what was read.
        form: what it must be. Keys that the form of a dictionary does not name are ignored, unless it names ``OTHERS``.
        where: the file, and what in it, for the message.

    Raises:
        CorruptCheckpointError: says where it is not what it must be.
    """
    misfit = _misfit(value, form)
    if misfit is not None:
        raise CorruptCheckpointError(
            f"{where}{misfit}. The file is damaged, or something else wrote it; load another checkpoint"
        )


def natural(value: Any) -> bool:
    """A natural number or 0, below 2**63."""
    return type(value) is int and 0 <= value < 1 << 63


def positive(value: Any) -> bool:
    """A natural number below 2**63."""
    return natural(value) and value > 0


def checksum(value: Any) -> bool:
    """An xxh3 checksum, as 16 hexadecimal digits."""
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _misfit(value: Any, form: Form) -> str | None:
    """Where a value is not what its form says, and what it is there; None: it fits."""
    if isinstance(form, type):
        fits = _is_of(value, form)
    elif isinstance(form, list):
        return _list_misfit(value, form[0])
    elif isinstance(form, Mapping):
        return _mapping_misfit(value, form)
    elif isinstance(form, tuple):
        fits = any(_misfit(value, one) is None for one in form)
    elif form is None:
        fits = value is None
    else:
        test: Callable[[Any], bool] = form
        fits = test(value)
    return None if fits else f" is {_shown(value)}, where {_described(form)} was expected"


def _is_of(value: Any, form: type) -> bool:
    if form is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form)


def _list_misfit(value: Any, form: Form) -> str | None:
    if not isinstance(value, (list, tuple)):
        return f" is {_shown(value)}, where a list was expected"
    for index, item in enumerate(value):
        misfit = _misfit(item, form)
        if misfit is not None:
            return f"[{index}]{misfit}"
    return None


def _mapping_misfit(value: Any, form: Mapping[str, Form]) -> str | None:
    if not isinstance(value, Mapping):
        return f" is {_shown(value)}, where a dictionary was expected"
    if not form.keys() - {OTHERS} <= value.keys():
        lacking = [key for key in form if key not in value and key != OTHERS]
        return f" lacks {', '.join(map(repr, lacking))}"
    for key, inner in form.items():
        if key != OTHERS and (misfit := _misfit(value[key], inner)) is not None:
            return f"[{key!r}]{misfit}"
    if form.get(OTHERS, object) is object:  # of which every value is
        return None
    for key, item in value.items():
        if key == OTHERS or key not in form:
            misfit = _misfit(item, form[OTHERS])
            if misfit is not None:
                return f"[{_shown(key)}]{misfit}"
    return None


def _described(form: Form) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_described, form))
    if form is None:
        return "null"
    if isinstance(form, (list, Mapping)):
        return "a list" if isinstance(form, list) else "a dictionary of its form"
    if isinstance(form, type):
        return {"str": "a string", "bool": "true or false", "int": "an integer", "float": "a number"}.get(
            form.__name__, f"a {form.__name__}"
        )
    doc: str = form.__doc__ or form.__name__
    first = doc.partition("\n")[0].rstrip(".")
    return first[0].lower() + first[1:]


def _shown(value: Any) -> str:
    """A value in a message; one of a type that a message cannot show is named by its type."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        if isinstance(value, int) and value.bit_length() > 256:
            return "an integer of more than 256 bits"
        text = repr(value if not isinstance(value, (str, bytes)) else value[:_SHOWN])
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"one {type(value).__qualname__}"
