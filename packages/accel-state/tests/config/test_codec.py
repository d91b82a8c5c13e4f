"""Round trips over every carrier, from the schema itself."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_state.config import (
    Carrier,
    LaunchConfig,
    SageMakerConfig,
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
    names = [bound.path for bound in schema_of(LaunchConfig).options if Carrier.FLAG in bound.carriers]
    bound = schema_of(LaunchConfig).by_path[data.draw(st.sampled_from(names))]
    value = data.draw(strategies.values(bound))
    if bound.path in ("use_parallelism_config", "distributed_type"):
        return
    resolved = resolve(environ={}, flags={bound.path: value}, use_default_file=False)
    assert value_of(resolved.config, bound) == value
