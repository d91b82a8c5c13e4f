"""The target of a launch: a script, module or program, checked before anything starts."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_state.errors import TargetError

__all__ = ["Target", "check_target"]

_INTERPRETER = re.compile(r"python[\d.]*(\.exe)?")
_SHELL_SUFFIXES = frozenset({".sh", ".bash", ".zsh", ".slurm", ".sbatch"})


@dataclass(frozen=True, slots=True)
class Target:
    """A command without its interpreter.

    Attributes:
        name: path of the script, dotted name of the module, or the program.
        args: its arguments.
        kind: how it is started: ``script`` as ``python name``, ``module`` as ``python -m name``, ``program``
            as ``name``.
    """

    name: str
    args: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"

    def watched_argv(self, python: str = sys.executable) -> tuple[str, ...]:
        """The command of a rank that its launcher watches from its first moment on; of a program the plain command."""
        if self.kind == "program":
            return self.argv(python)
        return (python, "-m", "accel_state.launching.ranks.worker", self.kind, self.name, *self.args)

    def argv(self, python: str = sys.executable) -> tuple[str, ...]:
        """The command line of one rank."""
        start = {"script": (python, self.name), "module": (python, "-m", self.name), "program": (self.name,)}
        return (*start[self.kind], *self.args)


def check_target(target: Target, environ: Mapping[str, str], path: Sequence[str] | None = None) -> None:
    """Check that ``target`` can be started, without importing or running any of it.

    Args:
        target: the target to check.
        environ: the environment of the ranks (programs are found on its ``PATH``).
        path: the module search path; by default the current folder and ``sys.path``.

    Raises:
        TargetError: it does not exist; the message suggests the closest name that does.
    """
    if target.kind == "program":
        _check_program(target.name, environ)
    elif target.kind == "module":
        _check_module(target.name, ["", *sys.path] if path is None else list(path))
    else:
        _check_script(target.name, environ)


def _check_script(name: str, environ: Mapping[str, str]) -> None:
    if not name:
        raise TargetError("the name of the script is empty; a shell variable may be unset")
    script = Path(name)
    if script.suffix == ".ipynb":
        raise TargetError(
            f"{name!r} is a notebook, not a script; start processes inside it with accel_train.notebook_launcher, or "
            f"make a script of it (jupyter nbconvert --to script {shlex.quote(name)}) and launch that"
        )
    if _INTERPRETER.fullmatch(script.name) and not script.is_dir():
        raise TargetError(
            f"{name!r} is not a script; leave it out, since the launcher starts Python itself: accel launch train.py"
        )
    if script.suffix in _SHELL_SUFFIXES:
        raise TargetError(
            f"{name!r} is a shell script, and each rank runs Python; pass the Python script that it starts, or "
            f"--no_python in front of {name} to run it as a program on every rank"
        )
    if script.is_dir():
        if not (script / "__main__.py").exists():
            raise TargetError(f"{name!r} is a folder without a __main__.py; pass the script inside it")
    elif (
        script.exists() and not script.is_file() and not name.startswith(("/dev/fd/", "/dev/stdin", "/proc/"))
    ):
        raise TargetError(f"{name!r} is a pipe or a device, not a script; pass the path of a Python file")
    elif not script.exists():
        scripts = {Path(there).stem: there for there in _scripts_in(script.parent)}
        hint = scripts.get(_nearest(script.stem, list(scripts)) or "")
        if hint is not None:
            advice = f"did you mean {str(script.parent / hint)!r}?"
        elif not script.parent.is_dir():
            advice = f"the folder {str(script.parent)!r} does not exist either"
        elif _is_dotted_name(name):
            advice = f"to run the module {name}, pass --module"
            if shutil.which(name, path=environ.get("PATH")) is not None:
                advice += f", and to run the program {name} on every rank, --no_python"
        else:
            advice = _whereabouts()
        raise TargetError(f"the script {name!r} does not exist; {advice}")
    elif not os.access(script, os.R_OK):
        raise TargetError(
            f"the script {name!r} cannot be read: permission denied; chmod u+r {shlex.quote(name)}"
        )


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    if shutil.which(name, path=environ.get("PATH")) is not None:
        return
    here = Path(name)
    if here.is_dir():
        raise TargetError(f"{name!r} is a folder; with --no_python the first word must be a program")
    if here.exists():
        raise TargetError(
            f"{name!r} is not executable; make it executable (chmod +x {name}), "
            "or omit --no_python if it is a Python script"
        )
    raise TargetError(
        f"the program {name!r} was not found; with --no_python the first word must be a program"
    )


def _check_module(name: str, path: list[str]) -> None:
    if not _is_dotted_name(name):
        raise TargetError(
            f"{name!r} is not a module name; with --module pass a dotted name such as package.train, "
            "without .py and without slashes"
        )
    parts = name.split(".")
    places: list[str] | None = path
    for depth, part in enumerate(parts):
        spec = _find(parts[: depth + 1], places)
        if spec is None:
            where = ".".join(parts[:depth]) or "the current folder and sys.path"
            hint = _nearest(part, _modules_in(places or ()))
            prefix = ".".join([*parts[:depth], ""])
            advice = f"did you mean {prefix + hint!r}?" if hint else _whereabouts()
            raise TargetError(f"no module named {name!r}: {part!r} is not in {where}; {advice}")
        places = (
            list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        )
        if places is None and depth + 1 < len(parts):
            raise TargetError(f"no module named {name!r}: {'.'.join(parts[: depth + 1])} is not a package")
    if places is not None and _find([*parts, "__main__"], places) is None:
        raise TargetError(f"{name!r} is a package without a __main__ module; name a module inside it")


def _find(parts: list[str], places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    found = importlib.machinery.PathFinder.find_spec(".".join(parts), places)
    if found is None and len(parts) == 1:
        # Editable installs use their own finders; looking up a top-level name imports nothing.
        return importlib.util.find_spec(parts[0])
    return found


def _whereabouts() -> str:
    try:
        return f"the current folder is {os.getcwd()!r}"
    except FileNotFoundError:
        return "the current folder has been removed"


def _is_dotted_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split(".")) and not name.endswith(".py")


def _names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _scripts_in(folder: Path) -> list[str]:
    return [
        name
        for name in _names_in(folder)
        if (folder / name).is_file() or (folder / name / "__main__.py").is_file()
    ]


def _modules_in(places: Iterable[str]) -> list[str]:
    names = {entry for place in places for entry in _names_in(Path(place))}
    return sorted(name.removesuffix(".py") for name in names if "." not in name or name.endswith(".py"))


def _nearest(name: str, names: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return close[0] if close else None
