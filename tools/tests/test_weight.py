"""weight counts lines of code, gives each file to one part, and fails where a part is over its limit."""

from __future__ import annotations

import pytest

import weight


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = 1\n", 1),
        ("x = 1  # why\n\n# a comment\n", 1),
        ('"""Two lines\nof a docstring."""\nx = 1\n', 1),
        ('def f():\n    """Doc."""\n    return 1\n', 2),
        ('class A:\n    """Doc.\n\n    More.\n    """\n\n    x: int = 1\n', 2),
        ('x = """a\nvalue\nof three lines"""\n', 3),
        ("f(\n    1,\n    2,\n)\n", 4),
        ("", 0),
    ],
)
def test_code_lines(text, lines):
    assert weight.code_lines(text) == lines


def test_a_file_counts_for_the_part_that_names_it_most_exactly(tmp_path):
    for name, lines in {"a/x.py": 1, "a/b/y.py": 2, "a/b/z.py": 4}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    parts = (
        weight.Part("all", 9, ("a",)),
        weight.Part("b", 9, ("a/b",)),
        weight.Part("z", 9, ("a/b/z.py",)),
    )
    assert weight.weigh(parts, tmp_path) == {"all": 1, "b": 2, "z": 4}
    assert weight.weigh(reversed(parts), tmp_path) == {"all": 1, "b": 2, "z": 4}


def test_every_module_of_the_packages_belongs_to_a_part():
    parts = (*weight.PARTS, *weight.OPTIONS)
    files = list(weight.ROOT.glob("packages/*/src/**/*.py"))
    lines = sum(weight.code_lines(file.read_text("utf-8")) for file in files)
    assert sum(weight.weigh(parts).values()) == lines


def test_every_path_of_a_part_exists():
    for part in (*weight.PARTS, *weight.OPTIONS, *weight.OTHERS):
        for path in part.paths:
            assert list(weight.ROOT.glob(path)), f"{part.name}: {path}"


def test_no_limit_is_below_its_goal_or_left_when_it_is_reached():
    for part in (*weight.PARTS, *weight.OPTIONS, *weight.OTHERS):
        assert part.limit is None or part.limit > part.goal, part.name


@pytest.mark.wide
def test_what_is_over_its_limit_fails(monkeypatch, capsys):
    assert weight.main(["--check"]) == 0
    monkeypatch.setattr(weight, "OPTIONS_LIMIT", 100)
    assert weight.main(["--check"]) == 1
    assert "options together: " in capsys.readouterr().out


def test_shared_class_names(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / f"packages/{name}/src/{name}"
        folder.mkdir(parents=True)
        (folder / "m.py").write_text(f"class Same: ...\nclass Only{name}: ...\n")
    assert weight.shared_class_names(tmp_path) == {"Same": ["one/m.py", "two/m.py"]}
