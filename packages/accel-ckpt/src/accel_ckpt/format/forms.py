"""Checks of the types and structure of values from files, before they are used.

A *form* is written as the value is: a type, ``None``, a list of one form, a dictionary of forms by key, a tuple of
forms of which one fits, or a function that says whether a value fits. A float may be an integer; a
boolean is no number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count, repeat
from typing import Any, TypeAlias

from accel_ckpt.errors import CorruptCheckpointError

__all__ = ["OTHERS", "Form", "check_form", "checksum", "natural", "positive"]

Form: TypeAlias = Any

OTHERS = "*"
"""The key of a dictionary's form that stands for all keys that it does not name."""

_CHECKSUM = re.compile("[0-9a-f]{16}")
_SHOWN = 80  # characters of a value in a message


def check_form(value: Any, form: Form, where: str, *, partial: bool = False) -> None:
    """Check a value that a file holds.

    Args:
        value: what was read.
        form: what it must be. Keys that the form of a dictionary does not name are ignored, unless it names ``OTHERS``.
        where: the file, and what in it, for the message.
        partial: dictionaries may lack keys.

    Raises:
        CorruptCheckpointError: says where it is not what it must be.
    """
    misfit = _misfit(value, form, partial)
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


def _misfit(value: Any, form: Form, partial: bool) -> str | None:
    """Where a value is not what its form says, and what it is there; None: it fits.

    A loop and not a recursion, because every load asks for thousands of values.
    """
    waiting: list[tuple[Any, Form, Any]] = [
        (value, form, None)
    ]  # the last: the place above it, and the key there
    while waiting:
        value, form, place = waiting.pop()
        if (
            type(value) is form
            or form is object
            or (form is natural and type(value) is int and 0 <= value < 1 << 63)
        ):
            continue
        inner: list[tuple[Any, Form, Any]] = []
        if isinstance(form, list) and isinstance(value, (list, tuple)):
            inner += zip(value, repeat(form[0]), zip(repeat(place), count()))
        elif isinstance(form, Mapping) and isinstance(value, Mapping):
            if not (partial or form.keys() - {OTHERS} <= value.keys()):
                lacking = [repr(key) for key in form if key not in value and key != OTHERS]
                return f"{_shown_place(place)} lacks {', '.join(lacking)}"
            for key, one in form.items():
                if key != OTHERS and key in value:
                    inner.append((value[key], one, (place, key)))
            if form.get(OTHERS, object) is not object:  # of which every value is
                for key, item in value.items():
                    if key == OTHERS or key not in form:
                        inner.append((item, form[OTHERS], (place, key)))
        elif not _fits(value, form, partial):
            return f"{_shown_place(place)} is {_shown(value)}, where {_described(form)} was expected"
        waiting += reversed(inner)
    return None


def _fits(value: Any, form: Form, partial: bool) -> bool:
    """Whether a value that holds no others fits; one that a list or a dictionary has in its place does not."""
    if isinstance(form, tuple):
        if (value is None and None in form) or type(value) in form:
            return True
        return any(_misfit(value, one, partial) is None for one in form if one is not None)
    if form is None or isinstance(form, (list, Mapping)):
        return form is None and value is None
    if form in (int, float):
        return isinstance(value, (int, form)) and not isinstance(value, bool)
    return isinstance(value, form) if isinstance(form, type) else bool(form(value))


def _shown_place(place: Any) -> str:
    keys = []
    while place is not None:
        place, key = place
        keys.append(f"[{_shown(key)}]")
    return "".join(reversed(keys))


def _described(form: Form) -> str:
    if isinstance(form, tuple):
        return " or ".join(_described(one) + " of its form" * isinstance(one, Mapping) for one in form)
    if form is None:
        return "null"
    if isinstance(form, (list, Mapping)):
        return "a list" if isinstance(form, list) else "a dictionary"
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
