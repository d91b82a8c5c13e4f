"""Options of training in 8-bit floating point (fp8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, Self, cast

from torch import nn

from accel_state.config.launched import launched_config
from accel_state.config.sections.fp8 import Fp8Section
from accel_state.errors import MissingDependencyError, NotAvailableError
from accel_state.handlers import KwargsHandler
from accel_state.host.available import is_torchao_available, is_transformer_engine_available
from accel_state.messages import warn
from accel_train.errors import ArgumentTypeError, OptionError
from accel_train.plugins.base import positional

__all__ = ["AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"]

INSTALL_AO = "pip install torchao"
INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]'"

#: What a field is when neither the script nor the launcher sets it.
_AO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": True}
)
_TE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }
)
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fp8_format": ("HYBRID", "E4M3", "E5M2"), "amax_compute_algo": ("max", "most_recent")}
)


class _Recipe(KwargsHandler):
    """Base of recipes: fields that are None take the launcher's value, or else their default."""

    @classmethod
    def from_section(cls, section: Fp8Section) -> Self:
        """The recipe that a decoded section of the launch configuration describes."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
        return cls(**{name: value for name, value in values.items() if name in names and value is not None})

    def _fill(self, defaults: Mapping[str, Any]) -> None:
        unset = [name for name in defaults if getattr(self, name) is None]
        if not unset:
            return
        section = launched_config().fp8
        for name in unset:
            launched = getattr(section, name)
            setattr(self, name, defaults[name] if launched is None else launched)


@dataclass
class AORecipeKwargs(_Recipe):
    """fp8 recipe for torchao, the backend "AO" of `mixed_precision="fp8"`.

    Attributes:
        config: torchao's `Float8LinearConfig`, which sets how operands are scaled. By default each tensor is scaled as
            a whole by its largest value, with the two options below.
        module_filter_func: called with a linear layer and its name; returns whether the layer computes in fp8. By
            default all layers do, except the model's first and last, whose errors matter most, and those whose sizes
            are not divisible by 16.
        pad_inner_dim: pad the inner dimension of products to a multiple of 16, which the hardware needs; None: the
            value in `config`, else the launcher's setting, else yes.
        enable_fsdp_float8_all_gather: fsdp2 gathers weights in fp8, in a quarter of float32's bytes; without fsdp2 it
            has no effect. None: the value in `config`, else the launcher's setting, else yes.

    Raises:
        MissingDependencyError: torchao is not installed.
        ArgumentTypeError: `config` or `module_filter_func` has another type.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if not is_torchao_available():
            raise MissingDependencyError(
                f"AORecipeKwargs needs torchao, which is not installed. Install it: {INSTALL_AO}."
            )
        from torchao.float8 import Float8LinearConfig

        if self.config is not None and not isinstance(self.config, Float8LinearConfig):
            raise ArgumentTypeError(
                f"AORecipeKwargs(config=…) takes torchao.float8.Float8LinearConfig(…), got "
                f"{type(self.config).__name__}: {self.config!r:.80}."
            )
        if self.module_filter_func is not None and not callable(cast(object, self.module_filter_func)):
            raise ArgumentTypeError(
                "AORecipeKwargs(module_filter_func=…) takes a function of a module and its name, got "
                f"{self.module_filter_func!r:.80}."
            )
        if self.config is None:
            self._fill(_AO_DEFAULTS)
            self.config = Float8LinearConfig(**{name: getattr(self, name) for name in _AO_DEFAULTS})
            return
        asked = {name: getattr(self, name) for name in _AO_DEFAULTS if getattr(self, name) is not None}
        if asked:
            self.config = dataclasses.replace(self.config, **asked)
        for name in _AO_DEFAULTS:
            setattr(self, name, getattr(self.config, name))


@dataclass
class TERecipeKwargs(_Recipe):
    """fp8 recipe for TransformerEngine, the backend "TE" of `mixed_precision="fp8"`.

    A field that is None has the launcher's setting (`--fp8_…`), or else the default given here.

    Attributes:
        use_autocast_during_eval: compute in fp8 in evaluation mode too; by default no.
        margin: scaling factors leave this many powers of two unused; by default 0.
        interval: steps between two computations of the scaling factors; by default 1, the only value that newer
            versions of TransformerEngine know.
        fp8_format: "E4M3", "E5M2", or "HYBRID", which is E4M3 in forward and E5M2 in backward; by default "HYBRID".
        amax_history_len: number of steps in the history of largest magnitudes (amax); by default 1024.
        amax_compute_algo: how a scaling factor is computed from the history: "max" or "most_recent"; by default
            "most_recent".
        override_linear_precision: three booleans: compute the forward product, the input's gradient and the weight's
            gradient in higher precision; by default none.
        use_mxfp8_block_scaling: one scaling factor per block of 32 values (MXFP8), which needs a Blackwell GPU. Then
            `interval`, `amax_history_len`, `amax_compute_algo` and `override_linear_precision` have no effect. By
            default no.

    Raises:
        MissingDependencyError: TransformerEngine is not installed.
        OptionError: TransformerEngine does not know a value.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        if not is_transformer_engine_available():
            raise MissingDependencyError(
                f"{type(self).__name__} needs transformer-engine, which is not installed. Install it: {INSTALL_TE}; or "
                f"use torchao: AORecipeKwargs(…), {INSTALL_AO}."
            )
        self._fill(_TE_DEFAULTS)
        self.fp8_format = str(self.fp8_format).upper()
        self.amax_compute_algo = str(self.amax_compute_algo).lower()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}): expected one of {', '.join(choices)}."
                )
        for name, least in (("margin", None), ("interval", 1), ("amax_history_len", 1)):
            _check_number(type(self).__name__, name, getattr(self, name), least)
        overridden = tuple(self.override_linear_precision or ())
        if len(overridden) != 3 or not all(isinstance(cast(object, flag), bool) for flag in overridden):
            raise OptionError(
                f"{type(self).__name__}(override_linear_precision={self.override_linear_precision!r}): expected three "
                "booleans, for the forward product and the gradients of input and weight."
            )
        self.override_linear_precision = overridden


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Refused: MS-AMP is no longer maintained; `AORecipeKwargs` and `TERecipeKwargs` replace it.

    Attributes:
        opt_level: an option of MS-AMP.

    Raises:
        NotAvailableError: always.
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        refuse_msamp("MSAMPRecipeKwargs(…)")


@positional("opt_level", *_TE_DEFAULTS, "backend")
@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """Deprecated: `TERecipeKwargs` under its former name.

    Attributes:
        opt_level: an option of MS-AMP; not used.
        backend: "TE".

    Raises:
        NotAvailableError: `backend` is "MSAMP".
        OptionError: `backend` is any other value.
    """

    opt_level: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        warn(
            "FP8RecipeKwargs is deprecated; use TERecipeKwargs, or AORecipeKwargs for torchao.",
            FutureWarning,
        )
        # The launcher's AO is about recipes of which this is none.
        self.backend = str(self.backend or "TE").upper()
        if self.backend == "MSAMP":
            refuse_msamp("FP8RecipeKwargs(backend='MSAMP')")
        if self.backend != "TE":
            raise OptionError(
                f"FP8RecipeKwargs(backend={self.backend!r}): expected TE. For torchao use AORecipeKwargs(…)."
            )
        super().__post_init__()


def refuse_msamp(origin: str) -> NoReturn:
    """Refuse MS-AMP with an error that names its replacements.

    Args:
        origin: the option or variable that asks for it, at the beginning of the message.

    Raises:
        NotAvailableError: always; names the replacements.
    """
    raise NotAvailableError(
        f"{origin} asks for MS-AMP, which is no longer maintained and not supported. Use torchao instead "
        "(kwargs_handlers=[AORecipeKwargs()], or --fp8_backend ao), or TransformerEngine (TERecipeKwargs, "
        "--fp8_backend te)."
    )


def _check_number(kind: str, name: str, value: object, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise OptionError(f"{kind}({name}={value!r}): expected a whole number{bound}.")
