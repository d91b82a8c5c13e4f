"""private_access counts what reaches into another module, and nothing that a module may do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import private_access

OWNER = """
_LEVEL = 1
class Owner:
    _kind: str
    def __init__(self):
        self._state, (self._more, public) = 1, (2, 3)
    def _method(self):
        _local = 1
"""


def _found(user: str, owner: str = OWNER) -> list[str]:
    trees = {"owner.py": ast.parse(owner), "user.py": ast.parse(user)}
    return [access.text for access in private_access.find(trees)]


@pytest.mark.parametrize(
    "text",
    ["x._state", "x._more", "x._method", "x.y._kind", "owner._LEVEL", "type(self)._kind", "f()._state"],
)
def test_a_name_of_another_module_is_private_access(text):
    assert _found(f"print({text})") == [text]


def test_assignment_and_deletion_count_like_reading():
    assert _found("x._state = 1\ndel x._state\n") == ["x._state", "x._state"]


@pytest.mark.parametrize(
    "source",
    [
        "self._state",
        "cls._kind",
        "super()._method()",
        "class Here(Owner):\n    pass\nHere._kind",
        "x.public, x.__dict__, x._",
        "x._local",  # a variable in a function is nobody's attribute
        "x._unknown",  # nobody here defines it: it belongs to a library
        "def _method(): ...\nx._method",
        "class Here:\n    _state = 0\nx._state",
        "import torch.cuda\ntorch.cuda._state",
        "import numpy as np\nnp._state",
    ],
)
def test_what_a_module_may_do(source):
    assert _found(source) == []


def test_a_module_of_the_project_is_not_outside():
    assert _found("import accel_x\naccel_x.owner._LEVEL") == ["accel_x.owner._LEVEL"]


def test_assigning_to_another_object_does_not_define_the_name():
    assert _found("x._state = 1\n") == ["x._state"]


def test_imports_of_private_names_count():
    assert _found("from accel_x.owner import _LEVEL, Owner") == ["from accel_x.owner import _LEVEL"]


@pytest.mark.parametrize("name", sorted(private_access.FOREIGN))
def test_names_of_pytorch_and_python_do_not_count_even_if_a_class_of_ours_has_one(name):
    assert _found(f"module.{name}", f"class Owner:\n    {name} = 0\n") == []


def test_an_access_tells_where_it_is_and_whose_the_name_is():
    trees = {"b.py": ast.parse("\nx._a"), "a.py": ast.parse("_a = 1"), "c.py": ast.parse("_a = 1")}
    assert [str(one) for one in private_access.find(trees)] == ["b.py:2: x._a is private to a.py, c.py"]


def test_the_command_names_the_places(tmp_path, capsys):
    folder = tmp_path / "packages" / "accel-x" / "src" / "accel_x"
    folder.mkdir(parents=True)
    (folder / "owner.py").write_text(OWNER)
    assert private_access.main(tmp_path) == 0
    (folder / "user.py").write_text("print(x._state)\n")
    assert private_access.main(tmp_path) == 1
    assert "accel_x/user.py:1: x._state is private to" in capsys.readouterr().out


def test_no_method_of_the_packages_is_a_stub():
    """An ability that some lack is a protocol; a method that raises NotImplementedError is found at run time."""
    root = Path(__file__).parents[2]
    files = sorted(root.glob("packages/*/src/**/*.py"))
    assert len(files) > 400
    assert [path for path in files if "raise NotImplementedError" in path.read_text(encoding="utf-8")] == []
