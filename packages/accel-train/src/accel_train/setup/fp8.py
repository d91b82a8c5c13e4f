"""Which recipe of fp8 a run uses: the script's, the launcher's, or that of the installed library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.enums import FP8BackendType
from accel_state.errors import MissingDependencyError
from accel_state.handlers import KwargsHandler
from accel_state.host.available import is_torchao_available, is_transformer_engine_available
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.plugins import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_train.plugins.fp8 import INSTALL_AO, INSTALL_TE, refuse_msamp

__all__ = ["RECIPES", "backend_of", "fp8_recipe"]


#: Handlers that are recipes, and the key of each among an accelerator's; a derived class before its base.
RECIPES: dict[type[KwargsHandler], str] = {
    FP8RecipeKwargs: "fp8_recipe",
    AORecipeKwargs: "ao_recipe",
    TERecipeKwargs: "te_recipe",
    MSAMPRecipeKwargs: "msamp_recipe",
}


def fp8_recipe(handlers: Mapping[str, Any], launched: LaunchConfig, precision: str) -> Any:
    """The recipe of a run; None unless its precision is "fp8".

    Args:
        handlers: the script's, by key; those under `RECIPES` count.
        launched: what the launcher asks for.
        precision: name of the precision.

    Raises:
        OptionError: the script gives a recipe, and another precision is used.
        IncompatibleOptionsError: it gives two.
        NotAvailableError: the launcher asks for MS-AMP.
        MissingDependencyError: the library that is asked for is not installed, or none is.
    """
    given = [handlers[key] for key in RECIPES.values() if key in handlers]
    if len(given) > 1:
        raise IncompatibleOptionsError(
            f"kwargs_handlers contains {' and '.join(type(recipe).__name__ for recipe in given)}, but only one library "
            "can compute in fp8. Pass one of them."
        )
    if precision != "fp8":
        if given:
            raise OptionError(
                f"{type(given[0]).__name__} is for mixed_precision='fp8', but mixed_precision is {precision!r}. Pass "
                "Accelerator(mixed_precision='fp8'), launch with --mixed_precision fp8, or leave the recipe out."
            )
        return None
    if given:
        return given[0]
    return _launched_recipe(launched)


def _launched_recipe(launched: LaunchConfig) -> Any:
    section = launched.fp8
    if section.backend == "MSAMP":
        refuse_msamp("The launcher (--fp8_backend msamp)")
    if section.backend == "AO":
        return AORecipeKwargs.from_section(section)
    if section.backend == "TE":
        return TERecipeKwargs.from_section(section)
    if is_torchao_available():
        return AORecipeKwargs.from_section(section)
    if is_transformer_engine_available():
        return TERecipeKwargs.from_section(section)
    raise MissingDependencyError(
        "mixed_precision='fp8' needs torchao or transformer-engine, and neither is installed. Install one: "
        f"{INSTALL_AO} (also computes on CPUs), or {INSTALL_TE}."
    )


def backend_of(recipe: Any, launched: LaunchConfig) -> FP8BackendType:
    """The library that a recipe is for; without a recipe, the one that the launcher names, or NO."""
    if isinstance(recipe, AORecipeKwargs):
        return FP8BackendType.AO
    if isinstance(recipe, TERecipeKwargs):
        return FP8BackendType.TE
    return FP8BackendType(launched.fp8.backend or "NO")
