"""Degrees of parallelism as a script gives them: defaults, names, checks and copies."""

import copy
import inspect
import warnings
from unittest.mock import MagicMock

import pytest

from accel_state.config.sections.parallelism import ParallelismSection
from accel_state.environment import patch_environment
from accel_train import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError
from testkit import worlds


def test_unset_degrees_are_1():
    config = ParallelismConfig()
    assert set(config.degrees.values()) == {1}
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert config.active_mesh_dims == []
    assert config.build_device_mesh("cpu") is None


def test_a_mesh_is_described_without_a_world():
    config = ParallelismConfig(dp_shard_size=4, tp_size=3, dp_replicate_size=2)
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "tp"), (2, 4, 3))
    assert ParallelismConfig()._get_mesh() == ()


def build(degrees):
    import torch.distributed as dist

    from accel_state import PartialState

    config = ParallelismConfig(**degrees)
    PartialState()
    if config.total_size != dist.get_world_size():
        with pytest.raises(IncompatibleOptionsError, match="2 processes"):
            config.build_device_mesh("cpu")
        return None
    mesh = config.build_device_mesh("cpu")
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh["dp_cp"].size(), mesh["dp"].get_local_rank()


def test_a_mesh_has_the_joint_dimensions():
    assert worlds.run(build, 2, {"dp_shard_size": 2}) == [(("dp_shard",), (2,), 2, rank) for rank in (0, 1)]


def test_degrees_must_fit_the_world_that_runs():
    assert worlds.run(build, 2, {"tp_size": 4}) == [None, None]


def test_without_a_world_torch_is_asked_for_one(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh",
        lambda device, shape, mesh_dim_names: asked.append((device, shape, mesh_dim_names)) or MagicMock(),
    )
    ParallelismConfig(dp_replicate_size=8).build_device_mesh("cpu")
    assert asked == [("cpu", (8,), ("dp_replicate",))]


def test_unset_degrees_come_from_the_launcher():
    with patch_environment(
        PARALLELISM_CONFIG_TP_SIZE="2",
        PARALLELISM_CONFIG_CP_SIZE="4",
        PARALLELISM_CONFIG_CP_COMM_STRATEGY="alltoall",
    ):
        config = ParallelismConfig(cp_size=2)
        with patch_environment(PARALLELISM_CONFIG_CP_LOAD_BALANCE="false"):
            assert ParallelismConfig(cp_size=2).sequences == ("alltoall", None, False)
    assert (config.tp_size, config.cp_size) == (2, 2)
    assert config.cp_handler == TorchContextParallelConfig("alltoall")
    assert config.sequences == ("alltoall", None, True)


def test_a_section_is_read_without_the_environment():
    section = ParallelismSection(sp_size=2, sp_seq_length=64, sp_seq_length_is_variable=False)
    with patch_environment(PARALLELISM_CONFIG_TP_SIZE="2"):
        config = ParallelismConfig.from_section(section)
    assert (config.tp_size, config.sp_size) == (1, 2)
    assert config.sequences == ("allgather", 64, True)
    section = ParallelismSection(cp_size=2, cp_load_balance=False)
    assert ParallelismConfig.from_section(section).sequences == ("allgather", None, False)


def test_sizes_and_names_of_dimensions():
    config = ParallelismConfig(2, 3, tp_size=5, cp_size=7, sp_size=11)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (2310, 6, 385)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp", "sp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp", "sp"]
    assert ParallelismConfig(dp_replicate_size=2, cp_size=2).fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    enabled = {name: getattr(config, f"{name}_enabled") for name in config.degrees}
    assert enabled == {name: name != "pp" for name in config.degrees}
    staged = ParallelismConfig(pp_size=2, dp_shard_size=2)
    assert (staged.pp_enabled, staged.total_size, staged.data_parallel_size) == (True, 4, 2)
    assert staged.active_mesh_dims == ["dp_shard", "pp"]
    assert not ParallelismConfig().tp_enabled


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tp_size": 0}, OptionError, "tp_size is 0; expected a whole number of at least 1"),
        ({"dp_shard_size": True}, OptionError, "dp_shard_size is True"),
        ({"cp_size": "2"}, OptionError, "cp_size is '2'"),
        ({"cp_backend": "ring"}, OptionError, "cp_backend is 'ring'; expected 'torch'"),
        ({"sp_backend": "torch"}, OptionError, "sp_backend is 'torch'; expected 'deepspeed'"),
        ({"cp_size": 2, "cp_handler": "alltoall"}, ArgumentTypeError, "takes TorchContextParallelConfig"),
        ({"pp_size": 2, "pp_handler": "1f1b"}, ArgumentTypeError, "takes PipelineParallelConfig"),
        (
            {"pp_size": 2, "cp_size": 2},
            IncompatibleOptionsError,
            "cp_size=2 and pp_size=2 cannot be combined; leave out one of them: stages",
        ),
        ({"pp_size": 2, "sp_size": 2}, IncompatibleOptionsError, "sp_size=2 and pp_size=2 cannot be"),
        ({"pp_size": 2, "ep_size": 2}, IncompatibleOptionsError, "ep_size=2 and pp_size=2 cannot be"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ParallelismConfig(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TorchContextParallelConfig("ring"),
            "cp_comm_strategy is 'ring'; expected allgather or alltoall",
        ),
        (
            lambda: TorchContextParallelConfig(cp_load_balance="no"),
            "cp_load_balance is 'no'; expected True, False or None",
        ),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length=0), "sp_seq_length is 0"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False), "needs the length"),
        (
            lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2"),
            "kernels of flash",
        ),
    ],
)
def test_handlers_check_their_values(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_options_without_effect_are_said():
    with pytest.warns(UserWarning, match="cp_handler is given and cp_size is 1"):
        ParallelismConfig(cp_handler=TorchContextParallelConfig("alltoall"))
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))


def test_a_mesh_needs_its_ranks_and_a_type_of_device():
    config = ParallelismConfig(tp_size=2)
    with pytest.raises(IncompatibleOptionsError, match="tp 2 multiply to 2, and there are 1 processes"):
        config.build_device_mesh("cpu")
    with pytest.raises(OptionError, match="Pass the device type"):
        config.get_device_mesh()


def test_copies_and_plain_data():
    config = ParallelismConfig(sp_size=2)
    assert copy.deepcopy(config) == config
    assert config != ParallelismConfig(sp_size=4)
    data = config.to_json()
    assert data["sp_size"] == 2
    assert data["sp_handler"]["sp_attn_implementation"] == "sdpa"
    assert data["tp_handler"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1F1B"}, "schedule is '1F1B'; expected one of gpipe, 1f1b"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0; expected a whole number of at least 1"),
        ({"stages_per_rank": True}, "stages_per_rank is True"),
        ({"modules": "layers"}, "modules is 'layers'; expected names of modules in a list"),
        ({"cuts": [3]}, "cuts is .3.; expected names of modules in a list"),
    ],
)
def test_options_of_pipelines_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        PipelineParallelConfig(**options)


def test_options_of_pipelines_come_from_the_launcher():
    with patch_environment(
        PARALLELISM_CONFIG_PP_SIZE="2",
        PARALLELISM_CONFIG_PP_SCHEDULE="looped_bfs",
        PARALLELISM_CONFIG_PP_NUM_MICRO_BATCHES="6",
        PARALLELISM_CONFIG_PP_STAGES_PER_RANK="3",
    ):
        handler = ParallelismConfig().pp_handler
    assert (handler.schedule, handler.num_micro_batches, handler.stages_per_rank) == ("looped_bfs", 6, 3)


def test_positions_are_those_of_accelerate():
    config = ParallelismConfig(1, 1, 1, 2)
    assert (config.cp_size, config.ep_size) == (2, 1)
    order = list(inspect.signature(ParallelismConfig).parameters)
    own = ["pp_size", "pp_handler", "ep_size"]
    assert order[-3:] == own, "this library's own come last"
    assert order[3:7] == ["cp_size", "cp_backend", "sp_size", "sp_backend"]
