"""Round trips over every carrier, from the schema itself."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_state.config import (
    Carrier,
    LaunchConfig,
    SageMakerConfig,
    complete_root,
    decode,
    encode,
    load,
    parse_flags,
    resolve,
    save,
    schema_of,
    to_flags,
)
from accel_state.config.schema import build, value_of
from testkit import schema as strategies

ROOTS = [LaunchConfig, SageMakerConfig]
OPTIONS = [
    pytest.param(root, bound, id=f"{root.__name__}.{bound.path}")
    for root in ROOTS
    for bound in schema_of(root).options
]
ONE_BY_ONE = settings(max_examples=8, deadline=None)
TOGETHER = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def travels(carrier):
    return lambda bound: carrier in bound.carriers


@pytest.mark.parametrize(("root", "bound"), OPTIONS)
@ONE_BY_ONE
@given(data=st.data())
def test_every_option_survives_every_carrier(root, bound, data, tmp_path_factory):
    config = build(root, {bound.path: data.draw(strategies.values(bound))})
    value = value_of(config, bound)
    assert bound.carriers, bound.path
    if Carrier.ENVIRONMENT in bound.carriers:
        assert value_of(decode(encode(config), root), bound) == value
    if Carrier.FILE in bound.carriers:
        for suffix in (".yaml", ".json"):
            path = save(config, tmp_path_factory.getbasetemp() / f"one{suffix}")
            assert value_of(load(path), bound) == value
    if Carrier.FLAG in bound.carriers:
        parsed = parse_flags([*to_flags(config), "script.py"])
        assert value_of(build(root, parsed.values), bound) == value
        assert parsed.rest == ("script.py",)


@pytest.mark.parametrize("root", ROOTS)
@TOGETHER
@given(data=st.data())
def test_decode_is_the_inverse_of_encode(root, data):
    config = data.draw(strategies.configs(root, travels(Carrier.ENVIRONMENT)))
    environ = encode(config)
    assert decode(environ, root) == config
    assert all(isinstance(text, str) and "\0" not in text for text in environ.values())


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("root", ROOTS)
@TOGETHER
@given(data=st.data())
def test_a_written_file_loads_back_equal(root, suffix, data, tmp_path_factory):
    config = data.draw(strategies.configs(root, travels(Carrier.FILE)))
    if root is LaunchConfig and config.distributed_type == "NO" and config.num_processes is None:
        config = build(root, {"distributed_type": "NO", "num_processes": 1})
    path = save(config, tmp_path_factory.getbasetemp() / f"together{suffix}")
    assert load(path) == config


@pytest.mark.parametrize("root", ROOTS)
@TOGETHER
@given(data=st.data())
def test_flags_parse_back_to_the_configuration(root, data):
    config = data.draw(strategies.configs(root, travels(Carrier.FLAG)))
    assert build(root, parse_flags(to_flags(config)).values) == config


@TOGETHER
@given(data=st.data())
def test_resolving_flags_keeps_every_value(data):
    names = [bound.path for bound in schema_of(complete_root()).options if Carrier.FLAG in bound.carriers]
    bound = schema_of(complete_root()).by_path[data.draw(st.sampled_from(names))]
    value = data.draw(strategies.values(bound))
    if bound.path in ("use_parallelism_config", "distributed_type"):
        return
    resolved = resolve(environ={}, flags={bound.path: value}, use_default_file=False)
    assert value_of(resolved.config, bound) == value


FOR_AN_ACCELERATOR = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "bf16", "bf16"),
    "ACCELERATE_USE_CPU": ("use_cpu", "true", True),
    "ACCELERATE_DEBUG_MODE": ("debug", "1", True),
    "ACCELERATE_CPU_AFFINITY": ("enable_cpu_affinity", "1", True),
    "ACCELERATE_RESUME": ("resume", "yes", True),
    "ACCELERATE_USE_FSDP": ("use_fsdp", "true", True),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("use_parallelism_config", "true", True),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "4", 4),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo.backend", "inductor", "INDUCTOR"),
    "ACCELERATE_DYNAMO_MODE": ("dynamo.mode", "max-autotune", "max-autotune"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("dynamo.fullgraph", "true", True),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": ("dynamo.dynamic", "false", False),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("dynamo.use_regional_compilation", "true", True),
    "ACCELERATE_TORCH_DEVICE": ("runtime.torch_device", "cuda:1", "cuda:1"),
    "ACCELERATE_LOG_LEVEL": ("runtime.log_level", "INFO", "INFO"),
    "ACCELERATE_COLLECTIVE_CHECKS": ("runtime.collective_checks", "on", "on"),
    "ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": ("runtime.collective_timeout_report", "2.5", 2.5),
    "ACCELERATE_BYPASS_DEVICE_MAP": ("runtime.bypass_device_map", "1", True),
    "ACCELERATE_ALLOW_CP_STANDALONE": ("runtime.allow_cp_standalone", "true", True),
    "FSDP_VERSION": ("fsdp.fsdp_version", "2", 2),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("deepspeed.zero_stage", "3", 3),
    "PARALLELISM_CONFIG_TP_SIZE": ("parallelism.tp_size", "2", 2),
}


def test_one_decode_gives_every_default_of_an_accelerator():
    config = decode({name: text for name, (_, text, _) in FOR_AN_ACCELERATOR.items()})
    for name, (path, _, expected) in FOR_AN_ACCELERATOR.items():
        found = config
        for attribute in path.split("."):
            found = getattr(found, attribute)
        assert found == expected, name
    assert config.is_active("dynamo")
    assert config.is_active("fsdp")


def test_decode_is_cheap_enough_for_every_start():
    environ = {name: text for name, (_, text, _) in FOR_AN_ACCELERATOR.items()}
    seconds = min(timeit.repeat(lambda: decode(environ), number=1, repeat=20))
    assert seconds < 0.005  # 0.0004 on an idle core of 2026
