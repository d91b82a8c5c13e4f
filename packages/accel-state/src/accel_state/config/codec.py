"""Encoding of a configuration as environment variables, and decoding.

Names and spelling are those of Accelerate, so a rank can be started by either launcher. Pure functions: only
``accel_state.environment`` reads and changes the environment of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Carrier, Section
from accel_state.config.option_types import Bool, OptionType
from accel_state.config.roots import root_of_environment
from accel_state.config.schema import BoundOption, build, schema_of, value_of, variables_of
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from typing import Protocol

    from accel_state.config.sagemaker import SageMakerConfig

    class RanksTopology(Protocol):
        """The fields of ``accel_state.clusters.topology.Topology`` that have a variable."""

        @property
        def rank(self) -> int: ...
        @property
        def world_size(self) -> int: ...
        @property
        def local_rank(self) -> int: ...
        @property
        def local_world_size(self) -> int: ...
        @property
        def master_addr(self) -> str | None: ...
        @property
        def master_port(self) -> int | None: ...


__all__ = [
    "PUBLISHED",
    "decode",
    "decode_layer",
    "encode",
    "launcher_only_fields",
    "publish",
    "rank_environment",
    "variables",
]

PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "RANK": "torch.distributed, transformers, DeepSpeed",
        "WORLD_SIZE": "torch.distributed, transformers, DeepSpeed",
        "LOCAL_RANK": "transformers, DeepSpeed",
        "LOCAL_WORLD_SIZE": "torch.distributed, DeepSpeed",
        "MASTER_ADDR": "torch.distributed, DeepSpeed",
        "MASTER_PORT": "torch.distributed, DeepSpeed",
        "ACCELERATE_MIXED_PRECISION": "transformers",
        "ACCELERATE_USE_FSDP": "transformers",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "transformers",
        "ACCELERATE_USE_DEEPSPEED": "transformers",
    }
)
"""The only variables that ``publish`` sets, and the libraries that read them."""

# Written as 0 and 1 instead of false and true, as Accelerate writes them.
_WORDS: Mapping[str, tuple[str, str]] = {
    "ACCELERATE_CPU_AFFINITY": ("0", "1"),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": ("0", "1"),
    "ACCELERATE_FP8_PAD_INNER_DIM": ("0", "1"),
}
_DERIVED = frozenset(
    {"ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_USE_SAGEMAKER", "XLA_DOWNCAST_BF16", "XLA_USE_BF16"}
)


def encode(config: LaunchConfig | SageMakerConfig) -> dict[str, str]:
    """The environment variables for ``config``; ``decode`` is the inverse.

    A value is written if it differs from its default. For a section that the run uses, every set value is written,
    because scripts that use Accelerate have other defaults than its launcher.
    """
    found: dict[str, str] = {}
    for bound in schema_of(type(config)).options:
        value = value_of(config, bound)
        if not variables_of(bound) or value is None:
            continue
        if value != bound.default or config.is_active(bound.section):
            found.update(_encode_option(bound, value))
    found.update(_derived(config))
    return found


def decode(environ: Mapping[str, str], root: type[Section] | None = None) -> Any:
    """The configuration in ``environ``: an instance of ``root``, or of the ``LaunchConfig`` that has its options.

    Args:
        environ: environment variables.
        root: a root, or one section, whose options are decoded alone.

    Raises:
        ConfigError: a variable has an invalid value, or two variables contradict each other.
    """
    root = root or root_of_environment(environ)
    return build(root, decode_layer(environ, root))


def decode_layer(environ: Mapping[str, str], root: type[Section] = LaunchConfig) -> dict[str, Any]:
    """Paths and values of the options that ``environ`` sets. Empty variables count as unset."""
    schema = schema_of(root)
    set_here = {schema.by_variable[name].path for name in schema.by_variable.keys() & environ.keys()}
    decoded = {
        path: _decode_option(bound, environ) for path, bound in schema.by_path.items() if path in set_here
    }
    return {path: value for path, value in decoded.items() if value is not None}


def variables(root: type[Section] = LaunchConfig) -> frozenset[str]:
    """Every variable that ``encode`` may write."""
    return frozenset(schema_of(root).by_variable) | _DERIVED


def launcher_only_fields() -> tuple[str, ...]:
    """Paths of the options without a variable: the launcher itself must act on each of them."""
    return tuple(
        bound.path for bound in schema_of(LaunchConfig).options if Carrier.LAUNCHER in bound.carriers
    )


def rank_environment(config: LaunchConfig | SageMakerConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a child process: the schema's variables encode ``config``; all others are unchanged."""
    known = variables(type(config))
    return {name: value for name, value in environ.items() if name not in known} | encode(config)


def publish(
    config: LaunchConfig, environ: MutableMapping[str, str], topology: RanksTopology | None = None
) -> dict[str, str]:
    """Set the missing variables of ``PUBLISHED``, for other libraries in this process.

    Args:
        config: the configuration of the process.
        environ: changed in place; existing variables, even empty ones, are kept.
        topology: source of torchrun's variables; None: they are not set.

    Returns:
        The variables that were set.
    """
    known = {**encode(config), **_torchrun_names(topology)}
    missing = {name: known[name] for name in PUBLISHED if name in known and name not in environ}
    environ.update(missing)
    return missing


def _torchrun_names(topology: RanksTopology | None) -> dict[str, str]:
    if topology is None:
        return {}
    values = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_world_size,
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": topology.master_port,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _encode_option(bound: BoundOption, value: Any) -> dict[str, str]:
    for meaning, variable in bound.about.switches.values():
        if variable is not None and value == meaning:
            return {variable: "true"}
    if len(bound.variables) > 1:
        return {name: Bool().format(item) for name, item in zip(bound.variables, value, strict=True)}
    name = bound.variables[0]
    if isinstance(value, bool) and name in _WORDS:
        return {name: _WORDS[name][value]}
    return {name: bound.option_type.format(value)}


def _decode_option(bound: BoundOption, environ: Mapping[str, str]) -> Any:
    on = [
        (meaning, variable)
        for meaning, variable in bound.about.switches.values()
        if variable is not None and environ.get(variable) and _truth(variable, environ[variable])
    ]
    if len(on) > 1:
        names = " and ".join(variable for _, variable in on)
        raise ConfigError(
            f"environment variables {names} are both on, but they exclude each other; unset all but one"
        )
    if on:
        return on[0][0]
    texts = [environ.get(name) or "" for name in bound.variables]
    if not any(texts):
        return None
    if len(texts) > 1:
        # Accelerate writes all parts or none; a missing part is false.
        return tuple(
            bool(text) and _truth(name, text) for name, text in zip(bound.variables, texts, strict=True)
        )
    if texts[0].strip().lower() == "none" and type(bound.option_type) is not OptionType:
        return None
    text = texts[0]
    if bound.variables[0] == "OMP_NUM_THREADS":
        text = text.split(",")[0]  # OpenMP allows one number per nesting level; the first is the outermost
    return bound.parse(text, f"environment variable {bound.variables[0]}")


def _truth(name: str, text: str) -> bool:
    try:
        return Bool().parse(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} is {text!r}; expected {error}") from None


def _derived(config: LaunchConfig | SageMakerConfig) -> dict[str, str]:
    """Variables derived from options for other libraries; ``decode`` does not read them."""
    if not isinstance(config, LaunchConfig):
        return {"ACCELERATE_USE_SAGEMAKER": "true"}
    found = {}
    if config.use_tpu and config.tpu.downcast_bf16 and config.mixed_precision == "bf16":
        found["XLA_DOWNCAST_BF16"] = "1"
    if config.use_deepspeed:
        keys = [
            bound.keys[0]
            for bound in schema_of(LaunchConfig).options
            if (bound.section == "deepspeed" or bound.path == "gradient_accumulation.num_steps")
            and value_of(config, bound) is not None
        ]
        if keys:
            found["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(keys)
    return found
