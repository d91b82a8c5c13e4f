"""Versions of modules' state dicts: they tell a module the form of the values that it loads.

torch keeps them beside the names of a state dict, as its attribute ``_metadata``, which a copy to a plain dictionary
loses. A module that translates older forms would take current values for old ones then.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from accel_ckpt.tensor_storage import VERSIONS_KEY

__all__ = ["renamed_versions", "versions_at", "versions_metadata", "versions_of", "with_versions"]

T = TypeVar("T")


def versions_of(state_dict: Mapping[str, Any]) -> dict[str, int]:
    """The versions that a state dict carries, by module; anything but numbers, as files may hold, is left out."""
    metadata = getattr(state_dict, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return {}
    return {
        name: about["version"]
        for name, about in metadata.items()
        if isinstance(name, str) and isinstance(about, Mapping) and type(about.get("version")) is int
    }


def with_versions(state_dict: Mapping[str, T], versions: Mapping[str, int]) -> dict[str, T]:
    """Make a state dict with the same entries, which has these versions where torch looks for them."""
    if not versions:
        return dict(state_dict)
    found: Any = OrderedDict(state_dict)
    found._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return found  # type: ignore[no-any-return]


def renamed_versions(versions: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    """Versions by the new names of modules, given the old and new names of their tensors."""
    modules = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in names.items()}
    return {modules.get(name, name): version for name, version in versions.items()}


def versions_at(versions: Mapping[str, int], prefixes: Mapping[str, str]) -> dict[str, int]:
    """Versions by other names of modules, given the prefixes of tensors there by those here; ``""`` is the model's."""
    return {
        prefixes.get(f"{name}." if name else "", name).rstrip("."): version
        for name, version in versions.items()
    }


def versions_metadata(versions: Mapping[str, int]) -> dict[str, str]:
    """The metadata of a safetensors file that keeps these versions."""
    return {VERSIONS_KEY: json.dumps(dict(sorted(versions.items())))} if versions else {}
