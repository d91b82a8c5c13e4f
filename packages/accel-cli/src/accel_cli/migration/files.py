"""Migration of files by their kind: Python sources, shell scripts, configuration files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from accel_cli.migration.attributes import missing_attributes
from accel_cli.migration.imports import imports_accelerate, rewrite_imports
from accel_cli.migration.plain_loops import notes_on_loops
from accel_cli.migration.result import Migration, Remark
from accel_cli.migration.source import PythonSource
from accel_state.errors import ConfigError
from accel_state.whole_files import read_whole

__all__ = ["find_files", "migrate_file", "migrate_source", "starts_of_refused"]

_KINDS = {
    **dict.fromkeys((".py",), "python"),
    **dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), "shell"),
    **dict.fromkeys((".yaml", ".yml", ".json"), "configuration"),
}
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
_WORD, _END = r"(?<![\w.-])", r"(?![\w.-])"
_COMMAND = re.compile(
    rf"{_WORD}accelerate(?=[ \t]+(?:launch|config|env|test|estimate-memory|merge-weights|to-fsdp2|tpu-config){_END})"
    rf"|{_WORD}accelerate-(?=(?:launch|config|estimate-memory|merge-weights){_END})"
    r"|(?<=-m )accelerate\.commands\.(?:accelerate_cli|(?P<module>launch|env|test|tpu|estimate|merge|to_fsdp2))"
    rf"{_END}"
)
_MODULES = {
    "tpu": "tpu-config",
    "estimate": "estimate-memory",
    "merge": "merge-weights",
    "to_fsdp2": "to-fsdp2",
}
"""Modules of Accelerate that ``python -m`` runs, where the command has another name."""
_TOO_DEEP = "this is nested too deeply"
_CONFIGURES = re.compile(r"^[ \t]*\"?(compute_environment|distributed_type)\"?\s*:", re.MULTILINE)


def find_files(paths: list[Path]) -> Iterator[Path]:
    """The files to look at: the given ones, and those of a known kind in given folders, except in hidden ones.

    Links in folders are left out: they may lead outside, and files inside are found anyway.

    Raises:
        ConfigError: a path does not exist, or a given file has no known kind.
    """
    for path in paths:
        if path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(
                    name for name in folders if not name.startswith(".") and name not in _LEFT_OUT
                )
                files = (Path(folder, name) for name in sorted(names) if Path(name).suffix in _KINDS)
                yield from (file for file in files if file.is_file() and not file.is_symlink())
        elif not path.exists():
            raise ConfigError(f"{path} does not exist")
        elif path.suffix not in _KINDS:
            raise ConfigError(f"{path} is none of the kinds that can be migrated: {', '.join(_KINDS)}")
        else:
            yield path


def migrate_file(path: Path) -> Migration:
    """The proposal for a file. Nothing is written.

    Raises:
        ConfigError: the file is not text, or cannot be read.
    """
    try:
        text = read_whole(path).decode()  # line ends stay as they are
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    match _KINDS[path.suffix]:
        case "python":
            return migrate_source(text)
        case "shell":
            return Migration(text, _COMMAND.sub(_ours, text))
        case _:
            return _configuration(path, text)


def starts_of_refused(path: Path, text: str, refused: Collection[Path]) -> tuple[Remark, ...]:
    """Lines of a shell script that start, by Accelerate's command, a Python source that is not migrated.

    Both stay as they are: the source needs Accelerate, and so does its launch.

    Args:
        path: path of the shell script.
        text: its text.
        refused: resolved paths of Python sources.
    """
    if _KINDS[path.suffix] != "shell":
        return ()
    known = {source.name for source in refused}
    found = []
    for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), 1):
        words = line.split() if _COMMAND.search(line) else ()
        names = [name for word in words for name in (word.strip("'\""), f"{word.replace('.', '/')}.py")]
        names = [name for name in names if name.rpartition("/")[2] in known]
        places = [(folder / name).resolve() for name in names for folder in (path.parent, Path())]
        found += [
            Remark(number, f"accelerate stays: it starts {place.name}, which is not changed")
            for place in dict.fromkeys(places)
            if place in refused
        ]
    return tuple(found)


def migrate_source(text: str) -> Migration:
    """The proposal for a Python source.

    Args:
        text: the source; imports of ``accelerate`` are rewritten, and plain PyTorch training loops get notes.
    """
    try:
        source = PythonSource(text)
    except (RecursionError, MemoryError):
        return Migration(text, text, (Remark(1, _TOO_DEEP),))
    except SyntaxError as error:
        why = _TOO_DEEP if "too many nested" in error.msg else f"this is not Python: {error.msg}"
        return Migration(text, text, (Remark(error.lineno or 1, why),))
    except ValueError as error:  # a byte that no source may have
        return Migration(text, text, (Remark(1, f"this is not Python: {error}"),))
    after, refusals, notes = rewrite_imports(source)
    if after == text and not refusals:
        kept = notes if imports_accelerate(source) else []  # mentions alone are nothing to note
        return Migration(text, text, (), (*kept, *notes_on_loops(source)))
    refusals = sorted({*refusals, *missing_attributes(source)})
    return Migration(text, text if refusals else after, tuple(refusals), tuple(notes))


def _ours(match: re.Match[str]) -> str:
    if ".commands." in match.group():  # python -m accelerate.commands.launch
        module = match["module"]
        return "accel_cli" if module is None else f"accel_cli {_MODULES.get(module, module)}"
    return "accel" if match.group().endswith("e") else "accel "


def _configuration(path: Path, text: str) -> Migration:
    """Configuration files are read as they are; only keys that this library does not take are reported."""
    from accel_state.config.files import read_layer

    if not _CONFIGURES.search(text):
        return Migration(text, text)
    try:
        layer = read_layer(path)
    except ConfigError as error:
        return Migration(text, text, (Remark(1, str(error)),))
    return Migration(text, text, (), tuple(Remark(1, note) for note in layer.notes))
