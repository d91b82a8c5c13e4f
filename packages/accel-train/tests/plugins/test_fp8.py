"""Recipes of fp8: where their values come from, and what is refused. That of torchao runs in engines:fp8."""

import pytest

from accel_state.config.launched import launched_config
from accel_state.environment import patch_environment
from accel_state.errors import MissingDependencyError, NotAvailableError
from accel_state.host.available import is_torchao_available
from accel_train import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    OptionError,
    TERecipeKwargs,
)
from testkit.fp8 import fake_transformer_engine

DEFAULTS = {
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
    "use_mxfp8_block_scaling": False,
}
OTHERS = {
    "use_autocast_during_eval": True,
    "margin": 2,
    "interval": 3,
    "fp8_format": "E4M3",
    "amax_history_len": 16,
    "amax_compute_algo": "max",
    "override_linear_precision": (True, False, True),
    "use_mxfp8_block_scaling": True,
}
LAUNCHED = {
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "true",
    "ACCELERATE_FP8_MARGIN": "2",
    "ACCELERATE_FP8_INTERVAL": "3",
    "ACCELERATE_FP8_FORMAT": "e4m3",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "MAX",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "true",
    "ACCELERATE_FP8_OVERRIDE_DGRAD": "false",
    "ACCELERATE_FP8_OVERRIDE_WGRAD": "true",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "1",
}


@pytest.fixture
def engine():
    with fake_transformer_engine() as module:
        yield module


def test_the_defaults_are_the_launchers(engine):
    assert TERecipeKwargs().to_dict() == DEFAULTS
    assert list(TERecipeKwargs.__dataclass_fields__) == list(DEFAULTS)


def test_unset_fields_take_the_launchers_values(engine):
    with patch_environment(**LAUNCHED):
        assert TERecipeKwargs().to_dict() == OTHERS
        assert TERecipeKwargs(margin=0, fp8_format="hybrid").to_dict() == OTHERS | {
            "margin": 0,
            "fp8_format": "HYBRID",
        }
        section = launched_config().fp8
    assert TERecipeKwargs.from_section(section).to_dict() == OTHERS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fp8_format": "E3M4"}, "fp8_format='E3M4'.*HYBRID, E4M3, E5M2"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean'.*max, most_recent"),
        ({"interval": 0}, "interval=0.*at least 1"),
        ({"margin": 1.5}, "margin=1.5.*whole number"),
        ({"amax_history_len": True}, "amax_history_len=True"),
        ({"override_linear_precision": (True, False)}, "three booleans"),
    ],
)
def test_values_that_the_engine_does_not_know_are_refused(engine, wrong, message):
    with pytest.raises(OptionError, match=message):
        TERecipeKwargs(**wrong)


def test_the_former_name_warns(engine):
    with pytest.warns(FutureWarning, match="use TERecipeKwargs"):
        recipe = FP8RecipeKwargs(margin=1, backend="te")
    assert (recipe.margin, recipe.backend, recipe.interval) == (1, "TE", 1)
    with pytest.warns(FutureWarning), pytest.raises(OptionError, match="AORecipeKwargs"):
        FP8RecipeKwargs(backend="ao")


def test_msamp_is_refused_with_what_replaces_it(engine):
    for make in (MSAMPRecipeKwargs, lambda: MSAMPRecipeKwargs(opt_level="O1")):
        with pytest.raises(NotAvailableError, match=r"MS-AMP.*AORecipeKwargs.*TERecipeKwargs"):
            make()
    with pytest.warns(FutureWarning), pytest.raises(NotAvailableError, match="MS-AMP"):
        FP8RecipeKwargs(backend="msamp")


def test_an_engine_that_is_not_installed_is_named():
    with pytest.raises(MissingDependencyError, match=r"TERecipeKwargs needs transformer-engine.*pip install"):
        TERecipeKwargs()
    if not is_torchao_available():
        with pytest.raises(
            MissingDependencyError, match=r"AORecipeKwargs needs torchao.*pip install torchao"
        ):
            AORecipeKwargs()
