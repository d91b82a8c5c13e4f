"""Entry points are those that importlib.metadata finds."""

from __future__ import annotations

from importlib import metadata

import pytest

from accel_state.entry_points import entry_points, load


def installed(folder, name, text, kind="dist-info"):
    place = folder / f"{name}-1.0.{kind}"
    place.mkdir()
    (place / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (place / "entry_points.txt").write_text(text)


def test_the_groups_of_this_environment():
    for group in ("console_scripts", "accel_state.strategies", "accel_train.strategies", "pytest11"):
        found = {point.name: point.value.partition(" ")[0] for point in metadata.entry_points(group=group)}
        assert found
        assert {name: place.partition(" ")[0] for name, place in entry_points(group).items()} == found


def test_a_folder_that_is_added_later_is_seen(tmp_path, monkeypatch):
    assert dict(entry_points("accel_test.group")) == {}
    installed(
        tmp_path,
        "one",
        "[other]\nx = y:z\n\n[accel_test.group]\n# no = entry:point\na = json : loads [extra]\n",
    )
    installed(tmp_path, "two", "[accel_test.group]\nb=json:dumps\n", "egg-info")
    (tmp_path / "three-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert dict(entry_points("accel_test.group")) == {"a": "json:loads", "b": "json:dumps"}


def test_the_first_on_the_path_counts(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        installed(tmp_path / name, name, f"[accel_test.group]\nsame = {name}:it\n")
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert entry_points("accel_test.group")["same"] == "first:it"


def test_loading():
    import json

    assert load("json:loads") is json.loads
    with pytest.raises(AttributeError, match="nothing"):
        load("json:nothing")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load("no_such_module:it")
