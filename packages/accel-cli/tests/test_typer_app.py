"""Running a Typer application as one command."""

from typing import Annotated

import pytest
import typer

from accel_cli.typer_app import HELP, run_app
from accel_state.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def command(code: Annotated[int, typer.Option("--code")] = 0, fails: bool = False) -> None:
    """Exit with a code."""
    if fails:
        raise ConfigError("this is wrong")
    raise typer.Exit(code)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 0), (["--code", "3"], 3), (["-h"], 0), (["--unknown"], 2), (["--code", "x"], 2)],
)
def test_exit_codes(arguments, code, capsys):
    assert run_app(app, "accel test", arguments) == code
    if code == 2:
        assert "Usage: accel test" in capsys.readouterr().err


def test_errors_of_this_project_propagate():
    with pytest.raises(ConfigError, match="this is wrong"):
        run_app(app, "accel test", ["--fails"])
