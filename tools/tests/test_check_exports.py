"""check_exports sees every way in which a table, a stub and the importable names can disagree."""

from __future__ import annotations

import sys

import pytest

import check_exports

TOP = """
from accel_state._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__, {"%(package)s.home": %(names)r})
"""
HOME = '''
def good() -> None:
    """Does it."""

def bare() -> None:
    ...
'''


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Write a package with a table, a stub and one home module; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    counter = iter(range(100))

    def write(names: list[str], stub: str, home: str = HOME, extra: str = "") -> str:
        name = f"sample_{request.node.name.split('[')[0]}_{next(counter)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(TOP % {"package": name, "names": names} + extra)
        (folder / "__init__.pyi").write_text(stub.replace("PACKAGE", name))
        (folder / "home.py").write_text(home)
        return name

    yield write
    for name in [module for module in sys.modules if module.startswith("sample_")]:
        del sys.modules[name]


def test_agreement_is_silent(package):
    assert check_exports.check_package(package(["good"], "from PACKAGE.home import good as good\n")) == []


def test_names_on_one_side_only(package):
    problems = check_exports.check_package(package(["good"], "from PACKAGE.home import bare as bare\n"))
    assert [text.split(": ", 1)[1] for text in problems] == [
        "good is in __init__.py only",
        "bare is in __init__.pyi only",
    ]


def test_another_home(package):
    problems = check_exports.check_package(package(["good"], "from PACKAGE.away import good as good\n"))
    assert len(problems) == 1
    assert "comes from" in problems[0]


def test_a_name_that_is_not_there(package):
    name = package(["gone"], "from PACKAGE.home import gone as gone\n")
    assert [text for text in check_exports.check_package(name) if "cannot be imported" in text]


def test_a_missing_docstring(package):
    name = package(["bare"], "from PACKAGE.home import bare as bare\n")
    assert check_exports.check_package(name) == [f"{name}: bare has no docstring"]


def test_a_generated_dataclass_docstring_does_not_count(package):
    home = "from dataclasses import dataclass\n@dataclass\nclass good:\n    x: int = 0\n"
    name = package(["good"], "from PACKAGE.home import good as good\n", home)
    assert check_exports.check_package(name) == [f"{name}: good has no docstring"]


def test_an_inherited_docstring_does_not_count(package):
    home = "class good(ValueError):\n    pass\n"
    name = package(["good"], "from PACKAGE.home import good as good\n", home)
    assert check_exports.check_package(name) == [f"{name}: good has no docstring"]


def test_absent_from_the_home_modules_all(package):
    home = '__all__ = []\ndef good() -> None:\n    """Does it."""\n'
    name = package(["good"], "from PACKAGE.home import good as good\n", home)
    assert check_exports.check_package(name) == [f"{name}: good is not in __all__ of its home {name}.home"]


def test_a_stray_public_attribute(package):
    name = package(["good"], "from PACKAGE.home import good as good\n", extra="\nimport json\n")
    assert check_exports.check_package(name) == [f"{name}: json is a public attribute but not exported"]


def test_main_checks_the_packages_it_is_given(package, capsys):
    name = package(["bare"], "from PACKAGE.home import bare as bare\n")
    assert check_exports.main([name]) == 1
    assert "has no docstring" in capsys.readouterr().out
