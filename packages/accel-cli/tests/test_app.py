"""The command table: help, versions, wrong words, errors as one message, and how little is imported."""

import os
import subprocess
import sys
import time

import pytest

from accel_cli import __version__
from accel_cli.app import COMMANDS, OTHER_NAMES, main
from testkit.plug_ins import install


def accel(*words, **environ):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", *words], env=variables, capture_output=True, text=True, timeout=60
    )


def test_without_a_command_help_is_shown_and_the_code_is_1(capsys):
    assert main([]) == 1
    assert "Usage: accel [OPTIONS] COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_command(word, capsys):
    assert main([word]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("lunch", "command lunch does not exist; did you mean launch?"),
        ("xyz", "the commands are config, launch, "),
        ("torchrun", "command torchrun does not exist; use accel launch"),
        ("collect_env", "command collect_env does not exist; use accel env"),
        ("--halp", "flag --halp does not exist; did you mean --help?"),
        ("train.py", "to start a script: accel launch train.py"),
    ],
)
def test_unknown_words_get_a_suggestion(word, hint, capsys):
    assert main([word]) == 2
    assert hint in capsys.readouterr().err


def test_every_command_has_a_help_page(capsys):
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert name in capsys.readouterr().out


def test_errors_are_one_message_without_traceback():
    done = accel("launch", "--num_processes", "none", "x.py")
    assert done.returncode == 2
    assert done.stderr == "accel launch: error: --num_processes is 'none'; expected an integer\n"
    done = accel("launch", "nowhere.py")
    assert done.returncode == 2
    assert done.stderr.startswith("accel launch: error: the script 'nowhere.py' does not exist")


@pytest.mark.parametrize(
    "words",
    [
        *([name, "--help"] for name in COMMANDS),
        ["--help"],
        ["launch", "--help-all"],
        ["launch", "--dry-run", __file__],
    ],
)
def test_torch_is_never_imported(words):
    code = (
        "import sys; from accel_cli.app import main; main(sys.argv[1:]);"
        "sys.exit(3 if {'torch', 'rich', 'questionary', 'numpy'} & set(sys.modules) else 0)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code, *words], env=environ, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["lunch"], ["launch", "--num_proceses", "2", "x.py"], *([name, "--help"] for name in
     ("launch", "config", "checkpoint"))],
)  # fmt: skip
def test_help_and_mistakes_import_no_slow_module(words):
    # Processor time does not depend on what else a machine does, but differs between machines; imports do not.
    slow = {"importlib.metadata", "email", "asyncio", "multiprocessing", "accel_state.launching.hardware"}
    code = (
        "import sys; from accel_cli.app import main; main(sys.argv[1:]);"
        f"print('slow:', sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "slow: []", done.stdout + done.stderr


def test_help_comes_at_once():
    # The budget is 0.15 s on a quiet machine (tools/bench/cli.py); here only a tenfold loss is caught.
    best = min(_seconds("--help") for _ in range(3))
    assert best < 1.5


def _seconds(*words):
    started = time.monotonic()
    accel(*words)
    return time.monotonic() - started


@pytest.mark.wide(only=["2>*", ">*"])
@pytest.mark.skipif(os.name != "posix", reason="shell redirections of POSIX systems")
@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"], ["env"], ["launch", "--cpu", "show.py"],
                                   ["launch", "--cpu", "--num_processes", "2", "show.py"]])  # fmt: skip
@pytest.mark.parametrize("redirection", ["| true", ">&-", "2>&-"])
def test_output_that_nobody_reads_is_no_reason_for_a_traceback(words, redirection, tmp_path):
    (tmp_path / "show.py").write_text("import os\nopen('ran', 'w').close()")
    command = f"{sys.executable} -m accel_cli {' '.join(words)} {redirection}"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert (tmp_path / "ran").exists() == ("show.py" in words)


@pytest.mark.parametrize("word", OTHER_NAMES)
def test_names_of_other_tools_lead_to_a_command(word):
    assert word not in COMMANDS
    assert OTHER_NAMES[word] in {*COMMANDS, "--version"}


def test_a_command_is_found_in_both_spellings(capsys):
    assert main(["merge_weights", "--help"]) == 0
    assert "Usage: accel merge-weights" in capsys.readouterr().out


def test_help_takes_a_command(capsys):
    assert main(["help", "env"]) == 0
    assert "Usage: accel env" in capsys.readouterr().out


COMMAND = """
import sys
from accel_cli.dialect import App
app = App()

@app.command()
def run(times: int = 1):
    "Say it."
    print("said", times)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with these commands."""

    def with_commands(text=COMMAND, **names):
        install(monkeypatch, tmp_path, "outside_commands", text, {"accel_cli.commands": names})

    return with_commands


def test_a_command_of_an_installed_package(installed, capsys):
    installed(say="app", say_it="app")
    for name in ("say", "say-it", "say_it"):
        assert main([name, "--times", "2"]) == 0
        assert capsys.readouterr().out == "said 2\n"
    assert main(["say", "--help"]) == 0
    assert "Usage: accel say [OPTIONS]\n\n  Say it." in capsys.readouterr().out
    assert main(["say", "--times", "x"]) == 2
    assert capsys.readouterr().err.startswith("accel say: error: --times is 'x'; ")
    assert main(["sya"]) == 2
    assert "did you mean say" in capsys.readouterr().err


def test_it_is_listed_without_being_imported(installed, capsys, tmp_path):
    installed("raise RuntimeError('no driver')", say="app")
    assert main(["--help"]) == 0
    assert "installed:\n  say  Of the installed package outside_commands.\n" in capsys.readouterr().out
    words = {"COMP_WORDS": "accel\nsa", "COMP_CWORD": "1", "_ACCEL_COMPLETE": "complete_bash"}
    assert accel(**words).stdout == "say\n"
    assert main(["env", "--help"]) == 0
    assert "outside_commands" not in sys.modules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "raise RuntimeError('no driver')",
            "cannot be imported: RuntimeError: no driver; install its package again",
        ),
        ("app = 3", "which is int; expected Typer"),
    ],
)
def test_one_that_cannot_be_used_is_one_error_and_stops_no_other(installed, capsys, text, reason):
    installed(text, say="app")
    assert main(["say"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("accel say: error: the ")
    assert "outside_commands:app" in err
    assert reason in err
    assert err.count("\n") == 1
    assert main(["completion", "bash"]) == 0


def test_the_name_of_a_built_in_command_stays_its_own(installed, capsys):
    installed(completion="app", say="app")
    assert main(["completion", "bash"]) == 0
    assert "said" not in capsys.readouterr().out
    assert main(["--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n  completion ") == 1
    assert printed.err == (
        "accel: the command completion is built in, and hides outside_commands:app, which an installed package adds "
        "under the same name; its package has to rename its entry point in accel_cli.commands\n"
    )
