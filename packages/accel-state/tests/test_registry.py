"""A table of names whose classes are imported when they are asked for."""

import re
import sys

import pytest

from accel_state.errors import ConfigError
from accel_state.registry import Registry
from testkit import plug_ins


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two entry points, whose module was not imported yet."""
    text = "thing = 'theirs'\nother = 'another'\n"
    points = {"accel_test.things": {"zeta": "thing", "alpha": "other"}}
    plug_ins.install(monkeypatch, tmp_path, "registered_things", text, points)


def things(base=object, base_class=None, **builtins):
    return Registry("thing", "accel_test.things", builtins, base=base, base_class=base_class)


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
def test_a_builtin_hides_an_installed_one_of_its_name_which_is_said():
    import json

    registry = things(zeta="json:loads")
    assert registry.get("zeta") is json.loads
    sentence = (
        "the thing zeta is built in, and hides registered_things:thing, which an installed package adds under the same "
        "name; its package has to rename its entry point in accel_test.things"
    )
    assert registry.hidden() == [sentence]
    with pytest.warns(UserWarning, match="^the thing zeta is built in, and hides registered_things:thing"):
        assert registry.names() == ["alpha", "zeta"]


@pytest.mark.usefixtures("package")
def test_an_installed_one_of_another_class_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^the entry point alpha in accel_test.things names registered_things:other, which is str; expected int$",
    ):
        things(int).get("alpha")
    assert things(str).get("alpha") == "another"
    with pytest.raises(ConfigError, match=r"which is str; expected a subclass of int$"):
        things(base_class=int).get("alpha")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("thing =", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("", "AttributeError: module 'registered_things' has no attribute 'thing'"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_package_that_cannot_be_imported_is_named_and_stops_no_other(text, reason, tmp_path):
    (tmp_path / "registered_things.py").write_text(text)
    (tmp_path / "another").mkdir()
    message = re.escape(
        "the thing zeta is installed, but registered_things:thing, which its entry point in accel_test.things names, "
        f"cannot be imported: {reason}"
    )
    with pytest.raises(ConfigError, match=f"^{message}.*; install its package again, or uninstall it$"):
        things().get("zeta")
    assert things(middle="json:loads").get("middle")
    with pytest.warns(UserWarning, match=message):
        assert [*things().usable()] == []


@pytest.mark.usefixtures("package")
def test_usable_ones_come_with_their_names():
    assert [*things(alpha="json:loads").usable()] == [("zeta", "theirs")]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "hint"),
    [("alhpa", r" Did you mean 'alpha'\?$"), ("nothing of the kind", "known: alpha, middle, zeta.$")],
)
def test_an_unknown_name_is_explained(name, hint):
    with pytest.raises(ConfigError, match=f"Unknown thing '{name}'; known: alpha, middle, zeta.") as caught:
        things(middle="json:loads").get(name)
    assert caught.match(hint)


def test_the_table_of_the_caller_is_copied():
    builtins = {"a": "json:loads"}
    registry = Registry("thing", "accel_test.things", builtins)
    builtins.clear()
    assert registry.names() == ["a"]
