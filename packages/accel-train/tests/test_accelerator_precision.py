"""Which recipe of fp8 is answered under which name; no library computes here."""

from types import SimpleNamespace

import pytest

from accel_state.enums import FP8BackendType
from accel_train import Accelerator
from accel_train.plugins import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs, fp8


class View(Accelerator):
    """Of a plan as the resolver makes it where the libraries are installed."""

    def __init__(self, recipe, backend):
        self._plan = SimpleNamespace(recipe=recipe, fp8_backend=backend)


def former():
    with pytest.warns(FutureWarning):
        return FP8RecipeKwargs(backend="TE")


@pytest.mark.parametrize(
    ("make", "backend", "answers"),
    [
        # Its options are objects of torchao, which is not installed here.
        (lambda: object.__new__(AORecipeKwargs), FP8BackendType.AO, {"ao_recipe_handler"}),
        (TERecipeKwargs, FP8BackendType.TE, {"te_recipe_handler"}),
        # The deprecated class is a recipe of TransformerEngine.
        (former, FP8BackendType.TE, {"te_recipe_handler", "fp8_recipe_handler"}),
    ],
    ids=["torchao", "TransformerEngine", "deprecated"],
)
def test_the_recipe_is_answered_under_the_names_of_its_library(monkeypatch, make, backend, answers):
    monkeypatch.setattr(fp8, "is_transformer_engine_available", lambda: True)
    recipe = make()
    view = View(recipe, backend)
    for name in ("ao_recipe_handler", "te_recipe_handler", "fp8_recipe_handler", "msamp_recipe_handler"):
        assert getattr(view, name) is (recipe if name in answers else None)
    assert view.fp8_enabled
    assert view.has_fp8_handler
    assert view.fp8_backend is backend


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_other_precisions_have_no_recipe(precision):
    accelerator = Accelerator(mixed_precision=precision)
    assert not accelerator.fp8_enabled
    assert not accelerator.has_fp8_handler
    assert accelerator.fp8_backend is FP8BackendType.NO
    assert accelerator.ao_recipe_handler is accelerator.te_recipe_handler is None
    assert accelerator.fp8_recipe_handler is accelerator.msamp_recipe_handler is None
