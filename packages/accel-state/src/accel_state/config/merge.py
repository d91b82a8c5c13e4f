"""Merging defaults, a file, the environment and flags; each value remembers where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.config.checks import check
from accel_state.config.codec import decode_layer
from accel_state.config.files import find_default, read_layer
from accel_state.config.flags import ParsedFlags
from accel_state.config.kinds import Bool
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Section
from accel_state.config.schema import BoundOption, Schema, build, flatten, plain_flag, schema_of, unknown
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
        Origin.FILE: values,
        Origin.ENVIRONMENT: decode_layer(environ, root),
        Origin.FLAG: _named_layer(flags, root, "flag"),
        Origin.CODE: _named_layer(code, root, "option"),
    }
    merged = flatten(root())
    origins = dict.fromkeys(merged, Origin.DEFAULT)
    for origin, layer in layers.items():
        merged.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    if root is LaunchConfig:
        notes += check(merged, origins, _sources(path, flags))
    config = _with_launch_defaults(build(root, merged))
    return Resolved(config, origins, path, tuple(notes))


resolve = resolve_config  # inside ``accel_state.config``, where the longer name would say it twice


def _file_layer(
    file: str | Path | None, environ: Mapping[str, str], flags: Any, use_default_file: bool
) -> tuple[Any, dict[str, Any], list[str], Path | None]:
    notes: list[str] = []
    if file is None:
        default = find_default(environ) if use_default_file else None
        if default is None:
            return LaunchConfig, {}, notes, None
        if _asks_for_cpu(flags):
            return LaunchConfig, {}, [f"{default.path} is not read because of --cpu"], None
        file = default.path
        if default.foreign:
            notes.append(
                f"using the configuration that Accelerate wrote, {default.path}; it is read, never changed"
            )
    layer = read_layer(file)
    return layer.root, layer.values, [*notes, *layer.notes], Path(file).expanduser()


def _asks_for_cpu(flags: ParsedFlags | Mapping[str, Any] | None) -> bool:
    names = flags.values if isinstance(flags, ParsedFlags) else (flags or {})
    matches = (_find(schema_of(LaunchConfig), name, data) for name, data in names.items())
    return any(
        match is not None and match[0].path == "use_cpu" and _truth("--cpu", match[1]) for match in matches
    )


def _named_layer(
    given: ParsedFlags | Mapping[str, Any] | None, root: type[Section], what: str
) -> dict[str, Any]:
    """Values by path, from names in any of the forms that people use."""
    parsed = isinstance(given, ParsedFlags)
    names = given.values if isinstance(given, ParsedFlags) else (given or {})
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, data in names.items():
        match = _find(schema_of(root), name, data)
        if match is None:
            raise _not_here(name, given, root, what)
        bound, value = match
        if value is None and not parsed:
            continue  # "not given"; of parsed flags only --no-use_fsdp and its kind have the value None
        value = None if value is None else bound.read(value, f"{what} {name}")
        if bound.path in found and found[bound.path] != value:
            raise ConfigError(f"{spelled[bound.path]} and {name} exclude each other; give one of them")
        found[bound.path] = value
        spelled[bound.path] = name
    return found


def _find(known: Schema, name: str, data: Any) -> tuple[BoundOption, Any] | None:
    """The option of that name, and the value that ``data`` means for it."""
    plain = name if name in known.by_path or name in known.by_flag else plain_flag(f"--{name.lstrip('-')}")
    bound = known.by_path.get(plain) or known.by_flag.get(plain)
    if bound is not None:
        return bound, data
    if plain not in known.switches:
        return None
    bound, meaning = known.switches[plain]
    return bound, meaning if _truth(name, data) else None


def _truth(name: str, data: Any) -> bool:
    try:
        return data is not None and Bool().read(data)
    except ValueError as error:
        raise ConfigError(f"{name} is {data!r}; expected {error}") from None


def _not_here(name: str, given: Any, root: type[Section], what: str) -> ConfigError:
    if isinstance(given, ParsedFlags):
        kind = "a SageMaker job" if root is LaunchConfig else "a run on this machine"
        return ConfigError(f"{given.spelled.get(name, name)} is for {kind}, which this configuration is not")
    known = schema_of(root)
    return unknown(name, [*known.by_path, *known.by_flag, *known.switches], what)


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
