"""File names and lists of choices."""

from __future__ import annotations

from accel_state import constants
from accel_state.config.sections.fsdp import FSDP_SHARDING_STRATEGIES


def test_names_of_files():
    assert constants.SAFE_WEIGHTS_NAME == "model.safetensors"
    assert constants.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"
    assert constants.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-1") == "model-1.safetensors"
    assert constants.WEIGHTS_NAME == "pytorch_model.bin"
    assert constants.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert constants.WEIGHTS_PATTERN_NAME.format(suffix="") == constants.WEIGHTS_NAME
    assert constants.PROFILE_PATTERN_NAME.format(suffix=0) == "profile_0.json"
    assert (constants.OPTIMIZER_NAME, constants.SCHEDULER_NAME) == ("optimizer", "scheduler")
    assert (constants.SCALER_NAME, constants.RNG_STATE_NAME) == ("scaler.pt", "random_states")


def test_lists_of_choices_agree_with_the_schema():
    assert tuple(constants.FSDP_SHARDING_STRATEGY) == FSDP_SHARDING_STRATEGIES


def test_torchruns_options_are_torchruns():
    from torch.distributed.run import get_args_parser

    known = {
        option.lstrip("-").replace("-", "_")
        for action in get_args_parser()._actions
        for option in action.option_strings
    }
    assert set(constants.TORCH_LAUNCH_PARAMS) <= known
