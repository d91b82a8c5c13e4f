"""Merging defaults, a file, the environment and flags; each value remembers where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_state.config.checks import check
from accel_state.config.codec import decode_layer
from accel_state.config.files import find_default, read_layer
from accel_state.config.flags import ParsedFlags
from accel_state.config.launch import LaunchConfig
from accel_state.config.layers import Layer, named_layer
from accel_state.config.schema import build, flatten, schema_of, unknown
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_state.config.sagemaker import SageMakerConfig

__all__ = ["Origin", "Resolved", "resolve", "resolve_config"]


class Origin(IntEnum):
    """Where a value came from; the greater wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3
    CODE = 4


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A merged configuration.

    Attributes:
        config: the values.
        origins: path of every option to where its value came from.
        file: the file that was read, if one was.
        notes: what a user should know: Accelerate's file was read, a key has no meaning, a value gave way.
    """

    config: LaunchConfig | SageMakerConfig
    origins: Mapping[str, Origin]
    file: Path | None
    notes: tuple[str, ...]

    def origin(self, path: str) -> Origin:
        """Where the value of the option came from.

        Raises:
            UnknownKeyError: there is no option of that path.
        """
        if path not in self.origins:
            raise unknown(path, self.origins, "option")
        return self.origins[path]

    def local(self) -> LaunchConfig:
        """The configuration, where a run on machines of one's own is needed.

        Raises:
            ConfigError: it is a SageMaker job.
        """
        if not isinstance(self.config, LaunchConfig):
            raise ConfigError(
                f"{self.file or 'the configuration'} describes a SageMaker job (compute_environment: "
                "AMAZON_SAGEMAKER), but a run on this machine was asked for; name another --config_file"
            )
        return self.config


def resolve_config(
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: ParsedFlags | Mapping[str, Any] | None = None,
    code: Mapping[str, Any] | None = None,
    *,
    use_default_file: bool = True,
) -> Resolved:
    """Merge defaults < file < environment < flags < code, and check that the result makes sense.

    Args:
        file: a configuration file. None: the default file, unless ``--cpu`` was given (as Accelerate does).
        environ: variables; None: those of this process.
        flags: what ``parse_flags`` returned, or names (``num_processes``, ``fsdp.cpu_offload``,
            ``fsdp_offload_params``, ``--use_fsdp``) to values.
        code: the same as a mapping, for values that stand in a program.
        use_default_file: look for a default file when ``file`` is None.

    Raises:
        ConfigNotFoundError: ``file`` does not exist.
        UnknownKeyError: a key or name does not exist.
        ConfigError: a value cannot be used, or two contradict each other; the message names both.
    """
    if environ is None:
        from accel_state.environment import snapshot

        environ = snapshot()
    root, values, notes, path = _file_layer(file, environ, flags, use_default_file)
    layers = {
        Origin.FILE: Layer(values),
        Origin.ENVIRONMENT: Layer(decode_layer(environ, root)),
        Origin.FLAG: named_layer(flags, root, "flag"),
        Origin.CODE: named_layer(code, root, "option"),
    }
    merged = flatten(root())
    origins = dict.fromkeys(merged, Origin.DEFAULT)
    for origin, layer in layers.items():
        taken_back = {option: None for option, value in layer.denied if merged[option] == value}
        merged |= taken_back | layer.values
        origins |= dict.fromkeys((*taken_back, *layer.values), origin)
    if root is LaunchConfig:
        notes += check(merged, origins, _sources(path, flags))
    config = _with_launch_defaults(build(root, merged))
    return Resolved(config, MappingProxyType(origins), path, tuple(notes))


resolve = resolve_config  # inside ``accel_state.config``, where the longer name would say it twice


def _file_layer(
    file: str | Path | None, environ: Mapping[str, str], flags: Any, use_default_file: bool
) -> tuple[Any, dict[str, Any], list[str], Path | None]:
    notes: list[str] = []
    if file is None:
        default = find_default(environ) if use_default_file else None
        if default is None:
            return LaunchConfig, {}, notes, None
        if named_layer(flags, None, "flag").values.get("use_cpu"):
            return LaunchConfig, {}, [f"{default.path} is not read because of --cpu"], None
        file = default.path
        if default.foreign:
            notes.append(
                f"using the configuration that Accelerate wrote, {default.path}; it is read, never changed"
            )
    layer = read_layer(file)
    return layer.root, layer.values, [*notes, *layer.notes], Path(file).expanduser()


def _sources(path: Path | None, flags: Any) -> Mapping[str, str]:
    """What messages call the origin of a value, beyond the name of its option."""
    found = {"file": str(path)} if path else {}
    if isinstance(flags, ParsedFlags):
        found |= {f"flag:{option}": flag for option, flag in flags.spelled.items()}
    return found


def _with_launch_defaults(config: Any) -> Any:
    """The configuration with what a launcher fills in for the sections that the run uses."""
    changes: dict[str, Any] = config.launch_defaults()
    for name in schema_of(type(config)).sections:
        if config.is_active(name):
            section = getattr(config, name)
            if found := section.launch_defaults():
                changes[name] = dataclasses.replace(section, **found)
    return dataclasses.replace(config, **changes)
