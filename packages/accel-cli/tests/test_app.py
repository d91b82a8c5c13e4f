"""The command table: help, versions, wrong words, errors as one message, and how little is imported."""

import os
import subprocess
import sys
import time

import pytest

from accel_cli import __version__
from accel_cli.app import COMMANDS, OTHER_NAMES, main


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


def test_help_comes_at_once():
    # The budget is 0.15 s on a quiet machine (tools/bench/cli.py); here only a tenfold loss is caught.
    best = min(_seconds("--help") for _ in range(3))
    assert best < 1.5


def _seconds(*words):
    started = time.monotonic()
    accel(*words)
    return time.monotonic() - started


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
