"""``accel completion``: the scripts, which tests-integration/test_completion.py loads into real shells."""

import subprocess

import pytest

from accel_cli.app import main


@pytest.mark.parametrize(
    ("shell", "has"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --command")]
)
def test_the_script_is_printed(shell, has, capsys):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert has in out
    assert f"_ACCEL_COMPLETE=complete_{shell}" in out


def test_bash_can_read_it(capsys):
    main(["completion", "bash"])
    subprocess.run(["bash", "-n"], input=capsys.readouterr().out, text=True, check=True)


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "expected one of bash, zsh, fish" in capsys.readouterr().err


def test_without_a_shell_the_known_ones_are_named_on_one_line(capsys):
    assert main(["completion"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Choose from: bash, zsh, fish; accel completion --help" in line
