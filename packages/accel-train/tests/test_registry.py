"""A table of names whose classes are imported when they are asked for."""

import sys

import pytest

from accel_train.errors import OptionError
from accel_train.precision.registry import PRECISIONS
from accel_train.registry import Registry
from accel_train.strategies.base import Strategy
from accel_train.strategies.registry import STRATEGIES


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two entry points, whose module was not imported yet."""
    (tmp_path / "registered_things.py").write_text("thing = 'theirs'\nother = 'another'\n")
    metadata = tmp_path / "registered_things-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: registered-things\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[accel_test.things]\nzeta = registered_things:thing\nalpha = registered_things:other\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("registered_things", None)


def things(**builtins):
    return Registry("thing", "accel_test.things", builtins)


@pytest.mark.usefixtures("package")
def test_installed_names_are_sorted_in_among_the_builtin_ones():
    assert things(middle="json:loads").names() == ["alpha", "middle", "zeta"]


@pytest.mark.usefixtures("package")
def test_a_class_is_imported_when_it_is_asked_for():
    registry = things()
    registry.names()
    assert "registered_things" not in sys.modules
    assert registry.get("zeta") == "theirs"
    assert "registered_things" in sys.modules


@pytest.mark.usefixtures("package")
def test_a_builtin_has_precedence_over_an_installed_one_of_its_name():
    import json

    assert things(zeta="json:loads").get("zeta") is json.loads


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "hint"),
    [("alhpa", r" Did you mean 'alpha'\?$"), ("nothing of the kind", "known: alpha, middle, zeta.$")],
)
def test_an_unknown_name_is_explained(name, hint):
    with pytest.raises(OptionError, match=f"Unknown thing '{name}'; known: alpha, middle, zeta.") as caught:
        things(middle="json:loads").get(name)
    assert caught.match(hint)


def test_the_table_of_the_caller_is_copied():
    builtins = {"a": "json:loads"}
    registry = Registry("thing", "accel_test.things", builtins)
    builtins.clear()
    assert registry.names() == ["a"]


@pytest.mark.parametrize("registry", [PRECISIONS, STRATEGIES], ids=["precisions", "strategies"])
def test_every_class_has_the_name_that_it_is_registered_under(registry):
    for name in registry.names():
        assert registry.get(name).name == name


def test_plain_pytorch_is_a_strategy():
    assert STRATEGIES.get("single") is Strategy
