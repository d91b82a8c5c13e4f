"""Each rule of check_budgets fires on a file that breaks it, and on nothing else."""

from __future__ import annotations

import textwrap

import pytest

import check_budgets


def _messages(source: str, *, path: str = "packages/x/src/accel_x/a.py", library: bool = True) -> list[str]:
    found = check_budgets.check_source(path, textwrap.dedent(source), library=library)
    return [violation.message for violation in found]


def test_code_lines_leave_out_docstrings_comments_and_blanks():
    source = textwrap.dedent(
        '''\
        """Module
        docstring."""

        # a comment
        def f() -> str:
            """Doc."""
            text = """kept:
            a string that is code"""
            return text  # trailing
        '''
    )
    import ast

    assert check_budgets.code_lines(source, ast.parse(source)) == {5, 7, 8, 9}


def test_a_function_of_81_lines_is_one_too_many():
    def body(lines: int) -> str:
        return "def f() -> None:\n" + "    print()\n" * (lines - 1)

    assert _messages(body(80)) == []
    assert _messages(body(81)) == ["f has 81 lines of code, at most 80"]


def test_a_file_of_601_lines_is_one_too_many():
    assert _messages("x = 1\n" * 600) == []
    assert _messages("x = 1\n" * 601) == ["601 lines of code in one file, at most 600"]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
def test_open_ends_are_found_in_comments_and_docstrings(word):
    assert _messages(f"x = 1  # {word}: later\n") == [f"{word} is left in the text"]
    assert _messages(f"x = 1  # {word.lower()} list\n") == []


def test_swallowed_errors_are_found_everywhere():
    source = """
    try:
        print()
    except ValueError:
        pass
    """
    assert len(_messages(source, library=False)) == 1
    assert _messages(source.replace("pass", "print()")) == []
    assert len(_messages(source.replace("pass", "..."))) == 1


def test_unannotated_parameters_of_functions_and_methods():
    source = """
    class A:
        def m(self, x) -> None: ...
        @classmethod
        def c(cls, *args) -> None: ...
        @staticmethod
        def s(first) -> None: ...

    def f(a: int, *, b) -> None: ...
    """
    names = ["x of m", "args of c", "first of s", "b of f"]
    assert _messages(source) == [f"parameter {name} is not annotated" for name in names]
    assert _messages(source, library=False) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']\n",
        "import os\nos.getenv('A')\n",
        "from os import environ\nprint(environ)\n",
    ],
)
def test_only_the_environment_module_touches_the_environment(source):
    assert len(_messages(source)) == 1
    assert _messages(source, path="packages/accel-state/src/accel_state/environment.py") == []
    assert _messages(source, library=False) == []


@pytest.mark.parametrize("raised", ["NotImplementedError", "NotImplementedError('no')"])
def test_not_implemented_is_not_raised(raised):
    assert len(_messages(f"raise {raised}\n")) == 1


def test_main_reports_and_exits_with_one(tmp_path, capsys):
    source = tmp_path / "packages" / "accel-x" / "src" / "accel_x"
    source.mkdir(parents=True)
    (source / "a.py").write_text("def f(x): ...\n")
    assert check_budgets.main([str(tmp_path)]) == 1
    assert "packages/accel-x/src/accel_x/a.py:1: parameter x of f is not annotated" in capsys.readouterr().out
    (source / "a.py").write_text("def f(x: int): ...\n")
    assert check_budgets.main([str(tmp_path)]) == 0


@pytest.fixture
def reaching(tmp_path):
    """Two packages; one place of ``accel-b`` reaches into ``accel-a``. Takes lines of code of ``accel-b``."""

    def write(lines: int) -> str:
        for name, source in (("a", "_x = 1\n" * 5000), ("b", "y._x\n" + "z = 1\n" * (lines - 1))):
            folder = tmp_path / "packages" / f"accel-{name}" / "src" / f"accel_{name}"
            folder.mkdir(parents=True, exist_ok=True)
            for part in range(0, len(source.splitlines()), 500):
                text = "".join(source.splitlines(keepends=True)[part : part + 500])
                (folder / f"part{part}.py").write_text(text)
        return str(tmp_path)

    return write


def test_private_access_is_measured_in_each_package_and_in_all(reaching, capsys):
    assert check_budgets.main([reaching(1001)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "private access across modules, accel-a: 0 in 5000 lines, 0.00 per 1,000",
        "private access across modules, accel-b: 1 in 1001 lines, 1.00 per 1,000",
        "private access across modules, all packages: 1 in 6001 lines, 0.17 per 1,000",
        "budgets: 0 violations",
    ]


def test_private_access_must_stay_below_the_limit(reaching, capsys):
    assert check_budgets.main([reaching(1000)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(
        "packages/accel-b/src/accel_b/part0.py:1: y._x is private to packages/accel-a/"
    )
    assert "accel-b: 1 in 1000 lines, 1.00 per 1,000, must be below 1" in shown[2]
    assert shown[-1] == "budgets: 1 violations"
    assert check_budgets.main([reaching(1000), "--private-access-limit", "1.1"]) == 0
