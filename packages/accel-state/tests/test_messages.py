"""Pieces of messages: what is cut, and what others must not see."""

import inspect
import threading
import warnings

import pytest

from accel_state.messages import did_you_mean, first_line, is_secret, nearest, shown, warn, without_secrets


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
