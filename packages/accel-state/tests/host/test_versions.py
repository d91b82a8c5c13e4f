"""Comparing versions of installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from packaging.version import Version

from accel_state.errors import ConfigError
from accel_state.host.versions import compare_versions, is_torch_version, torch_version


@pytest.mark.parametrize(
    ("operation", "version", "answer"),
    [
        (">", "1.9", True),
        (">=", "1.10", True),
        ("==", "1.10", True),
        ("!=", "1.10", False),
        ("<=", "1.9", False),
        ("<", "1.11", True),
    ],
)
def test_comparing_versions(operation, version, answer):
    assert compare_versions(Version("1.10"), operation, version) is answer


def test_installed_versions_are_compared():
    installed = importlib.metadata.version("torch")
    assert compare_versions("torch", "==", installed)
    assert is_torch_version("==", installed)
    assert is_torch_version(">=", "2.8.0")
    assert torch_version.public == Version(torch.__version__).public  # builds differ in their local part


def test_wrong_comparisons_are_named():
    with pytest.raises(ConfigError, match=r"'=>' is not a version comparison; use one of \['>', '>='"):
        compare_versions("torch", "=>", "2.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-package-here", ">", "2.0")
