"""Pieces of messages: what is cut, and what others must not see."""

import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import threading
import warnings

import pytest

from accel_state.messages import (
    did_you_mean,
    first_line,
    is_secret,
    message,
    nearest,
    shown,
    warn,
    without_secrets,
)


@pytest.mark.parametrize(
    ("text", "line"),
    [("one", "one"), ("\n  one \ntwo", "one"), ("", "RuntimeError"), ("\n \n", "RuntimeError")],
)
def test_the_first_line_of_an_error(text, line):
    assert first_line(RuntimeError(text)) == line


def test_long_values_are_cut():
    assert shown("abc") == "'abc'"
    assert len(shown("x" * 10**6)) < 210
    assert len(shown([1] * 10**4)) < 210


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS",
     "apikey", "--api-key", "GITHUB_PAT", "BASIC_AUTH", "PGPASSWD"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)
    assert without_secrets({name: "hunter2", "other": 1}) == {name: "***", "other": 1}
    assert without_secrets([f"{name}=hunter2", "x=1"]) == [f"{name}=***", "x=1"]
    assert without_secrets((f"--{name.lstrip('-')}", "hunter2", "--x", "y"))[1:] == ("***", "--x", "y")
    assert "hunter2" not in without_secrets(f"run --{name.lstrip('-')} 'hunter2 hunter2' x")
    assert "hunter2" not in without_secrets(f"export {name}='hunter2 hunter2'")
    assert without_secrets({"env": [f"{name}=hunter2"]}) == {"env": [f"{name}=***"]}


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "max_tokens", "monkey", "PATH", "author", "keyboard", "RANK"]
)
def test_names_of_other_things(name):
    assert not is_secret(name)
    assert without_secrets({name: "value", "list": [f"{name}=value"]}) == {
        name: "value",
        "list": [f"{name}=value"],
    }


def test_switches_and_what_is_unset_stay():
    assert without_secrets({"use_auth": True, "token": None, "key": ""}) == {
        "use_auth": True,
        "token": None,
        "key": "",
    }
    assert without_secrets(["--use_auth", "--x"]) == ["--use_auth", "--x"]


def test_did_you_mean_names_the_nearest():
    assert did_you_mean("lunch", ["launch", "config"]) == "; did you mean launch?"
    assert did_you_mean("xyz", ["launch"], "; no idea") == "; no idea"
    assert nearest("num_proceses", ["num_processes"], cutoff=0.99) == []


def inside(source, name):
    """A function that is written in the module `name`."""
    space = {"__name__": name, "warn": warn}
    exec(compile(source, f"{name}.py", "exec"), space)
    return space["run"]


def test_a_warning_shows_the_line_that_uses_these_packages():
    deep = inside("def run(way):\n    warn('slow', FutureWarning)", "accel_train.loop.deep")
    through = inside("def run(call, *way):\n    call(way)", "torch.nn.modules.module")
    with warnings.catch_warnings(record=True) as seen:
        through(deep)
        deep([])
    lines = inspect.getsource(test_a_warning_shows_the_line_that_uses_these_packages).splitlines()
    first = test_a_warning_shows_the_line_that_uses_these_packages.__code__.co_firstlineno
    assert [(each.filename, each.category) for each in seen] == [(__file__, FutureWarning)] * 2
    assert [lines[each.lineno - first].strip() for each in seen] == ["through(deep)", "deep([])"]


def test_a_library_that_uses_these_packages_is_shown_instead_of_its_caller():
    ours = inside("def run():\n    warn('slow')", "accel_ckpt.loading")
    library = inside("def run(call):\n    return call()", "transformers.trainer")
    with pytest.warns(UserWarning, match="slow") as seen:
        library(ours)
    assert [(each.filename, each.lineno) for each in seen] == [("transformers.trainer.py", 2)]


def test_a_warning_in_a_thread_of_these_packages_shows_itself():
    ours = inside("\n\ndef run():\n    warn('slow')", "accel_ckpt.saving")
    thread = threading.Thread(target=ours)
    with warnings.catch_warnings(record=True) as seen:
        thread.start()
        thread.join()
    assert [(each.filename, each.lineno) for each in seen] == [("accel_ckpt.saving.py", 4)]


def test_a_warning_is_told_once_for_a_line():
    ours = inside("def run():\n    warn('slow')", "accel_ckpt.loading")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            ours()
        ours()
    assert len(seen) == 2


def test_a_warning_that_every_save_would_repeat_is_told_once():
    ours = inside("def run():\n    warn('full', once=True)", "accel_ckpt.folders")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        ours()
        ours()
    assert [(each.filename, each.lineno) for each in seen] == [("accel_ckpt.folders.py", 2)]


class _AsksForSource:
    """A loader as of ``python -m`` and of notebooks: of another name, or with another text than the code's."""

    def __init__(self, answer):
        self.answer = answer

    def get_source(self, name):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


_LOADERS = [
    _AsksForSource(""),
    _AsksForSource(None),
    _AsksForSource(ImportError("another name")),
    object(),
    None,
]


@pytest.mark.parametrize("loader", _LOADERS)
@pytest.mark.parametrize("name", ["__main__", None, 3])
def test_a_warning_asks_no_loader_for_the_source(loader, name):
    space = {"__name__": name, "__loader__": loader, "__file__": "no such file", "warn": warn}
    code = compile("\n" * 20 + "def run():\n    warn('slow')", "cell", "exec")
    exec(code, space)
    with pytest.warns(UserWarning, match="slow") as seen:
        space["run"]()
    assert [(each.filename, each.lineno) for each in seen] == [("cell", 22)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="slow"):
            space["run"]()


def test_a_warning_in_code_without_a_name_and_without_lines():
    space = {"warn": warn}
    exec(compile("def run():\n    warn('slow')", "cell", "exec"), space)
    space["run"].__code__ = space["run"].__code__.replace(co_linetable=b"")
    with pytest.warns(UserWarning, match="slow") as seen:
        space["run"]()
    assert [each.filename for each in seen] == ["cell"]


_WARNING = "from accel_state.messages import warn\n\nwarn('slow')  # the line\nprint('went on')\n"
_ARCHIVE = (
    "import zipfile\nwith zipfile.ZipFile('a.zip', 'w') as file:\n    file.write('m.py', '__main__.py')\n"
)
_PROGRAMS = {
    "script": ("m.py", "python m.py"),
    "module": ("m.py", "python -m m"),
    "text": ("<string>", 'python -c "$(cat m.py)"'),
    "standard input": ("<stdin>", "python < m.py"),
    "interpreter": ("<stdin>", "python -i < m.py"),
    "folder": ("./__main__.py", "cp m.py __main__.py; python ."),
    "archive": ("a.zip/__main__.py", f'python -c "{_ARCHIVE}"; python a.zip'),
    "notebook": ("cell 1", "python -c \"exec(compile(open('m.py').read(), 'cell 1', 'exec'))\""),
    "runpy": ("m.py", "python -c \"import runpy; runpy.run_path('m.py', run_name='__main__')\""),
    "link": ("/dev/fd/", "python <(cat m.py)"),
    "edited": ("m.py", "sed -i \"1iopen(__file__, 'w').close()\" m.py; python m.py"),
    "removed": ("m.py", "sed -i '1iimport os; os.remove(__file__)' m.py; python m.py"),
}


@pytest.mark.parametrize("kind", _PROGRAMS)
def test_a_program_goes_on_after_a_warning(kind, tmp_path):
    file, command = _PROGRAMS[kind]
    (tmp_path / "m.py").write_text(_WARNING)
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert "went on" in answer.stdout, answer.stderr
    assert re.search(rf"{file}\S*:[134]: UserWarning: slow", answer.stderr), answer.stderr
    if kind in ("script", "module", "folder", "runpy"):
        assert "warn('slow')  # the line" in answer.stderr


LONG = (
    "accel: rank 1 has been waiting for 30.0 s in a collective that no other rank has entered, at train.py:12"
)


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_what_a_rank_says_is_folded_on_a_terminal_only():
    script = f"from accel_state.messages import say\nsay({LONG!r} + '\\n  not arrived: ' + 'rank 0 ' * 20)\n"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    piped = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    ).stderr
    assert piped.splitlines()[0] == LONG
    import pexpect

    shown = pexpect.run(
        shlex.join([sys.executable, "-c", script]), env=environ | {"COLUMNS": "60"}, encoding="utf-8"
    )
    lines = shown.splitlines()
    assert " ".join(lines[:-1]) == LONG
    assert [len(line) < 60 for line in lines] == [True, True, False]  # a listing keeps its lines
    assert lines[-1] == piped.splitlines()[-1]


def test_only_messages_of_these_packages_are_folded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    others = f"Traceback (most recent call last):\nValueError: {'x ' * 40}"
    assert message(others, terminal) == others
    told = "a mistake of the user " * 3
    for own in (f"accel_state.errors.ConfigError: {told}\nNext: {told}", f"train.py:12: UserWarning: {told}"):
        text = f"{others}\n{own}\n  {told}"  # a listing, or the line of the script, stays
        shown = message(text, terminal)
        assert shown.startswith(f"{others}\n")
        assert max(map(len, shown.removeprefix(others).splitlines()[:-1])) < 40
        assert shown.split() == text.split()
        assert shown.endswith(f"\n  {told}")
        assert message(text, io.StringIO()) == text
