"""Configuration files: locations, strict reading, writing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import JsonObject
from accel_state.config.schema import BoundOption, Schema, build, schema_of, unknown
from accel_state.errors import ConfigError, ConfigNotFoundError, UnknownKeyError

if TYPE_CHECKING:
    from accel_state.config.sagemaker import SageMakerConfig

__all__ = [
    "DefaultFile",
    "FileLayer",
    "default_path",
    "find_default",
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

# Keys of older versions without effect: reported in a note, not an error.
_RETIRED: Mapping[str, str] = {
    "ipex_config": "IPEX is part of PyTorch now",
    "use_xpu": "devices are found by PyTorch",
    "mpirun_config.mpirun_ccl": "oneCCL's workers are set by its own variables",
}
# Keys that were moved, or that Accelerate writes in another place.
_MOVED: Mapping[tuple[str | None, str], str] = {
    ("deepspeed_config", "gradient_accumulation_steps"): "gradient_accumulation.num_steps",
    (None, "dynamo_backend"): "dynamo.backend",
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
    """

    root: type[LaunchConfig] | type[SageMakerConfig]
    values: dict[str, Any]
    notes: tuple[str, ...]


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
    try:
        _write(path.resolve(), text)
    except OSError as error:
        raise ConfigError(
            f"configuration file {path} cannot be written ({error.strerror}); pass another path"
        ) from error


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())  # line ends as they are
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


load = load_config  # shorter name for use as ``accel_state.config.load``
save = save_config


def default_path(environ: Mapping[str, str]) -> Path:
    """Path of our default configuration file: ``$HF_HOME/accel/default_config.yaml``."""
    return _hf_home(environ) / "accel" / _NAME


def find_default(environ: Mapping[str, str]) -> DefaultFile | None:
    """The default file: ours, else Accelerate's, else None."""
    own = default_path(environ)
    if own.is_file():
        return DefaultFile(own, foreign=False)
    theirs = _hf_home(environ) / "accelerate" / _NAME
    return DefaultFile(theirs, foreign=True) if theirs.is_file() else None


def read_layer(path: str | Path) -> FileLayer:
    """Read a file as a layer of ``resolve``; errors are those of ``load_config``."""
    path = Path(path).expanduser()
    return _Reader(parse_text(read_text(path), path), str(path)).layer()


def _hf_home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME")
    if home:
        return Path(home).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"


def read_text(path: Path) -> str:
    """The text of a configuration file, with its line ends.

    Raises:
        ConfigNotFoundError: it does not exist.
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")  # Windows editors write a byte order mark
    except FileNotFoundError:
        raise ConfigNotFoundError(
            f"configuration file {path} does not exist; `accel config` creates one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error


def parse_text(text: str, path: Path) -> dict[str, Any]:
    """The data of a configuration file: JSON if its name ends in ``.json``, else YAML.

    Raises:
        ConfigError: the text is not a mapping, is not valid, or repeats a key.
    """
    data = (_parse_json if path.suffix == ".json" else _parse_yaml)(text, path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}; expected a mapping of option names to values")
    if wrong := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(f"{path}: key {wrong[0]!r} is not a string; keys are option names")
    return data


def _parse_json(text: str, path: Path) -> Any:
    import json

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated([key for key, _ in pairs], path)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        for table in _tables(node):
            _refuse_repeated([key.value for key, _ in table.value if isinstance(key.value, str)], path)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def _tables(node: Any) -> Iterator[Any]:
    """The mappings of a YAML document, outermost first."""
    if getattr(node, "id", "") == "mapping":
        yield node
        for _, value in node.value:
            yield from _tables(value)


def _refuse_repeated(keys: Sequence[str], path: Path) -> None:
    # The parsers would silently use the last one.
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{path}: key {key} occurs {keys.count(key)} times; keep one of them")


class _Reader:
    """One pass over the data of a file."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = dict(data)
        self.source = source
        self.values: dict[str, Any] = {}
        self.keys: dict[str, str] = {}  # path to the key that set it
        self.notes: list[str] = []
        self.unknown: list[UnknownKeyError] = []

    def layer(self) -> FileLayer:
        root = self._root(self.data.pop("compute_environment", None))
        known = schema_of(root)
        fp16 = self.data.pop("fp16", None)
        for key, value in self.data.items():
            if key in known.file_keys:
                self._section(known, key, value)
            else:
                self._entry(known, None, key, value)
        if self.unknown:
            raise UnknownKeyError("; ".join(f"{self.source}: {error}" for error in self.unknown))
        if fp16 is True and self.values.get("mixed_precision") is None:
            self.values["mixed_precision"] = "fp16"
        if root is LaunchConfig:
            self._derive()
        return FileLayer(root, self.values, tuple(self.notes))

    def _root(self, environment: Any) -> type[LaunchConfig] | type[SageMakerConfig]:
        if environment in (None, LaunchConfig.compute_environment):
            return LaunchConfig
        from accel_state.config.sagemaker import SageMakerConfig

        if environment == SageMakerConfig.compute_environment:
            return SageMakerConfig
        raise ConfigError(
            f"{self.source}: compute_environment is {environment!r}; expected one of "
            f"{LaunchConfig.compute_environment}, {SageMakerConfig.compute_environment}"
        )

    def _section(self, known: Schema, file_key: str, value: Any) -> None:
        if value is None:
            return
        try:
            inner = JsonObject().read(value)
        except ValueError:
            raise ConfigError(
                f"{self.source}: {file_key} is {value!r}; expected a mapping of options to values"
            ) from None
        for key, item in inner.items():
            self._entry(known, file_key, key, item)

    def _entry(self, known: Schema, file_key: str | None, key: str, value: Any) -> None:
        full = f"{file_key}.{key}" if file_key else key
        bound = known.by_key.get((file_key, key)) or known.by_path.get(_MOVED.get((file_key, key), ""))
        if bound is None:
            if full in _RETIRED:
                self.notes.append(f"{self.source}: {full} is ignored: {_RETIRED[full]}")
            else:
                self.unknown.append(_unknown_key(known, file_key, key))
            return
        read = None if value is None else bound.read(value, f"{self.source}: {full}")
        if read is not None:
            self._set(bound, full, read)

    def _set(self, bound: BoundOption, full: str, value: Any) -> None:
        before = self.keys.get(bound.path)
        if before is not None and self.values[bound.path] != value:
            raise ConfigError(
                f"{self.source}: {before} is {self.values[bound.path]!r} and {full} is {value!r}, "
                "but both set the same option; keep one of them"
            )
        self.values[bound.path] = value
        self.keys[bound.path] = full

    def _derive(self) -> None:
        if self.values.get("distributed_type") == "NO":
            self.values.setdefault("num_processes", 1)
        if any(path.startswith("parallelism.") for path in self.values):
            self.values.setdefault("use_parallelism_config", True)


def _unknown_key(known: Schema, file_key: str | None, key: str) -> UnknownKeyError:
    full = f"{file_key}.{key}" if file_key else key
    elsewhere = [bound.file_path for (_, other), bound in known.by_key.items() if other == key]
    if elsewhere:
        return UnknownKeyError(f"key {full} does not exist; it belongs at {elsewhere[0]}")
    if file_key is None:
        names = [bound.keys[0] for (place, _), bound in known.by_key.items() if place is None]
        return unknown(full, [*names, *known.file_keys, "compute_environment"], "key")
    names = [f"{place}.{other}" for place, other in known.by_key if place == file_key]
    return unknown(full, names, "key")
