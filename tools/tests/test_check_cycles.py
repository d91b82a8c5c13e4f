"""check_cycles sees cycles of modules, those of type checkers and of lazy packages included."""

from __future__ import annotations

import pytest

import check_cycles


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({}, []),
        ({"a": ["b"], "b": ["c", "outside"], "c": []}, []),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, []),
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"a": ["a"]}, [["a"]]),
        ({"c": ["a"], "a": ["b"], "b": ["c"], "above": ["a"], "below": []}, [["a", "b", "c"]]),
        ({"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["c"]}, [["a", "b"], ["c", "d"]]),
        ({"a": ["b", "c"], "b": ["a"], "c": ["a"]}, [["a", "b", "c"]]),
    ],
)
def test_groups_that_import_each_other(imports, expected):
    assert check_cycles.cycles(imports) == expected


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Write the modules of a package into a repository; returns the package's name."""
    name = f"sample_{request.node.name.split('[')[0]}"
    folder = tmp_path / "packages" / "sample" / "src" / name
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))

    def write(**modules: str) -> str:
        for module, source in {"__init__": "", **modules}.items():
            (folder / f"{module}.py").write_text(source.replace("PACKAGE", name))
        return name

    return write


def test_an_import_for_type_checkers_closes_a_cycle(package, tmp_path, capsys):
    name = package(
        a="from PACKAGE import b",
        b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PACKAGE.a import A",
        c="from PACKAGE.a import A",
    )
    assert check_cycles.main([name, "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"import cycle of 2 modules: {name}.a, {name}.b",
        f"  {name}.a imports {name}.b (line 1)",
        f"  {name}.b imports {name}.a (line 3)",
        "import cycles: 1",
    ]


def test_a_module_that_imports_from_its_own_lazy_package_is_a_cycle(package, tmp_path):
    top = 'from accel_state._lazy import attach\nattach(__name__, {"PACKAGE.a": ["A"], "PACKAGE.b": ["B"]})'
    name = package(__init__=top, a="A = 1", b="from PACKAGE import A\nB = 2")
    (text,) = check_cycles.check([name], tmp_path)
    assert f"{name} imports {name}.b (in its table of public names)" in text
    assert f"{name}.b imports {name} (line 1)" in text


def test_no_cycle(package, tmp_path):
    name = package(a="from PACKAGE import b", b="import json")
    assert check_cycles.main([name, "--root", str(tmp_path)]) == 0
