"""``accel config get`` and ``set``: one option of a configuration file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from accel_cli.completion import CompletionItem
from accel_cli.config_files import FileOption, file_to_read, is_accelerates
from accel_cli.config_show import mistakes_of
from accel_cli.dialect import App, Command
from accel_cli.render import as_text, show_text
from accel_cli.yaml_edits import rewritten
from accel_state.config.files import default_path, find_default, parse_text, read_text, write_text
from accel_state.config.fsdp_conversion import Change
from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import Bool, BoolOrName, StringList
from accel_state.config.roots import complete_root
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import BoundOption, Schema, schema_of, unknown
from accel_state.environment import snapshot
from accel_state.errors import ConfigError

__all__ = ["KeyCommand", "add_commands", "keys", "values"]

_KIND = "compute_environment"
_Key = Annotated[
    str,
    typer.Argument(
        help="The key as in the file, such as num_processes; with a dot inside a section: fsdp_config.fsdp_version."
    ),
]


class KeyCommand(Command):
    """A command whose arguments are a key of a configuration file, and its value."""

    def complete_argument(self, name: str, before: str) -> Iterator[CompletionItem]:
        """The completions of an argument; ``before`` is the word in front of it."""
        if name == "key":
            yield from (CompletionItem(key, text) for key, text in keys())
            return
        bound = values(before)
        if bound is not None:
            truth = ("true", "false") if isinstance(bound.option_type, Bool | BoolOrName) else ()
            yield from (CompletionItem(word) for word in (*truth, *bound.choices))


def add_commands(app: App) -> None:
    """Add ``get`` and ``set`` to ``accel config``."""
    app.command("get", cls=KeyCommand)(get)
    app.command("set", cls=KeyCommand)(set_)


def get(
    key: _Key,
    config_file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the value as JSON.")] = False,
) -> int:
    """Print the value of one key of a configuration file; for a section, all its keys.

    If the file does not have the key, the default is printed. Without a default the exit code is 1.
    """
    path = file_to_read(config_file)
    data = parse_text(read_text(path), path)
    known = _schema(data)
    if key in known.file_keys or key == _KIND:
        value = data.get(key)
    else:
        bound = _option(known, key)
        value = _table(data, bound).get(_name(data, bound))
        if value is None and bound.default is not None:
            value = bound.option_type.dump(bound.default)
    if value is None:
        show_text(f"{path} does not set {key}, and there is no default", sys.stderr)
        return 1
    if as_json:
        typer.echo(json.dumps(value))
    elif isinstance(value, Mapping):
        typer.echo("\n".join(f"{name}: {as_text(item)}" for name, item in value.items()))
    else:
        typer.echo(as_text(value))
    return 0


def set_(
    key: _Key,
    value: Annotated[str, typer.Argument(help="The new value; '' removes the key from the file.")],
    config_file: FileOption = None,
) -> None:
    """Change one key of a configuration file; comments, order and all other lines stay.

    The value is checked first. A missing file is created.
    """
    path = _own_file(config_file)
    text = read_text(path) if path.exists() else ""
    data = parse_text(text, path)
    known = _schema(data)
    if key == _KIND:
        raise ConfigError(f"{key} is the kind of file; accel config makes another file")
    if key in known.file_keys:
        example = next(each.file_path for each in known.options if each.file_key == key and each.keys)
        raise ConfigError(f"{key} is a section; set one of its keys, such as {example}")
    bound = _option(known, key)
    new = _parsed(bound, key, value)
    name = _name(data, bound)
    full = name if bound.file_key is None else f"{bound.file_key}.{name}"
    before = _table(data, bound).get(name)
    changed = _changed(data, bound, name, new)
    if changed == data and path.exists():
        show_text(f"{path}: {full} is {_shown(before)} already")
        return
    what: Literal["drop", "set", "add"] = (
        "drop" if new is None else "set" if name in _table(data, bound) else "add"
    )
    write_text(path, _edited(text, path, bound, Change(name, what, before, name, new), changed))
    show_text(f"{path}: {full}: {_shown(before)} -> {_shown(new)}")
    for error in mistakes_of(path)[1]:
        show_text(f"note: accel launch would refuse the file: {error}", sys.stderr)


def keys() -> Iterator[tuple[str, str]]:
    """Every key that a file can have, with its help; for completion."""
    yield _KIND, "Where runs are: LOCAL_MACHINE or AMAZON_SAGEMAKER."
    for root in (complete_root(), SageMakerConfig):
        for bound in schema_of(root).options:
            if bound.keys and (
                root is not SageMakerConfig or bound.path not in schema_of(complete_root()).by_path
            ):
                yield bound.file_path, bound.about.help


def values(key: str) -> BoundOption | None:
    """The option of a key; None if there is none."""
    for root in (complete_root(), SageMakerConfig):
        found = _find(schema_of(root), key)
        if found is not None:
            return found
    return None


def _own_file(config_file: str | None) -> Path:
    """The file to change, which is never Accelerate's."""
    environ = snapshot()
    ours = default_path(environ)
    found = find_default(environ)
    path = found.path if found is not None else ours
    if config_file is not None:
        path = Path(config_file).expanduser()
    if is_accelerates(path):
        raise ConfigError(
            f"{path} belongs to Accelerate and is not changed; accel config update copies it to {ours}"
        )
    return path


def _schema(data: Mapping[str, Any]) -> Schema:
    is_job = data.get(_KIND) == SageMakerConfig.compute_environment
    return schema_of(SageMakerConfig if is_job else complete_root())


def _find(known: Schema, key: str) -> BoundOption | None:
    section, _, name = key.rpartition(".")
    found = known.by_key.get((section or None, name)) or known.by_path.get(key)
    return found if found is not None and found.keys else None


def _option(known: Schema, key: str) -> BoundOption:
    found = _find(known, key)
    if found is not None:
        return found
    elsewhere = [
        bound.file_path for (_, name), bound in known.by_key.items() if name == key.rpartition(".")[2]
    ]
    if elsewhere:
        raise unknown(key, (), "key", f"; it belongs at {elsewhere[0]}")
    raise unknown(key, [bound.file_path for bound in known.options if bound.keys], "key")


def _table(data: Mapping[str, Any], bound: BoundOption) -> Mapping[str, Any]:
    """The mapping of a file that has an option; empty if the file has none."""
    table = data if bound.file_key is None else data.get(bound.file_key)
    return table if isinstance(table, Mapping) else {}


def _name(data: Mapping[str, Any], bound: BoundOption) -> str:
    """The key that the file has in that mapping, or that it is going to have."""
    return next((name for name in bound.keys if name in _table(data, bound)), bound.keys[0])


def _parsed(bound: BoundOption, key: str, text: str) -> Any:
    """The data to write for a value as it was typed."""
    if isinstance(bound.option_type, StringList) and text.lstrip().startswith("["):
        try:
            value = bound.read(json.loads(text), key)
        except ValueError as error:
            raise ConfigError(f"{key} is {text!r}; expected a JSON list of strings") from error
    else:
        value = bound.parse(text, key)
    return None if value is None else bound.option_type.dump(value)


def _changed(data: Mapping[str, Any], bound: BoundOption, name: str, new: Any) -> dict[str, Any]:
    """The file's data with the new value; None removes the key."""
    table = {key: value for key, value in _table(data, bound).items() if key != name or new is not None}
    if new is not None:
        table[name] = new
    if bound.file_key is None:
        return table
    if not table and bound.file_key not in data:
        return dict(data)
    return {**data, bound.file_key: table or None}


def _edited(text: str, path: Path, bound: BoundOption, change: Change, changed: Mapping[str, Any]) -> str:
    """The text with the change; the whole file is replaced only where that cannot be done in its lines."""
    import yaml

    if not text and path.suffix != ".json":
        start = {_KIND: LaunchConfig.compute_environment}
        return str(yaml.safe_dump({**start, **changed}, sort_keys=False, allow_unicode=True))
    edited, notes = rewritten(text, path, bound.file_key, [change], changed)
    for note in notes:
        show_text(f"note: {note}", sys.stderr)
    return edited


def _shown(value: Any) -> str:
    return "(not set)" if value is None else as_text(value)
