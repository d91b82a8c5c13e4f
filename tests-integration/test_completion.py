"""Completion in the real shells, installed as a user installs it, with the keys that a user presses.

`hatch run engines:shells` installs zsh and fish first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

READY = "READY> "


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with `accel` on the path, and a folder with files to choose from."""
    (tmp_path / "bin").mkdir()
    accel = tmp_path / "bin/accel"
    accel.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m accel_cli "$@"\n')
    accel.chmod(0o755)
    (tmp_path / "work").mkdir()
    for name in ("train.py", "settings.yaml"):
        (tmp_path / "work" / name).touch()
    (tmp_path / ".bashrc").write_text(f"PS1='{READY}'\n")
    (tmp_path / ".zshrc").write_text(f"PROMPT='{READY}'\nunsetopt PROMPT_SP\n")
    return tmp_path


def environ(home: Path) -> dict[str, str]:
    return os.environ | {
        "HOME": str(home), "ZDOTDIR": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "dumb",
        "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip


def needs(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed; hatch run engines:shells installs it")
    return found


class Terminal:
    """A shell in a pseudo-terminal."""

    def __init__(self, shell: str, home: Path) -> None:
        self.child = pexpect.spawn(
            shell,
            ["-i"],
            env=environ(home),
            cwd=home / "work",
            encoding="utf-8",
            timeout=30,
            dimensions=(50, 160),
        )
        self.child.expect_exact(READY)

    def press(self, keys: str, expected: str) -> None:
        """Type, wait for the text that has to appear, and clear the line."""
        self.child.send(keys)
        self.child.expect(expected)
        self.child.send("\x03")
        self.child.expect_exact(READY)


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, home: Path) -> Iterator[Terminal]:
    rc = home / f".{request.param}rc"
    compinit = "autoload -U compinit && compinit -u\n" if request.param == "zsh" else ""
    rc.write_text(f'{rc.read_text()}{compinit}eval "$(accel completion {request.param})"\n')
    terminal = Terminal(needs(request.param), home)
    yield terminal
    terminal.child.close(force=True)


def test_tab_completes_commands_flags_choices_topics_and_files(terminal: Terminal) -> None:
    terminal.press("accel conf\t", r"accel config ")
    terminal.press("accel config val\t", r"config validate ")
    terminal.press("accel launch --num_proc\t", r"--num_processes ")
    terminal.press("accel launch --num-proc\t", r"--num-processes ")
    terminal.press("accel launch --mixed_precision bf\t", r"--mixed_precision bf16")
    terminal.press("accel launch --mixed_precision=bf\t", r"--mixed_precision=bf16")
    terminal.press("accel launch --help megatr\t", r"--help megatron_lm")
    terminal.press("accel launch --config_file sett\t", r"--config_file settings\.yaml")
    terminal.press("accel launch --cpu tr\t", r"--cpu train\.py")
    terminal.press("accel launch train.py --data sett\t", r"--data settings\.yaml")
    terminal.press("accel config get num_proc\t", r"get num_processes ")
    terminal.press("accel config set mixed_precision bf\t", r"mixed_precision bf16")
    terminal.press("accel config set --config_file sett\t", r"--config_file settings\.yaml")
    terminal.press("accel plan model --optimizer adam\t", r"--optimizer adamw")
    terminal.press("accel doctor --checkpoint_dir . --num_proc\t", r"--num_processes ")
    terminal.press("accel launch --nproc_per_node au\t", r"--nproc_per_node auto")
    # bash lists choices at the second tab. zsh does at the first, and Ctrl-C would meet it at work for a second.
    tabs = "\t" if str(terminal.child.command).endswith("zsh") else "\t\t"
    terminal.press(f"accel launch --mixed_precision {tabs}", r"(?s)bf16.*fp16")
    terminal.press("accel completion fi\t", r"completion fish")
    terminal.press("accel rehearse --show_o\t", r"--show_output ")


def test_fish_completes_commands_flags_choices_topics_and_files(home: Path) -> None:
    needs("fish")

    def fish(command: str) -> str:
        return subprocess.run(
            ["fish", "-c", command], env=environ(home), cwd=home / "work", capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip

    (home / ".config/fish/completions").mkdir(parents=True)
    fish("accel completion fish > $HOME/.config/fish/completions/accel.fish")
    for line, expected in {
        "accel conf": r"^config\tWrite",
        "accel config val": r"^validate\tCheck",
        "accel launch --num_proc": r"^--num_processes\tTotal number",
        "accel launch --mixed_precision b": r"^bf16$",
        "accel launch --mixed_precision=b": r"^--mixed_precision=bf16$",
        "accel launch --help me": r"^megatron_lm\t",
        "accel launch --config_file sett": r"^settings\.yaml$",
        "accel launch --cpu tr": r"^train\.py$",
        "accel launch train.py --data sett": r"^settings\.yaml$",
        "accel config get num_proc": r"^num_processes\tTotal number",
        "accel config set mixed_precision b": r"^bf16$",
        "accel plan model --optimizer ad": r"^adafactor$",
        "accel completion f": r"^fish$",
        "accel runs tr": r"^train\.py$",
        "accel plan model --batch_size ": r"\A\Z",
    }.items():
        found = fish(f"complete -C '{line}'")
        assert re.search(expected, found, re.MULTILINE), (line, found)
