"""The process environment: the only module of the project that reads or changes ``os.environ``.

``get``, ``snapshot`` and the parsers read it. ``patch_environment`` and ``clear_environment`` change it temporarily,
``provide`` sets what is missing. `accel_state.config.launched` decodes it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar, overload

from accel_state.errors import ConfigError
from accel_state.messages import warn

__all__ = [
    "assign",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "provide",
    "purge_accelerate_environment",
    "replace",
    "snapshot",
    "str_to_bool",
]

T = TypeVar("T", bound=Callable[..., Any])

_UNSAFE = (";", "\n", "<", ">", " ")
_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


@overload
def get(name: str) -> str | None: ...
@overload
def get(name: str, default: str) -> str: ...
def get(name: str, default: str | None = None) -> str | None:
    """The value of the environment variable ``name``, or ``default`` if it is not set."""
    return os.environ.get(name, default)


def snapshot() -> Mapping[str, str]:
    """A read-only copy of the current environment."""
    return MappingProxyType(dict(os.environ))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Parse a boolean: y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any case.

    Args:
        value: the word.
        to_bool: return ``True`` or ``False`` instead of 1 or 0.

    Raises:
        ConfigError: the word is none of these.
    """
    word = value.strip().lower()
    if word not in _TRUE and word not in _FALSE:
        raise ConfigError(f"{value!r} is not a boolean; use one of {', '.join(sorted(_TRUE | _FALSE))}")
    result = word in _TRUE
    return result if to_bool else int(result)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable ``key`` as a boolean; ``default`` if it is unset or empty.

    Raises:
        ConfigError: it is not a boolean; the message names the variable.
    """
    value = os.environ.get(key, "")
    if not value:
        return default
    try:
        return bool(str_to_bool(value))
    except ConfigError as error:
        raise ConfigError(f"environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The variable ``key`` as text, or ``str(default)`` if it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first of the variables ``env_keys`` with an integer of at least 0, else ``default``.

    Raises:
        ConfigError: one of them is set, but not to an integer; the message names it.
    """
    for key in env_keys:
        value = os.environ.get(key)
        if value is None:
            continue
        try:
            number = int(value)
        except ValueError:
            raise ConfigError(f"environment variable {key} is {value!r}; expected an integer") from None
        if number >= 0:
            return number
    return default


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables during a ``with`` block; restore the previous values, also after an exception.

    Args:
        **kwargs: names (upper-cased) and values (converted with ``str``).
    """
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def provide(**kwargs: object) -> None:
    """Set variables that other libraries read, for the rest of the process; those that are set already stay.

    Args:
        **kwargs: names (upper-cased) and values (converted with ``str``).
    """
    for name, value in kwargs.items():
        os.environ.setdefault(name.upper(), str(value))


def assign(**kwargs: object) -> None:
    """Set variables that other libraries read, for the rest of the process, whatever they were.

    Args:
        **kwargs: names (upper-cased) and values (converted with ``str``).
    """
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})


def replace(variables: Mapping[str, str]) -> None:
    """Make ``variables`` the whole environment, for the rest of the process, before anything has read it."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment during a ``with`` block, then restore it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=value`` with newlines, as in environment files.

    Variables that are empty or contain a space, a newline or one of ``; < >`` are omitted with a warning, because a
    shell that reads the file could misinterpret them.
    """
    lines = []
    for name, value in current_env.items():
        if not name or not value or any(mark in name + value for mark in _UNSAFE):
            warn(f"the variable {name} is omitted from the environment file: {value!r} is unsafe")
            continue
        lines.append(f"{name}={value}\n")
    return lines


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a test, or a class of tests, to restore all ACCELERATE_* variables after each test.

    Changes by setup methods of the class and of its subclasses are restored too.

    Args:
        func_or_cls: a function, a ``unittest.TestCase``, or a class as pytest collects it.
    """
    if not isinstance(func_or_cls, type):
        return _restoring(func_or_cls)  # type: ignore[return-value]
    import unittest  # only tests need it, and it would slow down every launch

    if issubclass(func_or_cls, unittest.TestCase):
        func_or_cls.run = _restoring(func_or_cls.run)  # type: ignore[method-assign]
    else:
        _restore_per_method(func_or_cls)
    return func_or_cls


@contextmanager
def _restored(prefix: str = "ACCELERATE_") -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefix) and name not in before]:
            del os.environ[name]
        os.environ.update(before)


def _restoring(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def restoring(*args: Any, **kwargs: Any) -> Any:
        with _restored():
            return function(*args, **kwargs)

    return restoring


def _restore_per_method(cls: type[Any]) -> None:
    """Wrap pytest's setup and teardown methods of ``cls``, and of every subclass that defines its own."""
    own_setup = getattr(cls, "setup_method", None)
    own_teardown = getattr(cls, "teardown_method", None)
    own_hook = cls.__init_subclass__

    def setup_method(self: Any, method: Any) -> None:
        guards: dict[type[Any], Any] = self.__dict__.setdefault("_environment_guards", {})
        guards[cls] = _restored()
        guards[cls].__enter__()
        _call_method(own_setup, self, method)

    def teardown_method(self: Any, method: Any) -> None:
        _call_method(own_teardown, self, method)
        # Also reached for a subclass whose setup did not call this class's.
        guard = self._environment_guards.pop(cls, None)
        if guard is not None:
            guard.__exit__(None, None, None)

    def init_subclass(subclass: type[Any], /, **kwargs: Any) -> None:
        own_hook(**kwargs)
        if {"setup_method", "teardown_method"} & vars(subclass).keys():
            _restore_per_method(subclass)

    cls.setup_method = setup_method
    cls.teardown_method = teardown_method
    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _call_method(function: Callable[..., Any] | None, instance: Any, method: Any) -> None:
    if function is not None:
        function(*(instance, method)[: function.__code__.co_argcount])
