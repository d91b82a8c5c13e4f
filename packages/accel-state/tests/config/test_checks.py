"""Options that contradict or require each other."""

from __future__ import annotations

import pytest

from accel_state.config import Origin, parse_flags, resolve
from accel_state.errors import ConfigError
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import plan_world


def merged(flags="", environ=None, file=None, **more):
    parsed = parse_flags(flags.split())
    return resolve(file, environ or {"HF_HOME": "/nowhere", "XDG_CONFIG_HOME": "/nowhere"}, parsed, **more)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="f.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.mark.parametrize("words", ["", "--use_fsdp", "--use_deepspeed", "--multi_gpu", "--cpu"])
def test_degrees_go_with_every_way_to_share_the_work(words):
    words += " --use_parallelism_config --parallelism_config_sp_size 2"
    config = merged(words).config
    assert config.use_parallelism_config
    assert config.parallelism.sp_size == 2


def test_a_parallelism_section_brings_fsdp_2():
    config = merged("--use_fsdp --use_parallelism_config --parallelism_config_dp_shard_size 2").config
    assert config.fsdp.fsdp_version == 2
    assert (config.parallelism.dp_shard_size, config.parallelism.cp_size) == (2, 1)
    assert config.parallelism.cp_comm_strategy is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--multi_gpu --use_fsdp", r"--multi_gpu and --use_fsdp exclude each other"),
        ("--use_deepspeed --use_fsdp", r"--use_deepspeed and --use_fsdp exclude each other"),
        ("--cpu --multi_gpu", r"--cpu contradicts --multi_gpu; .*keep one of them"),
        ("--cpu --tpu", r"--cpu contradicts --tpu"),
        (
            "--multi_gpu --num_processes 1",
            r"--multi_gpu contradicts --num_processes 1; request at least 2 processes",
        ),
        ("--multi_gpu --gpu_ids 3", r"--multi_gpu contradicts --gpu_ids 3; name at least 2 ids"),
        (
            "--use_parallelism_config --use_megatron_lm",
            r"--use_parallelism_config contradicts --use_megatron_lm, which divides models in its own way; .*leave",
        ),
        (
            "--use_parallelism_config --use_fsdp --parallelism_config_tp_size 2",
            r"--use_fsdp has nothing to shard over: dp_shard_size, cp_size and sp_size.*are 1; set",
        ),
        (
            "--use_parallelism_config --use_deepspeed --parallelism_config_tp_size 2",
            r"--parallelism_config_tp_size 2 does not go with --use_deepspeed, which has tensor .*autotp_size",
        ),
        (
            "--use_parallelism_config --parallelism_config_ep_size 2",
            r"--parallelism_config_ep_size 2 needs FSDP, .*pass --use_fsdp, or leave --parallelism_config_ep_size out",
        ),
        (
            "--use_parallelism_config --parallelism_config_pp_size 2 --parallelism_config_cp_size 2",
            r"--parallelism_config_pp_size 2: cp_size=2 and pp_size=2 cannot be combined; leave out one of them",
        ),
        (
            "--use_parallelism_config --parallelism_config_pp_size 2 --parallelism_config_sp_size 2",
            r"--parallelism_config_pp_size 2: sp_size=2 and pp_size=2 cannot be combined; leave out one of them",
        ),
        (
            "--use_parallelism_config --use_fsdp --parallelism_config_pp_size 2 --parallelism_config_dp_shard_size 2 "
            "--parallelism_config_ep_size 2",
            r"--parallelism_config_ep_size 2: ep_size=2 and pp_size=2 cannot be combined; leave out one of them",
        ),
        (
            "--use_parallelism_config --use_fsdp --parallelism_config_dp_shard_size 4 --parallelism_config_ep_size 3",
            r"--parallelism_config_ep_size 3: ep_size=3 does not divide the 4 ranks of a replica .*divisor of 4",
        ),
        (
            "--use_parallelism_config --use_fsdp --fsdp_version 1",
            r"--use_parallelism_config needs FSDP version 2, but --fsdp_version 1 was given",
        ),
        ("--module --no_python", r"--module and --no_python exclude each other"),
        (
            "--use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states false",
            r"--fsdp_cpu_ram_efficient_loading loads weights on one .* but --fsdp_sync_module_states false",
        ),
    ],
)
def test_contradictions_name_both_and_what_to_do(flags, message):
    with pytest.raises(ConfigError, match=message):
        merged(flags)


def test_a_file_beside_the_file_of_deepspeed_sets_none_of_its_options(write):
    """Accelerate refuses such a file, too; flags beside it give way: see test_deepspeed_file.py."""
    file = write(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2}\n"
    )
    with pytest.raises(ConfigError, match=r"zero_stage: 2 in .*: set in DeepSpeed's own configuration"):
        merged(file=file)
    assert merged("--use_deepspeed --deepspeed_config_file ds.json --zero_stage 2").notes == ()


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_XPU", "MULTI_NPU"])
def test_a_file_of_several_accelerators_with_one_process_is_launched_as_by_accelerate(write, kind):
    file = write(f"distributed_type: {kind}\nnum_processes: 1\n")
    resolved = merged(file=file)
    assert (resolved.config.distributed_type, resolved.config.num_processes) == (kind, 1)
    assert f"distributed_type: {kind} in {file}, line 1 has one process" in resolved.notes[0]
    assert plan_world(resolved.config, Accelerators("cuda", 4, 4)).size == 1
    with pytest.raises(ConfigError, match="request at least 2 processes"):
        merged("--multi_gpu --num_processes 1")


def test_contradictions_inside_a_file_name_the_file(write):
    file = write("distributed_type: MULTI_GPU\nuse_cpu: true\n")
    with pytest.raises(
        ConfigError,
        match=rf"use_cpu: true in {file}, line 2 contradicts distributed_type: MULTI_GPU in {file}, line 1",
    ):
        merged(file=file)


def test_the_stronger_origin_wins_a_contradiction_and_it_is_said(write):
    file = write("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    resolved = merged("--cpu", file=file)
    assert (resolved.config.use_cpu, resolved.config.distributed_type) == (True, None)
    assert "distributed_type: MULTI_GPU in" in resolved.notes[0]
    assert "is overridden by --cpu" in resolved.notes[0]
    resolved = merged("--num_processes 1", file=file)
    assert (resolved.config.num_processes, resolved.config.distributed_type) == (1, "NO")


def test_a_number_of_processes_replaces_one_process_of_a_file_in_silence(write):
    # accel config writes such a file after "one process", and each launch with a flag would tell of it.
    resolved = merged("--num_processes 2", file=write("distributed_type: 'NO'\nnum_processes: 1\n"))
    assert (resolved.config.num_processes, resolved.config.distributed_type) == (2, None)
    assert not resolved.notes
    file = write("use_cpu: true\n")
    resolved = merged("--multi_gpu", file=file)
    assert (resolved.config.use_cpu, resolved.config.distributed_type) == (False, "MULTI_GPU")
    assert resolved.origin("use_cpu") is Origin.FLAG


def test_fsdp_and_deepspeed_may_run_on_the_cpu():
    for flag in ("--use_fsdp", "--use_deepspeed"):
        assert merged(f"--cpu {flag} --num_processes 2").config.use_cpu


def test_several_machines_may_have_one_accelerator_each():
    assert merged("--multi_gpu --num_machines 2 --gpu_ids 0 --num_processes 2").config.multi_accelerator


def test_loading_on_one_process_is_off_where_weights_are_not_sent():
    section = merged("--use_fsdp --fsdp_sync_module_states false").config.fsdp
    assert section.cpu_ram_efficient_loading is False


def test_what_is_counted_takes_the_place_of_a_number_in_a_file(write):
    found = merged("--nproc_per_node gpu", file=write("num_processes: 4\n"))
    assert (found.config.num_processes, found.config.processes_per) == (None, "gpu")
    assert "overridden by --nproc_per_node gpu" in " ".join(found.notes)


def test_processes_for_each_cpu_are_on_the_cpu():
    found = merged("--nproc_per_node cpu")
    assert found.config.use_cpu
    assert found.describe("use_cpu") == "--nproc_per_node cpu"


def test_a_number_and_what_is_counted_exclude_each_other():
    with pytest.raises(ConfigError, match="--nproc_per_node auto contradicts --num_processes 4; keep one"):
        merged("--nproc_per_node auto --num_processes 4")


def test_all_contradictions_are_told_one_a_line():
    with pytest.raises(ConfigError) as told:
        merged("--cpu --multi_gpu --module --no_python")
    heading, *lines = str(told.value).splitlines()
    assert heading == "2 errors:"
    assert "--multi_gpu" in lines[0]
    assert "--no_python" in lines[1]
