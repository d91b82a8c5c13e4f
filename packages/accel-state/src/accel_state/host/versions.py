"""Versions of installed packages, and their comparison."""

from __future__ import annotations

import importlib.metadata
import operator
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from packaging.requirements import Requirement
from packaging.version import Version, parse

from accel_state.errors import ConfigError

__all__ = [
    "STR_OPERATION_TO_FUNC",
    "compare_versions",
    "install_extra",
    "installed_version",
    "is_torch_version",
    "torch_version",
]

STR_OPERATION_TO_FUNC: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@cache
def installed_version(*distributions: str) -> Version | None:
    """The version of the first of ``distributions`` that is installed, or None."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return parse(importlib.metadata.version(name))
    return None


def install_extra(distribution: str, extra: str) -> str:
    """The command that installs the packages of an extra.

    It names the packages and not the extra, so it also works where ``distribution`` was installed from a clone.
    """
    try:
        lines = importlib.metadata.requires(distribution) or []
    except (
        importlib.metadata.PackageNotFoundError
    ):  # sources on a path, without the metadata of an installation
        lines = []
    needed = [requirement for line in lines if _added_by(requirement := Requirement(line), extra)]
    names = [shlex.quote(f"{one.name}{one.specifier}") for one in needed]
    return f"pip install {' '.join(names) or shlex.quote(f'{distribution}[{extra}]')}"


def _added_by(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


torch_version: Version = parse(importlib.metadata.version("torch"))


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare an installed version with a required one.

    Args:
        library_or_version: name of an installed distribution, or a version.
        operation: one of ``>``, ``>=``, ``==``, ``!=``, ``<=``, ``<``.
        requirement_version: the version on the right of the operation.

    Raises:
        ConfigError: the operation does not exist.
        PackageNotFoundError: the library is not installed.
    """
    compare = STR_OPERATION_TO_FUNC.get(operation)
    if compare is None:
        raise ConfigError(
            f"{operation!r} is not a version comparison; use one of {list(STR_OPERATION_TO_FUNC)}"
        )
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return compare(library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed PyTorch with ``version``; see ``compare_versions``."""
    return compare_versions(torch_version, operation, version)
