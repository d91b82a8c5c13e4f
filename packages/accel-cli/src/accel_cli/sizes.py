"""Sizes on the command line."""

from __future__ import annotations

from accel_state.errors import ConfigError

__all__ = ["bytes_of"]


def bytes_of(flag: str, text: str) -> int:
    """The bytes of a size such as ``5GB``, or of a number.

    Raises:
        ConfigError: it is no size; names the flag.
    """
    from accel_ckpt.saving.plan import convert_file_size_to_int

    try:
        return int(text) if text.isdigit() else convert_file_size_to_int(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
