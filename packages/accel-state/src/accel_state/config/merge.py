"""Merging of defaults, a file, the environment, flags and code, with the origin of each value."""

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
    """Origin of a value; greater origins take precedence."""

    DEFAULT = 0
    FILE = 1
    SCHEDULER = 2
    ENVIRONMENT = 3
    FLAG = 4
    CODE = 5


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A merged configuration.

    Attributes:
        config: the values.
        origins: origin of every option by path.
        file: the file that was read, if any.
        notes: messages for the user: Accelerate's file was read, a key was ignored, a value was overridden.
    """

    config: LaunchConfig | SageMakerConfig
    origins: Mapping[str, Origin]
    file: Path | None
    notes: tuple[str, ...]

    def origin(self, path: str) -> Origin:
        """The origin of an option's value.

        Raises:
            UnknownKeyError: there is no option with this path.
        """
        if path not in self.origins:
            raise unknown(path, self.origins, "option")
        return self.origins[path]

    def local(self) -> LaunchConfig:
        """The configuration, for a caller that needs a local (non-SageMaker) run.

        Raises:
            ConfigError: it is a SageMaker job.
        """
        if not isinstance(self.config, LaunchConfig):
            raise ConfigError(
                f"{self.file or 'the configuration'} describes a SageMaker job (compute_environment: "
                "AMAZON_SAGEMAKER), but this is a local run; pass another --config_file"
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
    """Merge defaults < file < environment < flags < code, and check the result for contradictions.

    Args:
        file: a configuration file. None: the default file, unless ``--cpu`` is given (as in Accelerate).
        environ: environment variables; None: those of this process.
        flags: the result of ``parse_flags``, or a mapping of names (``num_processes``, ``fsdp.cpu_offload``,
            ``fsdp_offload_params``, ``--use_fsdp``) to values.
        code: a mapping as for ``flags``, with values set in code.
        use_default_file: look for a default file when ``file`` is None.

    Raises:
        ConfigNotFoundError: ``file`` does not exist.
        UnknownKeyError: a key or name does not exist.
        ConfigError: a value is invalid, or two values contradict each other; the message names both.
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
        removed = {option: None for option, value in layer.denied if merged[option] == value}
        merged |= removed | layer.values
        origins |= dict.fromkeys((*removed, *layer.values), origin)
    if root is LaunchConfig:
        notes += check(merged, origins, _sources(path, flags))
    config = _with_launch_defaults(build(root, merged))
    return Resolved(config, MappingProxyType(origins), path, tuple(notes))


resolve = resolve_config  # shorter name for use as ``accel_state.config.resolve``


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
            notes.append(f"using Accelerate's configuration file, {default.path}; it is read, never changed")
    layer = read_layer(file)
    return layer.root, layer.values, [*notes, *layer.notes], Path(file).expanduser()


def _sources(path: Path | None, flags: Any) -> Mapping[str, str]:
    """Names of the file and of the flags as typed, for messages."""
    found = {"file": str(path)} if path else {}
    if isinstance(flags, ParsedFlags):
        found |= {f"flag:{option}": flag for option, flag in flags.spelled.items()}
    return found


def _with_launch_defaults(config: Any) -> Any:
    """The configuration with the launcher's defaults for the sections that the run uses."""
    changes: dict[str, Any] = config.launch_defaults()
    for name in schema_of(type(config)).sections:
        if config.is_active(name):
            section = getattr(config, name)
            if found := section.launch_defaults():
                changes[name] = dataclasses.replace(section, **found)
    return dataclasses.replace(config, **changes)
