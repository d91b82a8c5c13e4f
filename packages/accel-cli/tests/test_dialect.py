"""One dialect: spellings of flags, help pages, and messages about a wrong command line."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from accel_cli.dialect import App, UsageError, describe_usage_error

app = App(help="Try things.")


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Where it is.")],
    max_shard_size: Annotated[int, typer.Option("--max_shard_size", help="How large.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    depth: Annotated[int, typer.Option("--depth", min=1, max=9)] = 1,
    ratio: Annotated[float, typer.Option("--ratio")] = 1.0,
    colour: Annotated[Colour, typer.Option("--colour")] = Colour.red,
) -> int:
    """Show a folder.

    Or another one.

      try show x
      try show y
    """
    typer.echo(f"{folder} {max_shard_size} {as_json}")
    return 7


@app.command("set-up")
def set_up() -> None:
    """Set it up."""


def run(*words: str) -> Any:
    command: Any = typer.main.get_command(app)
    with command.make_context("accel try", list(words)) as context:
        return command.invoke(context)


@pytest.mark.parametrize("flag", ["--max_shard_size", "--max-shard-size", "--max_shard-size"])
def test_dashes_and_underscores_are_equivalent(flag, capsys):
    assert run("show", flag, "3", "x") == 7
    assert run("show", f"{flag}=4", "x") == 7
    assert capsys.readouterr().out == "x 3 False\nx 4 False\n"


def test_words_after_two_dashes_are_not_flags(capsys):
    assert run("show", "--", "--max-shard-size") == 7
    assert capsys.readouterr().out == "--max-shard-size 1 False\n"


def test_subcommands_too_are_found_in_both_spellings():
    assert run("set_up") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["show", "--max-shard-sise", "3"],
            "flag --max_shard_sise does not exist; did you mean --max_shard_size?",
        ),
        (["show", "--jsn"], "flag --jsn does not exist; did you mean --json?"),
        (["show", "--zzz"], "flag --zzz does not exist"),
        (["show"], "missing argument 'folder' (Where it is); accel try show --help shows what it takes"),
        (["show", "--max_shard_size"], "--max_shard_size"),
        (
            ["show", "--max_shard_size", "many", "x"],
            "--max_shard_size is 'many'; input should be a valid integer",
        ),
        (["show", "--depth", "0", "x"], "--depth is '0'; input should be greater than or equal to 1"),
        (["show", "--depth", "10", "x"], "--depth is '10'; input should be less than or equal to 9"),
        (["show", "--ratio", "half", "x"], "--ratio is 'half'; input should be a valid number"),
        (["show", "--colour", "rad", "x"], "--colour is 'rad'; expected one of red, blue; did you mean red?"),
        (
            ["show", "x", "y"],
            "got unexpected extra argument(s) (y); accel try show --help shows what it takes",
        ),
        (["shwo"], "no such command 'shwo'. Did you mean 'show'?"),
        (["qqq"], "no such command 'qqq'; accel try --help shows what it takes"),
    ],
)
def test_a_wrong_command_line_is_named(words, message):
    with pytest.raises(UsageError) as caught:
        run(*words)
    assert message in describe_usage_error(caught.value)


def test_help_pages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for words in (["--help"], ["show", "-h"]):
        with pytest.raises(typer.Exit):
            run(*words)
    whole, one = capsys.readouterr().out.split("Usage: accel try show")
    assert "Try things." in whole
    assert "  show    Show a folder.\n" in whole
    assert one.startswith(" [OPTIONS] FOLDER\n")
    assert "Where it is." in one
    assert re.search(r"--max_shard_size N +How large\. Default: 1\.\n", one)
    assert "\n    try show x\n    try show y\n" in one, "examples keep their lines"
