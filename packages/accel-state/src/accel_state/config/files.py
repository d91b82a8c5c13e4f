"""Configuration files: locations, strict reading, writing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import JsonObject
from accel_state.config.roots import complete_root, root_for, selects_installed
from accel_state.config.schema import BoundOption, Schema, all_of, build, schema_of, unknown
from accel_state.config.sources import FilePlace
from accel_state.errors import ConfigError, ConfigNotFoundError, UnknownKeyError
from accel_state.messages import shown, without_secrets
from accel_state.whole_files import read_whole, write_whole

if TYPE_CHECKING:
    from accel_state.config.sagemaker import SageMakerConfig

__all__ = [
    "DefaultFile",
    "FileLayer",
    "accelerates_folder",
    "default_path",
    "find_default",
    "find_mistakes",
    "layer_of",
    "load",
    "load_config",
    "parse_text",
    "read_layer",
    "read_text",
    "save",
    "save_config",
    "write_text",
]

_NAME = "default_config.yaml"
_MOST_ALIASES = 30
_MOST_BYTES = 10_000_000  # far more than a configuration takes; a device such as /dev/zero never ends

# Keys of older versions without effect: reported in a note, not an error.
_RETIRED: Mapping[str, str] = {
    "ipex_config": "IPEX is part of PyTorch now",
    "use_xpu": "devices are found by PyTorch",
    "mpirun_config.mpirun_ccl": "oneCCL's workers are set by its own variables",
}
# Keys of DeepSpeed's own configuration that files in use have here, where Accelerate reads them without any effect.
_OF_DEEPSPEED: Mapping[str, str] = {
    "deepspeed_config.seq_parallel_communication_data_type": "DeepSpeed's own file, deepspeed_config_file, has it",
}
# Keys that were moved, or that Accelerate writes in another place.
_MOVED: Mapping[tuple[str | None, str], str] = {
    ("deepspeed_config", "gradient_accumulation_steps"): "gradient_accumulation.num_steps",
    (None, "dynamo_backend"): "dynamo.backend",
    ("tp_config", "tp_size"): "parallelism.tp_size",
}
_OLD_SECTIONS = frozenset({"tp_config"})  # of Accelerate 1.4 to 1.6
# Distributed types of older versions (0.12 to 0.17, 1.4 to 1.6), what they are read as, and why.
_OLD_TYPES: Mapping[str, tuple[str | None, str]] = {
    "MPS": ("NO", "one process, whose device PyTorch finds"),
    "TP": (None, "tensor parallelism is a dimension of parallelism_config"),
}


@dataclasses.dataclass(frozen=True)
class DefaultFile:
    """A configuration file at a default location.

    Attributes:
        path: its path.
        foreign: it belongs to Accelerate; it is read, never changed.
    """

    path: Path
    foreign: bool


@dataclasses.dataclass(frozen=True)
class FileLayer:
    """The contents of a configuration file.

    Attributes:
        root: ``LaunchConfig`` or ``SageMakerConfig``, by its ``compute_environment``.
        values: option values by path.
        notes: messages for the user about ignored or converted keys.
        places: key and line of every value, by path of the option.
    """

    root: type[LaunchConfig] | type[SageMakerConfig]
    values: dict[str, Any]
    notes: tuple[str, ...]
    places: Mapping[str, FilePlace] = dataclasses.field(default_factory=dict)


def load_config(path: str | Path) -> LaunchConfig | SageMakerConfig:
    """Read a configuration file: JSON if its name ends in ``.json``, else YAML.

    Raises:
        ConfigNotFoundError: the file does not exist.
        UnknownKeyError: a key does not exist, at any depth; the message has its path and the closest keys.
        ConfigError: the file is not a YAML or JSON mapping, or a value has the wrong type.
    """
    layer = read_layer(path)
    if layer.notes:
        import logging

        for note in layer.notes:
            logging.getLogger(__name__).warning(note)
    config: LaunchConfig | SageMakerConfig = build(layer.root, layer.values)
    return config


def save_config(config: LaunchConfig | SageMakerConfig, path: str | Path) -> Path:
    """Write a configuration file: JSON if its name ends in ``.json``, else YAML; missing folders are created.

    Unset values and empty sections are omitted, and so are options of a single launch (``--module``, ``--dry_run``, …).
    Loading the file gives an equal configuration.

    Returns:
        The path.

    Raises:
        ConfigError: the file cannot be written; an existing file is not changed.
    """
    path = Path(path).expanduser()
    data = config.to_dict()
    if path.suffix == ".json":
        import json

        text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(data, allow_unicode=True)
    write_text(path, text)
    return path


def write_text(path: Path, text: str) -> None:
    """Write a whole configuration file or none of it; missing folders are created, a symbolic link is kept.

    Raises:
        ConfigError: it cannot be written; an existing file is not changed.
    """
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text)
    except OSError as error:
        raise ConfigError(
            f"configuration file {path} cannot be written ({error.strerror}); pass another path"
        ) from error


load = load_config  # shorter name for use as ``accel_state.config.load``
save = save_config


def default_path(environ: Mapping[str, str]) -> Path:
    """Path of our default configuration file: ``$XDG_CONFIG_HOME/accel/default_config.yaml``."""
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "accel" / _NAME


def find_default(environ: Mapping[str, str]) -> DefaultFile | None:
    """The default file: ours, else one of ours in a folder of caches, its place before, else Accelerate's."""
    theirs = accelerates_folder(environ)
    for path in (default_path(environ), theirs.with_name("accel") / _NAME, theirs / _NAME):
        if path.is_file():
            return DefaultFile(path, foreign=path.parent == theirs)
    return None


def read_layer(path: str | Path) -> FileLayer:
    """Read a file as a layer of ``resolve``; errors are those of ``load_config``."""
    path = Path(path).expanduser()
    return _strict(_Reader(*_parse(read_text(path), path), source=str(path)))


def layer_of(data: Mapping[str, Any], source: str) -> FileLayer:
    """Read data with the keys of a file as a layer of ``resolve``.

    Args:
        data: keys to values, in the places that they have in a file.
        source: its name in messages.
    """
    return _strict(_Reader(data, {}, [], source))


def _strict(reader: _Reader) -> FileLayer:
    layer, problems = reader.read()
    if not problems:
        return layer
    raise all_of(problems)


def find_mistakes(path: str | Path) -> tuple[FileLayer | None, list[ConfigError]]:
    """Read a file and collect all mistakes in it, instead of raising.

    Returns:
        The layer that could be read, None if the file is not a mapping; and the errors in the order of the file.
    """
    path = Path(path).expanduser()
    try:
        return _Reader(*_parse(read_text(path), path), source=str(path)).read()
    except ConfigError as error:
        return None, [error]


def accelerates_folder(environ: Mapping[str, str]) -> Path:
    """The folder of Accelerate's default configuration file, in which nothing is changed."""
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environ.get("HF_HOME") or caches).expanduser() / "accelerate"


Lines = Mapping[tuple[str, ...], int]
"""Line of each key, by the keys that lead to it."""


def read_text(path: Path) -> str:
    """The text of a configuration file, with its line ends.

    Raises:
        ConfigNotFoundError: it does not exist.
        ConfigError: it cannot be read, or is larger than any configuration.
    """
    try:
        return read_whole(path, _MOST_BYTES).decode("utf-8-sig")  # Windows editors write a byte order mark
    except FileNotFoundError:
        raise ConfigNotFoundError(
            f"configuration file {path} does not exist; `accel config` creates one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"configuration file {path} cannot be read: {reason}; pass the file that accel config wrote"
        ) from error


def parse_text(text: str, path: Path) -> dict[str, Any]:
    """The data of a configuration file: JSON if its name ends in ``.json``, else YAML.

    Raises:
        ConfigError: the text is not a mapping, is not valid, or repeats a key.
    """
    data, _, repeated = _parse(text, path)
    if repeated:
        raise all_of(repeated)
    return data


def _parse(text: str, path: Path) -> tuple[dict[str, Any], Lines, list[ConfigError]]:
    """The data, the line of each key, and an error for each key that is repeated."""
    data, lines, repeated = (_parse_json if path.suffix == ".json" else _parse_yaml)(text, path)
    if data is None:
        return {}, lines, repeated
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}; expected a mapping of option names to values")
    if wrong := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(f"{path}: key {wrong[0]!r} is not a string; keys are option names")
    return data, lines, repeated


def _parse_json(text: str, path: Path) -> tuple[Any, Lines, list[ConfigError]]:
    import json

    with _told_by(path, "JSON", ValueError):  # also for a number of thousands of digits
        data = json.loads(text)
        # YAML contains JSON, but for tabs, which are only between its values.
        return data, *_parse_yaml(text.replace("\t", " "), path)[1:]


def _parse_yaml(text: str, path: Path) -> tuple[Any, Lines, list[ConfigError]]:
    import yaml

    with _told_by(path, "YAML", yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
        # Aliases multiply: with more of them a short text can hold more values than memory.
        if (
            "*" in text
            and sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > _MOST_ALIASES
        ):
            raise ConfigError(
                f"{path} has more than {_MOST_ALIASES} aliases (*name), which no configuration has: write the values"
            )
        loader = yaml.SafeLoader(text)
        loader.name = path.name  # in messages, instead of "<unicode string>"
        try:
            node = loader.get_single_node()
            lines: dict[tuple[str, ...], int] = {}
            repeated: list[ConfigError] = []
            for above, table in _tables(node, ()):
                seen: dict[str, tuple[Any, Any]] = {}
                for key, value in ((key, value) for key, value in table.value if isinstance(key.value, str)):
                    first, same = seen.setdefault(key.value, (key, value))
                    alike = value.id == "scalar" and (same.tag, same.value) == (value.tag, value.value)
                    if first is not key and not alike:  # Accelerate 0.30 wrote `debug: false` twice
                        repeated.append(_repeated(path, first, key))
                lines |= {(*above, name): _line(key) for name, (key, _) in seen.items()}
            return (None if node is None else loader.construct_document(node)), lines, repeated
        finally:
            loader.dispose()


@contextlib.contextmanager
def _told_by(path: Path, language: str, *errors: type[Exception]) -> Iterator[None]:
    """Context that names the file in a parser's errors."""
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply; a configuration has mappings in mappings at most"
        ) from None
    except errors as error:
        raise ConfigError(f"{path} is not valid {language}: {error}") from error


def _tables(node: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The mappings of a YAML document with the keys that lead to them, outermost first.

    Raises:
        RecursionError: an alias refers to a value that contains it.
    """
    kind = getattr(node, "id", "")
    if kind == "mapping":
        yield above, node
        for key, value in node.value:
            yield from _tables(value, (*above, str(key.value)))
    elif kind == "sequence":
        for value in node.value:
            yield from _tables(value, above)


def _repeated(path: Path, first: Any, again: Any) -> ConfigError:
    """The error for a key that is there twice: the parsers would silently use the last one."""
    where = "twice in that line" if _line(first) == _line(again) else f"in line {_line(first)} already"
    return ConfigError(f"{path}, line {_line(again)}: key {again.value[:200]} is {where}; keep one of them")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


class _Reader:
    """One pass over the data of a file."""

    def __init__(
        self, data: Mapping[str, Any], lines: Lines, problems: list[ConfigError], source: str
    ) -> None:
        self.data = dict(data)
        self.lines = lines
        self.source = source
        self.values: dict[str, Any] = {}
        self.places: dict[str, FilePlace] = {}
        self.notes: list[str] = []
        self.problems = problems

    def read(self) -> tuple[FileLayer, list[ConfigError]]:
        """The layer, and all mistakes in the file."""
        root: type[LaunchConfig] | type[SageMakerConfig] = LaunchConfig
        try:
            root = self._root(self.data.pop("compute_environment", None))
        except ConfigError as error:
            self.problems.append(error)
        self._convert_old_type()
        if root is LaunchConfig and self._names_a_strategy():
            root = complete_root()
        known = schema_of(root)
        fp16 = self.data.pop("fp16", None)
        for key, value in self.data.items():
            if key in known.file_keys or key in _OLD_SECTIONS:
                self._section(known, key, value)
            else:
                self._entry(known, None, key, value)
        if fp16 is True and self.values.get("mixed_precision") is None:
            self.values["mixed_precision"] = "fp16"
            self.places["mixed_precision"] = FilePlace("fp16", self.lines.get(("fp16",)))
        if issubclass(root, LaunchConfig):
            self._derive()
            root = root_for(self.values)  # Accelerate writes empty sections of what a run does not use
        return FileLayer(root, self.values, tuple(self.notes), self.places), self.problems

    def _names_a_strategy(self) -> bool:
        """Whether the file has a key, or a distributed type, that is none of ``LaunchConfig`` itself."""
        known = schema_of(LaunchConfig)
        others = {key for key in self.data if key not in known.file_keys and (None, key) not in known.by_key}
        others -= {"fp16", *_OLD_SECTIONS, *_RETIRED, *(key for place, key in _MOVED if place is None)}
        return bool(others) or selects_installed(self.data.get("distributed_type"))

    def _convert_old_type(self) -> None:
        before = self.data.get("distributed_type")
        if isinstance(before, str) and before in _OLD_TYPES:
            now, why = _OLD_TYPES[before]
            self.data["distributed_type"] = now
            read = "not set" if now is None else now
            self.notes.append(
                f"{self._where('distributed_type')}: distributed_type {before} is read as {read}: {why}"
            )

    def _where(self, *keys: str) -> str:
        line = self.lines.get(keys)
        return self.source if line is None else f"{self.source}, line {line}"

    def _root(self, environment: Any) -> type[LaunchConfig] | type[SageMakerConfig]:
        if environment in (None, LaunchConfig.compute_environment):
            return LaunchConfig
        from accel_state.config.sagemaker import SageMakerConfig

        if environment == SageMakerConfig.compute_environment:
            return SageMakerConfig
        raise ConfigError(
            f"{self._where('compute_environment')}: compute_environment is {shown(environment)}; expected one of "
            f"{LaunchConfig.compute_environment}, {SageMakerConfig.compute_environment}"
        )

    def _section(self, known: Schema, file_key: str, value: Any) -> None:
        if value in (None, "", []):
            return
        try:
            inner = JsonObject().read(value)
        except ValueError:
            self.problems.append(
                ConfigError(
                    f"{self._where(file_key)}: {file_key} is {shown(without_secrets(value))}; expected a mapping of "
                    "options to values"
                )
            )
            return
        for key, item in inner.items():
            self._entry(known, file_key, str(key), item)

    def _entry(self, known: Schema, file_key: str | None, key: str, value: Any) -> None:
        if len(key) > 200:  # which would be compared with all names of options
            self.problems.append(UnknownKeyError(f"{self.source}: key {shown(key)} does not exist"))
            return
        keys = (file_key, key) if file_key else (key,)
        full, where = ".".join(keys), self._where(*keys)
        bound = known.by_key.get((file_key, key)) or known.by_path.get(_MOVED.get((file_key, key), ""))
        if bound is None:
            if found := {**_RETIRED, **_OF_DEEPSPEED}.get(full):
                self.notes.append(f"{where}: {full} is ignored: {found}")
            else:
                self.problems.append(_unknown_key(known, file_key, key, where))
            return
        try:
            read = None if value is None else bound.read(value, f"{where}: {full}")
            if read is not None:
                self._set(bound, full, read, where, self.lines.get(keys))
        except ConfigError as error:
            self.problems.append(error)

    def _set(self, bound: BoundOption, full: str, value: Any, where: str, line: int | None) -> None:
        before = self.places.get(bound.path)
        if before is not None and self.values[bound.path] != value:
            raise ConfigError(
                f"{where}: {before.key} is {self.values[bound.path]!r} and {full} is {value!r}, "
                "but both set the same option; keep one of them"
            )
        self.values[bound.path] = value
        self.places[bound.path] = FilePlace(full, line)

    def _derive(self) -> None:
        if self.values.get("distributed_type") == "NO":
            self.values.setdefault("num_processes", 1)
        sizes = [path for path in self.values if path.startswith("parallelism.")]
        if sizes and "use_parallelism_config" not in self.values:
            self.values["use_parallelism_config"] = True
            self.places["use_parallelism_config"] = self.places[sizes[0]]


def _unknown_key(known: Schema, file_key: str | None, key: str, where: str) -> UnknownKeyError:
    full = f"{file_key}.{key}" if file_key else key
    elsewhere = [bound.file_path for (_, other), bound in known.by_key.items() if other == key]
    if elsewhere:
        return UnknownKeyError(f"{where}: key {full} does not exist; it belongs at {elsewhere[0]}")
    if file_key is None:
        names = [bound.keys[0] for (place, _), bound in known.by_key.items() if place is None]
        return unknown(full, [*names, *known.file_keys, "compute_environment"], f"{where}: key")
    names = [f"{place}.{other}" for place, other in known.by_key if place == file_key]
    return unknown(full, names, f"{where}: key")
