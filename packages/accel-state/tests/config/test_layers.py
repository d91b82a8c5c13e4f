"""Option values from flags or code, by path."""

from __future__ import annotations

import pytest

from accel_state.config import Origin, resolve
from accel_state.errors import ConfigError, UnknownKeyError


def test_names_of_flags_and_paths_are_accepted_in_a_mapping():
    resolved = resolve(
        environ={},
        flags={"num-processes": "4", "--use_fsdp": True, "fsdp_offload_params": "true"},
        code={"fsdp.min_num_params": 5, "debug": None},
        use_default_file=False,
    )
    config = resolved.config
    assert (config.num_processes, config.use_fsdp, config.fsdp.cpu_offload, config.fsdp.min_num_params) == (
        4,
        True,
        True,
        5,
    )
    assert resolved.origin("debug") is Origin.DEFAULT


def test_truth_values_of_a_mapping_may_be_words():
    given = {"use_fsdp": "false", "cpu": "no"}
    assert resolve(environ={}, flags=given, use_default_file=False).config.distributed_type is None
    with pytest.raises(ConfigError, match="use_fsdp is 'perhaps'; expected true or false"):
        resolve(environ={}, flags={"use_fsdp": "perhaps"}, use_default_file=False)


def test_an_unknown_name_in_a_mapping_is_an_error():
    with pytest.raises(UnknownKeyError, match="did you mean num_processes"):
        resolve(environ={}, flags={"num_proceses": 4})


def test_two_names_for_one_option_must_agree():
    with pytest.raises(ConfigError, match=r"num_processes and nproc_per_node exclude each other"):
        resolve(environ={}, flags={"num_processes": 4, "nproc_per_node": 2})
