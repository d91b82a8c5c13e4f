"""Runs one function of a script in each rank, for ``--main_training_function``.

Run as a module: ``python -m accel_state.launching.function FUNCTION KIND NAME [the script's arguments]``. The script is
imported, so what is under ``if __name__ == "__main__"`` does not run.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_state.environment import get_int_from_env
from accel_state.errors import LaunchError
from accel_state.launching.target import Target

__all__ = ["calling", "main"]

_MODULE = "accel_state.launching.function"


def calling(function: str, target: Target) -> Target:
    """The command that a rank runs to call a function of the target.

    Raises:
        LaunchError: the target is a program.
    """
    if target.kind == "program":
        raise LaunchError(
            f"--main_training_function {function} is a function of a Python script, and --no_python starts the program "
            f"{target.name}; leave one of them out"
        )
    return Target(_MODULE, (function, target.kind, target.name, *target.args), "module")


def main(arguments: Sequence[str]) -> None:
    """Import the script, and call the function: without arguments, or with the local rank if it needs one.

    Args:
        arguments: name of the function, ``script`` or ``module``, the script, its arguments.

    Raises:
        LaunchError: the script has no such function.
    """
    name, kind, where, *rest = arguments
    module = _imported(where, kind)
    sys.argv = [str(module.__file__), *rest]
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise LaunchError(
            f"{where} has no function {name}; its functions are {', '.join(known) or 'none'}. Pass one as "
            "--main_training_function, or leave it out to run the script itself"
        )
    function(*([get_int_from_env(["LOCAL_RANK"], 0)] if _needs_one(function) else []))


def _imported(where: str, kind: str) -> ModuleType:
    if kind == "module":
        sys.path.insert(0, "")
        return importlib.import_module(where)
    script = Path(where).resolve()
    sys.path.insert(0, str(script.parent))  # where Python puts the folder of a script
    return importlib.import_module(script.stem)


def _needs_one(function: Callable[..., Any]) -> bool:
    """Whether it has a positional parameter without default, such as the index that torch_xla calls functions with."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty
        for parameter in inspect.signature(function).parameters.values()
    )


if __name__ == "__main__":
    main(sys.argv[1:])
