"""The part of `Accelerator` that answers for fp8: which library computes it, and by which recipe."""

from __future__ import annotations

from accel_state.enums import FP8BackendType
from accel_train.plugins import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accel_train.setup.resolve import Plan

__all__ = ["PrecisionView"]


class PrecisionView:
    """Facts of the plan, under the names that Accelerate's scripts read."""

    _plan: Plan

    @property
    def fp8_enabled(self) -> bool:
        """Whether models compute in fp8."""
        return self._plan.recipe is not None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; without fp8 the one that the launcher names, or NO."""
        return self._plan.fp8_backend

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is a recipe, the script's or one that was made for it."""
        return self._plan.recipe is not None

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The recipe, if torchao computes in fp8."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, AORecipeKwargs) else None

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The recipe, if TransformerEngine computes in fp8."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, TERecipeKwargs) else None

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The recipe, if the script gave it as the deprecated class."""
        recipe = self._plan.recipe
        return recipe if isinstance(recipe, FP8RecipeKwargs) else None

    @property
    def msamp_recipe_handler(self) -> None:
        """Always None: MS-AMP is not supported."""
        return
