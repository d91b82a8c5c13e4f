"""check_exports sees every way in which a stub and the importable names can disagree."""

from __future__ import annotations

import sys

import pytest

import check_exports

TOP = """
from accel_state._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__)
"""
HOME = '''
__all__ = ["bare", "good"]

def good() -> None:
    """Does it."""

def bare() -> None:
    ...
'''


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Write a package with a stub and one home module; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    counter = iter(range(100))

    def write(names: list[str], home: str = HOME, extra: str = "") -> str:
        name = f"sample_{request.node.name.split('[')[0]}_{next(counter)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(TOP + extra)
        lines = [f"from {name}.home import {one} as {one}\n" for one in names]
        (folder / "__init__.pyi").write_text("".join(lines))
        (folder / "home.py").write_text(home)
        return name

    yield write
    for name in [module for module in sys.modules if module.startswith("sample_")]:
        del sys.modules[name]


def test_agreement_is_silent(package):
    assert check_exports.check_package(package(["good"])) == []


def test_a_name_that_is_not_there(package):
    name = package(["gone"])
    assert [text for text in check_exports.check_package(name) if "cannot be imported" in text]


def test_a_missing_docstring(package):
    name = package(["bare"])
    assert check_exports.check_package(name) == [f"{name}: bare has no docstring"]


def test_a_generated_dataclass_docstring_does_not_count(package):
    home = "__all__ = ['good']\nfrom dataclasses import dataclass\n@dataclass\nclass good:\n    x: int = 0\n"
    name = package(["good"], home)
    assert check_exports.check_package(name) == [f"{name}: good has no docstring"]


def test_an_inherited_docstring_does_not_count(package):
    home = "__all__ = ['good']\nclass good(ValueError):\n    pass\n"
    name = package(["good"], home)
    assert check_exports.check_package(name) == [f"{name}: good has no docstring"]


@pytest.mark.parametrize("listed", ["__all__ = []\n", ""])
def test_absent_from_the_home_modules_all(package, listed):
    home = listed + 'def good() -> None:\n    """Does it."""\n'
    name = package(["good"], home)
    assert check_exports.check_package(name) == [f"{name}: good is not in __all__ of its home {name}.home"]


def test_a_stray_public_attribute(package):
    name = package(["good"], extra="\nimport json\n")
    assert check_exports.check_package(name) == [f"{name}: json is a public attribute but not exported"]


def test_a_name_that_is_listed_twice(package):
    name = package(["good", "good"])
    assert check_exports.check_package(name) == [f"{name}: good is listed more than once"]


def test_lines_that_are_not_sorted(package):
    name = package(["good", "bare"], HOME.replace("    ...", '    """Is it."""'))
    assert check_exports.check_package(name) == [
        f"{name}: the lines of the stub are not sorted from {name}.home good on"
    ]


def test_main_checks_the_packages_it_is_given(package, capsys):
    name = package(["bare"])
    assert check_exports.main([name]) == 1
    assert "has no docstring" in capsys.readouterr().out
