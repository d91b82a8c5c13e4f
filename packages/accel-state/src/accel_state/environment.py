"""The process environment: the only module of the project that reads or changes ``os.environ``.

Reading goes through ``get``, ``snapshot``, ``decode`` and the parsers. Changes are the temporary ones of
``patch_environment`` and ``clear_environment``, and ``publish``, which sets missing variables of one table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_state.config.codec import RanksTopology
    from accel_state.config.launch import LaunchConfig
    from accel_state.config.sagemaker import SageMakerConfig

__all__ = [
    "clear_environment",
    "decode",
    "encode",
    "get",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "publish",
    "snapshot",
    "str_to_bool",
]

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
    """A read-only copy of the whole environment, as it is now."""
    return MappingProxyType(dict(os.environ))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a word as a truth value: y, yes, t, true, on, 1 against n, no, f, false, off, 0, in any case.

    Args:
        value: the word.
        to_bool: return ``True`` or ``False`` instead of 1 or 0.

    Raises:
        ConfigError: the word is none of these.
    """
    word = value.strip().lower()
    if word not in _TRUE and word not in _FALSE:
        raise ConfigError(f"{value!r} is not a truth value; use one of {', '.join(sorted(_TRUE | _FALSE))}")
    result = word in _TRUE
    return result if to_bool else int(result)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable ``key`` as a truth value; ``default`` if it is unset or empty.

    Raises:
        ConfigError: it holds something that is not a truth value; the message names the variable.
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
    """The first of the variables ``env_keys`` that holds a number of at least 0, else ``default``.

    Raises:
        ConfigError: one of them is set, but not to a whole number; the message names it.
    """
    for key in env_keys:
        value = os.environ.get(key)
        if value is None:
            continue
        try:
            number = int(value)
        except ValueError:
            raise ConfigError(f"environment variable {key} is {value!r}; a whole number is needed") from None
        if number >= 0:
            return number
    return default


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables for the length of a ``with`` block; put back what was there, also after an exception.

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


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for the length of a ``with`` block; afterwards it is what it was before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def decode() -> LaunchConfig:
    """The configuration that this process's environment carries.

    Raises:
        ConfigError: a variable has a value that cannot be used, or two of them contradict each other.
    """
    from accel_state.config.codec import decode as decode_variables

    config: LaunchConfig = decode_variables(os.environ)
    return config


def encode(config: LaunchConfig | SageMakerConfig) -> dict[str, str]:
    """The variables that carry ``config`` to a rank, spelled as Accelerate spells them; changes nothing."""
    from accel_state.config.codec import encode as encode_config

    return encode_config(config)


def publish(config: LaunchConfig, topology: RanksTopology | None = None) -> dict[str, str]:
    """Set the variables that other libraries read in this process and that are missing.

    None is ever overwritten. The names, and who reads them, are ``accel_state.config.PUBLISHED``.

    Returns:
        What was set.
    """
    from accel_state.config.codec import publish as publish_config

    return publish_config(config, os.environ, topology)
