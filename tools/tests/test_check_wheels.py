"""check_wheels on small wheels written here; ``hatch run wheels`` runs it on the real ones."""

from __future__ import annotations

import zipfile
from importlib import metadata

import pytest

import check_wheels

METADATA = "Metadata-Version: 2.4\nName: {name}\nVersion: 0.1.0\n{requires}\n"


@pytest.fixture
def wheel(tmp_path):
    def write(package: str, *requires: str, leave_out: str = "", extra: str = "") -> object:
        root = check_wheels.import_name(package)
        lines = "\n".join(f"Requires-Dist: {line}" for line in requires)
        files = {
            f"{root}/__init__.py": "__all__ = ['answer']\nanswer = 42\n",
            f"{root}/__init__.pyi": "",
            f"{root}/py.typed": "",
            f"{root}-0.1.0.dist-info/METADATA": METADATA.format(name=package, requires=lines),
            f"{root}-0.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{root}-0.1.0.dist-info/licenses/LICENSE": "text",
            f"{root}-0.1.0.dist-info/RECORD": "",
        }
        if extra:
            files = {extra: "", **files}
        path = tmp_path / f"{root}-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                if not leave_out or leave_out not in name:
                    archive.writestr(name, text)
        return path

    return write


def test_the_layers_are_those_of_the_import_linter_contract():
    order = ["accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli"]
    assert list(check_wheels.BELOW) == order
    for package, below in check_wheels.BELOW.items():
        assert all(order.index(name) < order.index(package) for name in below)
    assert "accel-bigmodel" not in check_wheels.BELOW["accel-train"]
    assert "accel-train" not in check_wheels.BELOW["accel-bigmodel"]


def test_a_good_wheel_has_nothing_missing(wheel):
    assert check_wheels.check_contents("accel-ckpt", wheel("accel-ckpt", "accel-state>=0.1")) == []


def test_metadata_inside_of_a_package_is_not_the_wheels(wheel):
    path = wheel("accel-cli", "numpy", extra="accel_cli/folder/other-1.0.dist-info/METADATA")
    assert [one.name for one in check_wheels.requirements(check_wheels.wheel_metadata(path))] == ["numpy"]


@pytest.mark.parametrize("file", ["py.typed", "__init__.pyi", "LICENSE"])
def test_missing_files_are_named(wheel, file):
    problems = check_wheels.check_contents("accel-ckpt", wheel("accel-ckpt", leave_out=file))
    assert len(problems) == 1
    assert file in problems[0]


def test_files_that_do_not_belong(wheel):
    problems = check_wheels.check_contents("accel-ckpt", wheel("accel-ckpt", extra="tests/test_a.py"))
    assert problems == ["accel-ckpt: tests/test_a.py does not belong in accel_ckpt-0.1.0-py3-none-any.whl"]


def test_a_dependency_that_lies_beside(wheel):
    problems = check_wheels.check_contents("accel-train", wheel("accel-train", "accel-bigmodel>=0.1"))
    assert problems == ["accel-train: depends on ['accel-bigmodel'], which is not below it"]


def test_third_party_follows_dependencies_and_leaves_out_extras(wheel):
    needed = check_wheels.third_party(
        [wheel("accel-ckpt", "accel-state>=0.1", "pytest>=1", 'numpy; extra == "x"')]
    )
    assert {"pytest", "pluggy", "iniconfig"} <= needed
    assert "numpy" not in needed
    assert "accel-state" not in needed


def test_third_party_refuses_a_version_that_is_not_the_required_one(wheel):
    with pytest.raises(check_wheels.WheelError, match=r"pytest .* is installed, pytest>=1000 is required"):
        check_wheels.third_party([wheel("accel-ckpt", "pytest>=1000")])


def test_links_hold_only_what_was_asked_for(tmp_path):
    check_wheels.link(["pluggy"], tmp_path / "links")
    assert sorted(path.name for path in (tmp_path / "links").iterdir()) == [
        "pluggy",
        f"pluggy-{metadata.version('pluggy')}.dist-info",
    ]


def test_an_install_sees_what_it_declares_and_not_what_lies_above(wheel, tmp_path):
    wheels = {"accel-state": wheel("accel-state")}
    assert check_wheels.check_install("accel-state", wheels, tmp_path) == "accel_state: 1 public names import"


def test_a_package_that_ships_what_lies_above_is_caught(wheel, tmp_path):
    wheels = {"accel-state": wheel("accel-state", extra="accel_train.py")}
    with pytest.raises(check_wheels.WheelError, match=r"accel_state can see \['accel_train'\]"):
        check_wheels.check_install("accel-state", wheels, tmp_path)
