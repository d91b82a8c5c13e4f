"""The types of options: parsing from text, reading from YAML or JSON data, and writing.

The option type follows from the annotation of a field, so a field declares its type once. Each type raises
``ValueError`` with the expected values only; the caller adds the name of the option and the source of the value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["OPTION_TYPES", "OptionType", "option_type_of"]

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


class OptionType:
    """Plain text; the base of all option types."""

    expected = "text"

    def parse(self, text: str) -> Any:
        """The value of ``text`` from a flag or environment variable."""
        return text

    def read(self, data: Any) -> Any:
        """The value of ``data`` from YAML, JSON or Python."""
        if isinstance(data, str):
            return self.parse(data)
        if isinstance(data, int) and not isinstance(data, bool):
            return self.parse(str(data))
        if isinstance(data, list) and 0 < len(data) <= 16 and all(type(item) in (str, int) for item in data):
            raise ValueError(
                f"{self.expected} such as {','.join(map(str, data))!r}"
            )  # as for gpu_ids: [0, 1]
        raise ValueError(self.expected)

    def format(self, value: Any) -> str:
        """Text that ``parse`` converts back to ``value``."""
        return str(value)

    def dump(self, value: Any) -> Any:
        """YAML or JSON data that ``read`` converts back to ``value``."""
        return value


class Bool(OptionType):
    """A boolean; accepts the words that ``accel_state.environment.str_to_bool`` accepts."""

    expected = "true or false"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError(self.expected)

    def read(self, data: Any) -> bool:
        if isinstance(data, bool):
            return data
        if isinstance(data, int) and data in (0, 1):
            return bool(data)
        if isinstance(data, str):
            return self.parse(data)
        raise ValueError(self.expected)

    def format(self, value: Any) -> str:
        return "true" if value else "false"


class Int(OptionType):
    """An integer. Accepts ``1e8``, which YAML reads as text."""

    expected = "an integer"

    def parse(self, text: str) -> int:
        try:
            return self._bounded(int(text))
        except ValueError:
            return self._integral(text)

    def read(self, data: Any) -> int:
        if isinstance(data, bool):
            raise ValueError(self.expected)
        if isinstance(data, int):
            return self._bounded(data)
        if isinstance(data, str):
            return self.parse(data)
        if isinstance(data, float):
            return self._integral(data)
        raise ValueError(self.expected)

    def _integral(self, data: str | float) -> int:
        try:
            number = float(data)
        except ValueError:
            raise ValueError(self.expected) from None
        if not number.is_integer():
            raise ValueError(self.expected)
        return self._bounded(int(number))

    def _bounded(self, number: int) -> int:
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"{self.expected} of at most 64 bits")
        return number


class Float(OptionType):
    """A finite number."""

    expected = "a number"

    def parse(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(self.expected) from None
        if number != number or number in (float("inf"), float("-inf")):
            raise ValueError(self.expected)
        return number

    def read(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float, str)):
            raise ValueError(self.expected)
        return self.parse(str(data))

    def format(self, value: Any) -> str:
        return repr(float(value))


class BoolOrName(OptionType):
    """True, false, or one of the choices of the option."""

    expected = "true, false or a name"

    def parse(self, text: str) -> bool | str:
        word = text.strip().lower()
        return word == "true" if word in ("true", "false") else text

    def read(self, data: Any) -> bool | str:
        return data if isinstance(data, bool) else self.parse(str(super().read(data)))

    def format(self, value: Any) -> str:
        return ("true" if value else "false") if isinstance(value, bool) else str(value)


class CommaList(OptionType):
    """Comma-separated names; written to files as one text, because Accelerate reads them so."""

    expected = "comma-separated names, or a list of names"

    def parse(self, text: str) -> tuple[str, ...]:
        return tuple(name for part in text.split(",") if (name := part.strip()))

    def read(self, data: Any) -> tuple[str, ...]:
        if isinstance(data, str):
            return self.parse(data)
        return _texts(data, self.expected)

    def format(self, value: Any) -> str:
        return ",".join(value)

    def dump(self, value: Any) -> Any:
        return ",".join(value)


class StringList(OptionType):
    """A list of strings; its flag is repeated for each item."""

    expected = "a list of strings"

    def parse(self, text: str) -> tuple[str, ...]:
        return (text,)

    def read(self, data: Any) -> tuple[str, ...]:
        return (data,) if isinstance(data, str) else _texts(data, self.expected)

    def format(self, value: Any) -> str:
        raise TypeError("a list of strings has no single text form")

    def dump(self, value: Any) -> Any:
        return list(value)


class ThreeBools(OptionType):
    """Three booleans: forward, data gradient, weight gradient."""

    expected = "three booleans, such as true,false,false"

    def parse(self, text: str) -> tuple[bool, ...]:
        return self.read(text.strip("()[] ").split(","))

    def read(self, data: Any) -> tuple[bool, ...]:
        if isinstance(data, str):
            return self.parse(data)
        if not isinstance(data, Sequence) or len(data) != 3:
            raise ValueError(self.expected)
        try:
            return tuple(Bool().read(item) for item in data)
        except ValueError:
            raise ValueError(self.expected) from None

    def format(self, value: Any) -> str:
        return ",".join(Bool().format(item) for item in value)

    def dump(self, value: Any) -> Any:
        return list(value)


class JsonObject(OptionType):
    """A mapping with string keys; as text, a JSON object."""

    expected = "a mapping, as text a JSON object"

    def parse(self, text: str) -> dict[str, Any]:
        import json

        try:
            return self.read(json.loads(text))
        except json.JSONDecodeError:
            raise ValueError(self.expected) from None

    def read(self, data: Any) -> dict[str, Any]:
        if isinstance(data, str):
            return self.parse(data)
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise ValueError(self.expected)
        return dict(data)

    def format(self, value: Any) -> str:
        import json

        return json.dumps(value, sort_keys=True)


OPTION_TYPES: Mapping[str, OptionType] = {
    "str": OptionType(),
    "bool": Bool(),
    "int": Int(),
    "float": Float(),
    "bool | str": BoolOrName(),
    "tuple[str, ...]": StringList(),
    "tuple[bool, bool, bool]": ThreeBools(),
    "Mapping[str, Any]": JsonObject(),
}
_COMMA_LIST = CommaList()


@functools.cache
def option_type_of(annotation: str, *, comma_list: bool = False) -> OptionType:
    """The option type for the annotation of a field, with or without ``| None``.

    Raises:
        TypeError: there is no option type for it.
    """
    if comma_list:
        return _COMMA_LIST
    found = OPTION_TYPES.get(annotation.removesuffix(" | None"))
    if found is None:
        raise TypeError(f"no option type for the annotation {annotation!r}; known: {', '.join(OPTION_TYPES)}")
    return found


def _texts(data: Any, expected: str) -> tuple[str, ...]:
    if not isinstance(data, (list, tuple)) or not all(isinstance(item, str) for item in data):
        raise ValueError(expected)
    return tuple(data)
