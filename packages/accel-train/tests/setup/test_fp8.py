"""Which library computes in fp8: the script's recipe, the launcher's, or what is installed."""

import pytest

from accel_state.enums import FP8BackendType
from accel_state.environment import patch_environment
from accel_state.errors import MissingDependencyError, NotAvailableError
from accel_train import Accelerator, IncompatibleOptionsError, OptionError, TERecipeKwargs
from accel_train.setup import fp8
from testkit.fp8 import fake_transformer_engine


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(fp8, "is_torchao_available", lambda: False)
    with fake_transformer_engine() as module:
        yield module


def test_without_a_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fp8, "is_torchao_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"neither is installed.*pip install torchao"):
        Accelerator(mixed_precision="fp8")


@pytest.mark.parametrize("launched", [{}, {"accelerate_fp8_backend": "te"}, {"accelerate_fp8_backend": "NO"}])
def test_the_launcher_or_what_is_installed_decides(engine, launched):
    with patch_environment(accelerate_mixed_precision="fp8", accelerate_fp8_margin=3, **launched):
        accelerator = Accelerator()
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "fp8"
    assert accelerator.fp8_enabled
    assert accelerator.native_amp
    assert accelerator.fp8_backend is FP8BackendType.TE
    assert accelerator.te_recipe_handler.margin == 3
    assert accelerator.ao_recipe_handler is accelerator.fp8_recipe_handler is None


def test_the_scripts_recipe_is_used(engine):
    recipe = TERecipeKwargs(margin=1)
    with patch_environment(accelerate_fp8_backend="ao"):
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.te_recipe_handler is recipe
    assert accelerator.fp8_backend == "TE"


def test_a_recipe_without_fp8_is_refused(engine):
    with pytest.raises(
        OptionError, match=r"TERecipeKwargs is for mixed_precision='fp8', but mixed_precision is 'bf16'"
    ):
        Accelerator(mixed_precision="bf16", kwargs_handlers=[TERecipeKwargs()])


def test_two_recipes_are_refused(engine):
    with pytest.warns(FutureWarning):
        former = fp8.FP8RecipeKwargs()
    with pytest.raises(IncompatibleOptionsError, match="FP8RecipeKwargs and TERecipeKwargs"):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(), former])


def test_msamp_is_refused():
    with patch_environment(accelerate_fp8_backend="msamp", accelerate_mixed_precision="fp8"):
        with pytest.raises(NotAvailableError, match=r"--fp8_backend msamp.*torchao"):
            Accelerator()
        assert (
            Accelerator(mixed_precision="no").fp8_backend is FP8BackendType.MSAMP
        )  # asked for, and not used


def test_without_fp8_nothing_is_chosen():
    accelerator = Accelerator()
    assert accelerator.fp8_backend is FP8BackendType.NO
    assert not accelerator.fp8_enabled


def test_a_strategy_that_does_not_compute_in_fp8_says_so_before_a_library_is_asked_for():
    message = "strategy 'tp' cannot compute with mixed_precision='fp8'; it takes bf16, fp16, no"
    with pytest.raises(IncompatibleOptionsError, match=message):
        Accelerator(mixed_precision="fp8", strategy="tp")


@pytest.mark.parametrize("strategy", ["deepspeed", "xla", "tp"])
def test_strategies_without_fp8(strategy):
    from accel_train.strategies.registry import STRATEGIES

    capabilities = STRATEGIES.get(strategy).capabilities
    for device in ("cpu", "cuda"):
        assert "fp8" not in capabilities.precisions_for(device)
