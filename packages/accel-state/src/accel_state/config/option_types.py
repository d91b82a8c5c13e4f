"""How the types of the schema are read from text, read from YAML or JSON data, and written back.

A kind is chosen by the annotation of a field, so a field says its type once. Each kind raises ``ValueError``
whose message says only what was expected; the caller knows the name of the setting and where the value stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["OPTION_TYPES", "OptionType", "option_type_of"]

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


class OptionType:
    """Plain text; the base of all kinds."""

    expected = "text"

    def parse(self, text: str) -> Any:
        """The value that ``text`` of a flag or environment variable stands for."""
        return text

    def read(self, data: Any) -> Any:
        """The value that ``data``, out of YAML, JSON or Python, stands for."""
        if isinstance(data, str):
            return self.parse(data)
        if isinstance(data, int) and not isinstance(data, bool):
            return self.parse(str(data))
        raise ValueError(self.expected)

    def format(self, value: Any) -> str:
        """Text that ``parse`` reads back as ``value``."""
        return str(value)

    def dump(self, value: Any) -> Any:
        """YAML or JSON data that ``read`` reads back as ``value``."""
        return value


class Bool(OptionType):
    """True or false; text in the words that ``accel_state.environment.str_to_bool`` accepts."""

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
    """A whole number. ``1e8`` is one too: YAML reads it as text."""

    expected = "a whole number"

    def parse(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            return self._integral(text)

    def read(self, data: Any) -> int:
        if isinstance(data, bool):
            raise ValueError(self.expected)
        if isinstance(data, int):
            return data
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
        return int(number)


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
    """Names with commas between them; written to files as such text, because Accelerate reads them so."""

    expected = "names with commas between them, or a list of names"

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
    """A list of texts; its flag is given once per item."""

    expected = "a list of texts"

    def parse(self, text: str) -> tuple[str, ...]:
        return (text,)

    def read(self, data: Any) -> tuple[str, ...]:
        return (data,) if isinstance(data, str) else _texts(data, self.expected)

    def format(self, value: Any) -> str:
        raise TypeError("a list of texts has no single text form")

    def dump(self, value: Any) -> Any:
        return list(value)


class ThreeBools(OptionType):
    """Three truth values: forward, gradient of the data, gradient of the weights."""

    expected = "three truth values, such as true,false,false"

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
    """A mapping with text keys; as text, a JSON object."""

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


def option_type_of(annotation: str, *, comma_list: bool = False) -> OptionType:
    """The kind for the annotation of a field, with or without ``| None``.

    Raises:
        TypeError: the schema has no kind for it.
    """
    if comma_list:
        return _COMMA_LIST
    kind = OPTION_TYPES.get(annotation.removesuffix(" | None"))
    if kind is None:
        raise TypeError(
            f"no kind of option reads a value of type {annotation!r}; known: {', '.join(OPTION_TYPES)}"
        )
    return kind


def _texts(data: Any, expected: str) -> tuple[str, ...]:
    if not isinstance(data, (list, tuple)) or not all(isinstance(item, str) for item in data):
        raise ValueError(expected)
    return tuple(data)
