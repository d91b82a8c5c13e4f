"""Comparing versions of installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from packaging.version import Version

from accel_state.errors import ConfigError
from accel_state.host.versions import compare_versions, install_extra, is_torch_version, torch_version


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


def test_an_extra_is_installed_by_the_names_of_its_packages(monkeypatch):
    lines = [
        "torch>=2.8",
        "s3fs>=2024.6; extra == 's3'",
        "aiohttp<5,>=3; extra == 's3'",
        "gcsfs; extra == 'gs'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: {"accel-ckpt": lines}[name])
    assert install_extra("accel-ckpt", "s3") == "pip install 's3fs>=2024.6' 'aiohttp<5,>=3'"
    assert install_extra("accel-ckpt", "gs") == "pip install gcsfs"


def test_an_extra_of_sources_that_are_not_installed():
    assert install_extra("no-such-package-here", "s3") == "pip install 'no-such-package-here[s3]'"


def test_wrong_comparisons_are_named():
    with pytest.raises(ConfigError, match=r"'=>' is not a version comparison; use one of \['>', '>='"):
        compare_versions("torch", "=>", "2.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-package-here", ">", "2.0")
