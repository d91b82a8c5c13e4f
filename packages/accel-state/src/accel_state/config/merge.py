"""Merging of defaults, a file, the environment, flags and code, with the origin of each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_state.config.checks import check
from accel_state.config.codec import decode_layer
from accel_state.config.files import FileLayer, default_path, find_default, read_layer
from accel_state.config.flags import ParsedFlags
from accel_state.config.launch import LaunchConfig
from accel_state.config.layers import OptionLayer, named_layer
from accel_state.config.roots import root_for, root_of_environment
from accel_state.config.schema import build, flatten, schema_of, unknown, value_of
from accel_state.config.sources import Origin, Source, Sources, variable_in_use
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_state.config.sagemaker import SageMakerConfig

__all__ = ["Origin", "Resolved", "resolve", "resolve_config"]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A merged configuration.

    Attributes:
        config: the values.
        origins: origin of every option by path.
        sources: where the value of every option that is set comes from.
        file: the file that was read, if any.
        notes: messages for the user: Accelerate's file was read, a key was ignored, a value was overridden.
    """

    config: LaunchConfig | SageMakerConfig
    origins: Mapping[str, Origin]
    file: Path | None
    notes: tuple[str, ...]
    sources: Sources = dataclasses.field(default_factory=Sources)

    @property
    def values(self) -> dict[str, Any]:
        """The value of every option by path."""
        return flatten(self.config)

    def origin(self, path: str) -> Origin:
        """The origin of an option's value.

        Raises:
            UnknownKeyError: there is no option with this path.
        """
        if path not in self.origins:
            raise unknown(path, self.origins, "option")
        return self.origins[path]

    def describe(self, path: str) -> str:
        """An option with its value, as the user set it: see ``Sources.describe``."""
        return self.sources.describe(path, self._value(path))

    def remedy(self, path: str, *others: str) -> str:
        """How to unset an option where it was set: see ``Sources.remedy``."""
        return self.sources.remedy(path, self._value(path), *others)

    def _value(self, path: str) -> Any:
        return value_of(self.config, schema_of(type(self.config)).by_path[path])

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
        file: a configuration file; None: the default file.
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
    found, path, notes = _file_layer(file, environ, use_default_file)
    root = found.root
    if root is LaunchConfig:
        typed = flags.values if isinstance(flags, ParsedFlags) else (flags or {})
        named = (root_for(typed), root_for(code or {}), root_of_environment(environ))
        root = next((each for each in named if each is not LaunchConfig), LaunchConfig)
    layers = {
        Origin.FILE: OptionLayer(found.values),
        Origin.ENVIRONMENT: OptionLayer(decode_layer(environ, root)),
        Origin.FLAG: named_layer(flags, root, "flag"),
        Origin.CODE: named_layer(code, root, "option"),
    }
    merged = flatten(root())
    sources: dict[str, Source] = {}
    for origin, layer in layers.items():
        removed = {option: None for option, value in layer.denied if merged[option] == value}
        merged |= removed | layer.values
        for option in (*removed, *layer.values):
            sources[option] = _source(origin, option, merged[option], root, found, path, environ, flags)
    if issubclass(root, LaunchConfig):
        if merged["num_processes"] is not None and Sources(sources, root).is_per_machine("num_processes"):
            sources["num_processes"] = dataclasses.replace(
                sources["num_processes"], text=str(merged["num_processes"])
            )
            merged["num_processes"] *= merged["num_machines"]
        notes += check(merged, sources, root)
    config = _with_launch_defaults(build(root, merged))
    origins = {option: sources[option].origin if option in sources else Origin.DEFAULT for option in merged}
    return Resolved(config, MappingProxyType(origins), path, tuple(notes), Sources(sources, root))


resolve = resolve_config  # shorter name for use as ``accel_state.config.resolve``


def _file_layer(
    file: str | Path | None, environ: Mapping[str, str], use_default_file: bool
) -> tuple[FileLayer, Path | None, list[str]]:
    notes: list[str] = []
    if file is None:
        default = find_default(environ) if use_default_file else None
        if default is None:
            return FileLayer(LaunchConfig, {}, ()), None, notes
        file = default.path
        if default.foreign:
            notes.append(f"using Accelerate's configuration file, {file}; it is read, never changed")
        elif file != (new := default_path(environ)):
            notes.append(f"using {file}; accel config update copies it to {new}, which is its place now")
    layer = read_layer(file)
    return layer, Path(file).expanduser(), [*notes, *layer.notes]


def _source(
    origin: Origin,
    option: str,
    value: Any,
    root: Any,
    file: FileLayer,
    path: Path | None,
    environ: Mapping[str, str],
    flags: Any,
) -> Source:
    bound = schema_of(root).by_path[option]
    match origin:
        case Origin.FILE:
            key, line = file.places.get(option) or (bound.file_path, None)
            return Source(origin, key, str(path), line)
        case Origin.ENVIRONMENT:
            name = variable_in_use(bound, value, environ)
            return Source(origin, name, text="" if bound.about.secret else environ.get(name, ""))
        case Origin.FLAG:
            typed = flags.spelled if isinstance(flags, ParsedFlags) else {}
            switches = [flag for flag, (meaning, _) in bound.about.switches.items() if meaning == value]
            return Source(origin, typed.get(option) or next(iter(switches), bound.label))
        case _:
            return Source(origin, option)


def _with_launch_defaults(config: Any) -> Any:
    """The configuration with the launcher's defaults for the sections that the run uses."""
    changes: dict[str, Any] = config.launch_defaults()
    for name in schema_of(type(config)).sections:
        if config.is_active(name):
            section = getattr(config, name)
            if found := section.launch_defaults():
                changes[name] = dataclasses.replace(section, **found)
    return dataclasses.replace(config, **changes)
