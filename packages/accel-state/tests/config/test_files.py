"""Configuration files: old and new ones load, wrong ones say what is wrong and where."""

from __future__ import annotations

import json
import logging
import operator
import os
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from accel_state.config import (
    LaunchConfig,
    SageMakerConfig,
    default_path,
    find_default,
    load,
    parse_flags,
    resolve,
    save,
)
from accel_state.config.files import accelerates_folder, find_mistakes, layer_of, read_layer
from accel_state.config.roots import complete_root
from accel_state.config.schema import schema_of
from accel_state.errors import ConfigError, ConfigNotFoundError, UnknownKeyError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def changed(config):
    """The options of the root that differ from their defaults, sections as they are."""
    return {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != getattr(type(config)(), f.name)
    }


def test_a_file_of_0_11_loads():
    config = load(CONFIGS / "old_single.yaml")
    assert changed(config) == {"distributed_type": "NO", "mixed_precision": "fp16", "num_processes": 1}


def test_a_file_of_0_12_loads():
    config = load(CONFIGS / "old_compiled.yaml")
    assert config.dynamo.backend == "INDUCTOR"
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == ("MULTI_GPU", 2, "bf16")
    assert config.same_network is True
    assert config.tpu.downcast_bf16 is False


def test_an_old_fsdp_file_loads():
    section = load(CONFIGS / "old_fsdp.yaml").fsdp
    assert section.sharding_strategy == "FULL_SHARD"
    assert section.backward_prefetch == "BACKWARD_PRE"
    assert section.transformer_cls_names_to_wrap == ("BertLayer",)
    assert section.cpu_offload is False


def test_an_mpi_file_loads_and_says_what_is_retired(caplog):
    with caplog.at_level(logging.WARNING, "accel_state"):
        config = load(CONFIGS / "mpi.yaml")
    assert config.mpirun.hostfile == "/home/user/hostfile"
    assert (config.num_processes, config.num_machines, config.use_cpu) == (16, 4, True)
    assert config.main_process_port == 29500
    said = " ".join(caplog.messages)
    assert "ipex_config is ignored" in said
    assert "mpirun_config.mpirun_ccl is ignored" in said


def test_a_sagemaker_file_loads():
    config = load(CONFIGS / "sagemaker.yaml")
    assert isinstance(config, SageMakerConfig)
    assert (config.profile, config.iam_role_name, config.pytorch_version) == (
        "MY_PROFILE",
        "my_role",
        "1.10.2",
    )
    assert config.distributed_type == "NO"


def test_an_fp8_file_with_the_wizards_names_loads():
    section = load(CONFIGS / "fp8.yaml").fp8
    assert (section.backend, section.fp8_format) == ("TE", "E4M3")
    assert (section.amax_history_len, section.amax_compute_algo) == (1024, "max")
    assert section.override_linear_precision == (False, False, False)


def test_an_fsdp2_file_with_a_mesh_loads():
    config = load(CONFIGS / "fsdp2.yaml")
    assert config.use_fsdp
    assert config.use_parallelism_config
    assert config.fsdp.reshard_after_forward is True
    assert config.fsdp.transformer_cls_names_to_wrap == ("LlamaDecoderLayer", "LlamaEmbedding")
    assert (config.parallelism.dp_shard_size, config.parallelism.cp_size) == (4, 2)
    assert config.parallelism.cp_comm_strategy == "alltoall"


def test_a_deepspeed_file_loads_with_a_bare_no():
    config = load(CONFIGS / "deepspeed.yaml")
    assert config.mixed_precision == "no"  # YAML reads the bare word as false
    assert config.gradient_accumulation_steps == 4
    assert config.deepspeed.zero3_init_flag is True
    assert config.deepspeed.offload_param_nvme_path == "/nvme"
    assert config.rdzv_backend == "c10d"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_every_fixture_survives_being_written(path, suffix, tmp_path):
    config = load(path)
    copy = save(config, tmp_path / f"copy{suffix}")
    assert load(copy) == config


def test_a_written_file_has_only_keys_that_accelerate_knows(tmp_path):
    surface = json.loads((CONFIGS.parent / "accelerate_surface.json").read_text())["keys"]
    data = yaml.safe_load(save(load(CONFIGS / "fsdp2.yaml"), tmp_path / "f.yaml").read_text())
    assert set(data) <= set(surface["LOCAL_MACHINE"])
    for place in ("fsdp_config", "parallelism_config"):
        assert set(data[place]) <= set(surface[place])


def test_writing_drops_unset_values_and_empty_sections(tmp_path):
    path = save(LaunchConfig(num_processes=2), tmp_path / "new" / "f.yaml")
    data = yaml.safe_load(path.read_text())
    assert data["num_processes"] == 2
    assert not [key for key, value in data.items() if value in (None, {}, [])]
    assert not [key for key in data if key.endswith("_config")]
    assert [entry.name for entry in path.parent.iterdir()] == ["f.yaml"]


def test_json_is_chosen_by_extension(tmp_path):
    path = save(LaunchConfig(num_processes=2), tmp_path / "f.json")
    assert json.loads(path.read_text())["num_processes"] == 2
    assert load(path).num_processes == 2


def test_null_means_unset(tmp_path):
    path = write(tmp_path / "f.yaml", "num_processes: null\nfsdp_config: null\nmixed_precision:\n")
    assert load(path) == LaunchConfig()


def test_an_empty_file_is_a_configuration_of_defaults(tmp_path):
    assert load(write(tmp_path / "f.yaml", "")) == LaunchConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fsdp_config:\n  fsdp_offload_parms: true\n",
            r"fsdp_config\.fsdp_offload_parms .*fsdp_config\.fsdp_offload_params",
        ),
        ("mixed_precison: fp16\n", r"mixed_precison .*did you mean mixed_precision"),
        ("fp8_config:\n  formt: E4M3\n", r"fp8_config\.formt .*fp8_config\.format"),
        ("zero_stage: 3\n", r"zero_stage does not exist; it belongs at deepspeed_config\.zero_stage"),
        (
            "deepspeed_config:\n  num_processes: 3\n",
            r"deepspeed_config\.num_processes .*belongs at num_processes",
        ),
        ("xyzzy: 3\n", r"key xyzzy does not exist$"),
        ("a_typo: 1\nanother_typo: 2\n", r"2 errors:\n  .*a_typo.*\n  .*another_typo"),
    ],
)
def test_t15_unknown_keys_are_errors_at_any_depth(text, message, tmp_path):
    with pytest.raises(UnknownKeyError, match=message):
        load(write(tmp_path / "f.yaml", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: four\n", r"num_processes is 'four'; expected an integer"),
        ("num_processes: true\n", r"num_processes is True; expected an integer"),
        ("num_processes: -1\n", r"num_processes is -1; expected an integer from 1 to 1000000"),
        ("main_process_port: 70000\n", r"main_process_port is 70000; expected .* from 0 to 65535"),
        ("debug: maybe\n", r"debug is 'maybe'; expected true or false"),
        ("mixed_precision: bf17\n", r"mixed_precision is 'bf17'; expected one of no, fp16, bf16, fp8"),
        ("distributed_type: FSPD\n", r"distributed_type is 'FSPD'; expected one of NO, .*FSDP"),
        ("fsdp_config: 3\n", r"fsdp_config is 3; expected a mapping"),
        ("fsdp_config:\n  fsdp_version: 3\n", r"fsdp_config\.fsdp_version is 3; expected .* from 1 to 2"),
        ("tpu_vm: 3\n", r"tpu_vm is 3; expected a list of strings"),
        (
            "fp8_config:\n  override_linear_precision: [true]\n",
            r"override_linear_precision is \[True\]; expected three",
        ),
        ("num_processes: [2\n", r'is not valid YAML(.|\n)* in "f\.yaml", line 2'),
        ("- 1\n", r"holds list; expected a mapping"),
        (
            "compute_environment: MOON\n",
            r"compute_environment is 'MOON'; expected one of LOCAL_MACHINE, AMAZON_SAGEMAKER",
        ),
        (
            "fsdp_config:\n  fsdp_offload_params: true\n  offload_params: false\n",
            r"fsdp_config\.fsdp_offload_params is True and fsdp_config\.offload_params is False, but both",
        ),
        (
            "pytorch_version: 1.1\ncompute_environment: AMAZON_SAGEMAKER\n",
            r"pytorch_version is 1\.1; expected text",
        ),
    ],
)
def test_wrong_values_name_key_value_and_what_was_expected(text, message, tmp_path):
    path = write(tmp_path / "f.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_broken_json_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(write(tmp_path / "f.json", "{"))


def test_a_missing_file_is_an_error_of_both_kinds(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigNotFoundError):
        load(tmp_path / "nowhere.yaml")


def test_the_default_file_is_ours_then_theirs(tmp_path):
    environ = {"HF_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert find_default(environ) is None
    theirs = write(tmp_path / "accelerate" / "default_config.yaml", "debug: true\n")
    assert find_default(environ).path == theirs
    assert find_default(environ).foreign
    for path in (tmp_path / "accel/default_config.yaml", default_path(environ)):
        ours = write(path, "debug: true\n")
        assert find_default(environ).path == ours
        assert not find_default(environ).foreign


def test_where_the_default_file_lies():
    assert default_path({"XDG_CONFIG_HOME": "/c", "HF_HOME": "/a"}) == Path("/c/accel/default_config.yaml")
    assert default_path({}) == Path("~/.config/accel/default_config.yaml").expanduser()
    assert accelerates_folder({"HF_HOME": "/a"}) == Path("/a/accelerate")
    assert accelerates_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/accelerate")
    assert accelerates_folder({}) == Path("~/.cache/huggingface/accelerate").expanduser()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c.yaml",
            "num_processes: 2\ndebug: true\nnum_processes: 3\n",
            "line 3: key num_processes is in line 1 already",
        ),
        (
            "c.yaml",
            "dynamo_config:\n  dynamo_mode: default\n  dynamo_mode: max-autotune\n",
            "line 3: key dynamo_mode is in line 2 already",
        ),
        (
            "c.json",
            '{"num_processes": 2, "num_processes": 3}',
            "line 1: key num_processes is twice in that line",
        ),
        (
            "c.json",
            '{"dynamo_config":\n{"dynamo_mode": "default",\n"dynamo_mode": "max-autotune"}}',
            "line 3: key dynamo_mode is in line 2 already",
        ),
    ],
)
def test_a_key_that_is_repeated_is_refused_with_its_lines(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=f"{name}, {message}; keep one of them"):
        load(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", "debug: false\ndebug: false\n"), ("c.json", '{"debug": false,\n\t"debug": false}')],
)
def test_a_key_that_repeats_its_value_is_accepted(tmp_path, name, text):
    assert load(write(tmp_path / name, text)).debug is False


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "num_processes: 2\n"), ("c.json", '{"num_processes": 2}')]
)
def test_a_mark_before_the_text_is_no_part_of_it(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    assert read_layer(file).values["num_processes"] == 2


def test_a_key_that_is_no_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match="key 1 is not a string"):
        load(write(tmp_path / "c.yaml", "1: 2\n"))


TRL = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "num_processes": 3, "gpu_ids": "all"},
    "fsdp1": {"use_fsdp": True, "fsdp.reshard_after_forward": "FULL_SHARD", "fsdp.use_orig_params": True},
    "fsdp2": {"use_fsdp": True, "fsdp.reshard_after_forward": True, "fsdp.fsdp_version": 2},
    "context_parallel_2gpu": {"use_parallelism_config": True, "parallelism.cp_size": 2, "num_processes": 2},
    "alst_ulysses_4gpu": {
        "use_deepspeed": True,
        "parallelism.sp_size": 2,
        "parallelism.sp_backend": "deepspeed",
    },
    "zero1": {"use_deepspeed": True, "deepspeed.zero_stage": 1, "gradient_accumulation_steps": None},
    "zero2": {"use_deepspeed": True, "deepspeed.zero_stage": 2, "deepspeed.offload_param_device": "none"},
    "zero3": {"use_deepspeed": True, "deepspeed.zero_stage": 3, "deepspeed.zero3_save_16bit_model": True},
}


@pytest.mark.parametrize("name", TRL)
def test_the_files_that_trl_ships_are_read_as_they_are(name, tmp_path):
    path = CONFIGS / "trl" / f"{name}.yaml"
    resolved = resolve(path, {})
    for option, expected in TRL[name].items():
        assert operator.attrgetter(option)(resolved.config) == expected, option
    # Every key of the file counts, or a note says why it does not.
    data = yaml.safe_load(path.read_text())
    keys = {
        f"{key}.{inner}"
        for key, inner_keys in data.items()
        if isinstance(inner_keys, dict)
        for inner in inner_keys
    }
    layer = read_layer(path)
    read = {place.key for place in layer.places.values()} | {note.split()[3] for note in layer.notes}
    unset = {"deepspeed_config.gradient_accumulation_steps"} if name == "zero1" else set()  # "auto"
    assert keys == {key for key in read if "." in key} | unset
    assert load(save(load(path), tmp_path / "copy.yaml")) == load(path)


def test_the_frozen_trl_files_are_all_nine():
    assert {path.stem for path in (CONFIGS / "trl").iterdir()} == set(TRL)
    assert len(TRL) == 9


def test_one_process_of_a_file_with_a_left_over_number_is_said():
    notes = resolve(CONFIGS / "trl/single_gpu.yaml", {}).notes
    assert len(notes) == 1
    assert "num_processes: 8 in" in notes[0]
    assert "is not used: distributed_type: NO in" in notes[0]
    started = resolve(CONFIGS / "trl/single_gpu.yaml", {}, parse_flags(["--num_processes", "2"])).config
    assert (started.num_processes, started.distributed_type) == (2, None)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_every_mistake_of_a_file_is_found_with_its_line(suffix, tmp_path):
    text = {
        "yaml": "distributed_typ: NO\nnum_processes: four\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_offload_parms: true\n",
        "json": '{"distributed_typ": "NO",\n"num_processes": "four",\n"fsdp_config":\n'
        '{"fsdp_version": 2,\n\t"fsdp_offload_parms": true}}',
    }[suffix]  # fmt: skip
    path = write(tmp_path / f"f.{suffix}", text)
    layer, errors = find_mistakes(path)
    assert [str(error).removeprefix(str(path)) for error in errors] == [
        ", line 1: key distributed_typ does not exist; did you mean distributed_type?",
        ", line 2: num_processes is 'four'; expected an integer",
        ", line 5: key fsdp_config.fsdp_offload_parms does not exist; did you mean fsdp_config.fsdp_offload_params?",
    ]
    assert layer.values == {"fsdp.fsdp_version": 2}
    with pytest.raises(ConfigError, match=r"(?s)line 1.*line 2.*line 5"):
        load(path)


def test_a_file_that_is_no_mapping_is_one_mistake(tmp_path):
    layer, errors = find_mistakes(write(tmp_path / "f.yaml", "- 1\n"))
    assert layer is None
    assert len(errors) == 1


@pytest.mark.parametrize("place", ["fsdp_config", "deepspeed_config", "fp8_config", "dynamo_config",
                                   "megatron_lm_config", "parallelism_config", "mpirun_config"])  # fmt: skip
def test_t15_a_misspelt_key_of_every_section_is_an_error_with_its_line(place, tmp_path):
    path = write(tmp_path / "f.yaml", f"debug: false\n{place}:\n  no_such_key: 1\n")
    with pytest.raises(UnknownKeyError, match=rf"line 3: key {place}\.no_such_key does not exist"):
        load(path)


def test_old_distributed_types_are_read_as_what_they_are_now(tmp_path):
    mps = resolve(write(tmp_path / "mps.yaml", "distributed_type: MPS\nmixed_precision: 'no'\n"), {})
    assert (mps.config.distributed_type, mps.config.num_processes) == ("NO", 1)
    assert "line 1: distributed_type MPS is read as NO" in mps.notes[0]
    tp = resolve(
        write(tmp_path / "tp.yaml", "distributed_type: TP\nnum_processes: 4\ntp_config:\n  tp_size: 4\n"), {}
    )
    assert (tp.config.distributed_type, tp.config.parallelism.tp_size) == (None, 4)
    assert tp.config.use_parallelism_config
    assert "distributed_type TP is read as not set" in tp.notes[0]


# Files that would fill the memory, or never end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)),
         "has more than 30 aliases"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("a: &a {b: *a}\n", "nested too deeply"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("num_processes: 99999999999999999999\n", "expected an integer of at most 64 bits"),
        ("num_processes: 1e300\n", "expected an integer of at most 64 bits"),
        ("num_processes: " + "9" * 5000, "is not valid YAML|expected an integer"),
        ("num_processes: 5000000\n", "expected an integer from 1 to 1000000"),
        ("a: 2020-99-99\n", "is not valid YAML"),
        ("k" * 100_000 + ": 1\n", "does not exist|is not valid YAML"),
        ("fsdp_config: " + "x" * 100_000, "expected a mapping of options"),
    ],
    ids=["aliases", "cycle", "cycle of mappings", "deep", "deep mappings", "large", "larger", "digits", "many", "date",
         "key", "value"],
)  # fmt: skip
def test_a_file_that_asks_for_too_much_is_refused(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_layer(path)
    assert len(str(caught.value)) < 2000


def test_aliases_are_followed(tmp_path):
    text = "fsdp_config: &a {fsdp_version: 2}\nnum_processes: &n 2\nmachine_rank: *n\n"
    assert read_layer(write(tmp_path / "c.yaml", text)).values["machine_rank"] == 2


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_processes": ' + "9" * 5000 + "}", '{"a": 1e400}'])
def test_json_that_asks_for_too_much_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_layer(path)
    assert len(str(caught.value)) < 2000


def test_control_characters_are_an_error_of_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"c\.yaml is not valid YAML: .*special characters"):
        read_layer(write(tmp_path / "c.yaml", "num_processes: 1\0\n"))


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_file_without_an_end_is_not_read_to_it(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"more than 10,000,000 bytes, which no configuration has"):
        read_layer(tmp_path / name)


OLD_TEXTS = [
    "downcast_bf16: 'auto'", "fsdp_config: []", "deepspeed_config: ''", "gpu_ids: []", "tpu_env: []", "commands: {}",
    "num_processes: ''", "main_process_port: null", "mixed_precision: no", "use_cpu: 'no'",
    "fsdp_config: {fsdp_version: []}",
    "deepspeed_config: {gradient_clipping: 'auto', offload_optimizer_device: ''}",
]  # fmt: skip


@pytest.mark.parametrize("text", OLD_TEXTS)
def test_values_of_old_files_that_mean_not_set(text, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"{text}\nmachine_rank: '0'\n")
    found = read_layer(file)
    assert {value for path, value in found.values.items()} <= {0, "no"}


def test_every_option_may_be_empty(tmp_path):
    known = schema_of(complete_root())
    for section, key in known.by_key:
        for empty in (None, "", [], {}):
            data = {key: empty} if section is None else {section: {key: empty}}
            assert layer_of(data, "c.yaml").values == {}, (section, key, empty)


def test_a_configuration_that_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_state.whole_files._PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe.yaml")
    for place in (tmp_path / "pipe.yaml", tmp_path, "/dev/zero"):
        with pytest.raises(ConfigError, match=rf"configuration file {place} cannot be read: "):
            read_layer(place)


def test_a_key_that_is_repeated_with_its_value_is_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("debug: false\nnum_processes: 2\ndebug: false\n")
    assert read_layer(file).values["num_processes"] == 2
    for other in ("true", "'false'", "[false]"):
        file.write_text(f"debug: false\nnum_processes: 2\ndebug: {other}\n")
        with pytest.raises(ConfigError, match="line 3: key debug is in line 1 already"):
            load(file)
    file.write_text("num_processes: 2\nfsdp_config: {}\nfsdp_config: {}\n")
    with pytest.raises(ConfigError, match="line 3: key fsdp_config is in line 2 already"):
        load(file)
