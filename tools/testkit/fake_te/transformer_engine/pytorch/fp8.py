"""Autocast, and what the device can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ACTIVE: list[tuple[bool, Any]] = []
"""The contexts that were entered and not left."""
SUPPORT: dict[str, tuple[bool, str]] = {
    "fp8": (True, ""),
    "mxfp8": (False, "Device compute capability 10.0 or higher required for MXFP8 execution."),
}
"""What the checks below answer."""


def check_fp8_support() -> tuple[bool, str]:
    """Whether the device computes in fp8, and why not."""
    return SUPPORT["fp8"]


def check_mxfp8_support() -> tuple[bool, str]:
    """Whether the device computes in MXFP8, and why not."""
    return SUPPORT["mxfp8"]


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """Layers inside compute in fp8."""
    ACTIVE.append((enabled, fp8_recipe))
    try:
        yield
    finally:
        ACTIVE.pop()
