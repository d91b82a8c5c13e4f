"""A configuration as plain data for a file."""

from __future__ import annotations

from typing import Any

from accel_state.config.option import Section
from accel_state.config.schema import schema_of, value_of

__all__ = ["to_data"]


def to_data(config: Section) -> dict[str, Any]:
    """The contents of a file for ``config``, without unset options and empty sections.

    Options that Accelerate does not have are omitted if they have their default, so that it can read the file.
    """
    data: dict[str, Any] = {}
    for bound in schema_of(type(config)).options:
        value = value_of(config, bound)
        if not bound.keys or value is None or (bound.about.ours and value == bound.default):
            continue
        place = data.setdefault(bound.file_key, {}) if bound.file_key else data
        place[bound.keys[0]] = bound.option_type.dump(value)
    return {key: value for key, value in data.items() if value not in ({}, [])}
