"""``accel completion``: the script that makes a shell complete ``accel``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from accel_cli.completion import VARIABLE
from accel_cli.dialect import App

__all__ = ["app"]

app = App()


class _Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command()
def completion(
    shell: Annotated[_Shell, typer.Argument(help="The shell.")],
) -> None:
    """Print the script that makes a shell complete accel with Tab.

    eval "$(accel completion bash)"                                  # in ~/.bashrc
    eval "$(accel completion zsh)"                                   # in ~/.zshrc, after compinit
    accel completion fish > ~/.config/fish/completions/accel.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # it does not export it

    typer.echo(get_completion_script(prog_name="accel", complete_var=VARIABLE, shell=shell.value))
