"""Names of ``accelerate.commands.config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from accel_state import default_config_file
from accel_state.config.default_config import load_config_from_file as load
from accel_state.config.files import layer_of, save_config
from accel_state.config.launch import LaunchConfig as _Local
from accel_state.config.sagemaker import SageMakerConfig as _Cloud
from accel_state.config.schema import build, schema_of

_FILE = Path(default_config_file)

cache_dir = str(_FILE.parent)
default_yaml_config_file = str(_FILE)
default_json_config_file = str(_FILE.with_suffix(".json"))


class BaseConfig:
    """A configuration as its file has it: keys are attributes, and unset ones are None or an empty mapping.

    Args:
        **values: keys of the file, mappings of sections included.

    Raises:
        UnknownKeyError: a key does not exist.
        ConfigError: a value is wrong.
    """

    _root: ClassVar[type[_Local | _Cloud]] = _Local
    compute_environment: Any = _Local.compute_environment

    def __init__(self, **values: Any) -> None:
        known = schema_of(self._root)
        for bound in known.options:
            if bound.keys and bound.file_key is None:
                setattr(self, bound.keys[0], bound.default)
        for key in known.file_keys:
            setattr(self, key, {})
        vars(self).update(values)
        self._read()

    def _read(self) -> Any:
        """The configuration that the attributes describe, for the launcher."""
        set_here = {key: value for key, value in vars(self).items() if value not in (None, {})}
        layer = layer_of(
            {"compute_environment": self._root.compute_environment, **set_here}, type(self).__name__
        )
        return build(layer.root, layer.values)

    def to_dict(self) -> dict[str, Any]:
        """Keys and values, without those that are not set."""
        found: dict[str, Any] = self._read().to_dict()
        return found

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write a YAML file."""
        save_config(self._read(), yaml_file)

    def to_json_file(self, json_file: str | Path) -> None:
        """Write a JSON file, whose name ends in ``.json``."""
        save_config(self._read(), json_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> Self:
        """Read a file; None: the default one."""
        data = load_config_from_file(yaml_file).to_dict()
        return cls(**{key: value for key, value in data.items() if key != "compute_environment"})

    @classmethod
    def from_json_file(cls, json_file: str | Path | None = None) -> Self:
        """Read a file; None: the default one."""
        return cls.from_yaml_file(json_file)


class ClusterConfig(BaseConfig):
    """The configuration of a run on your own machines."""


class SageMakerConfig(BaseConfig):
    """The configuration of a job on Amazon SageMaker."""

    _root = _Cloud
    compute_environment = _Cloud.compute_environment


def load_config_from_file(config_file: str | Path | None = None) -> ClusterConfig | SageMakerConfig:
    """Read a configuration file; None: the default file, ours or else Accelerate's.

    Raises:
        ConfigNotFoundError: there is no such file.
        ConfigError: it is invalid.
    """
    found = load(config_file)
    kind = SageMakerConfig if isinstance(found, _Cloud) else ClusterConfig
    data = found.to_dict()
    del data["compute_environment"]
    return kind(**data)
