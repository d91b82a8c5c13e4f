"""Installed strategies: found by their entry points, and only by a run that names one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from accel_state.config import (
    LaunchableStrategy,
    LaunchConfig,
    Section,
    complete_root,
    decode,
    parse_flags,
    resolve,
)
from accel_state.config.option import option
from accel_state.config.roots import root_for, root_of_environment
from accel_state.errors import ConfigError
from accel_state.launching.hardware import Accelerators
from accel_state.launching.plan import plan_world


@dataclass(frozen=True, repr=False, eq=False)
class ToySection(Section):
    """Options of the strategy."""

    file_key = "toy_config"
    prefix = "toy_"
    env_prefix = "TOY_"
    title = "Toy"

    size: int | None = option(help="How large.", low=1, launch_default=3)


def odd(options):
    if options.values["toy.size"] is not None and options.values["toy.size"] % 2 == 0:
        raise ConfigError(f"{options.describe('toy.size')} is even; {options.remedy('toy.size')}")


TOY = LaunchableStrategy(
    name="toy",
    distributed_type="TOY",
    title="Toy",
    summary="nothing",
    section=ToySection,
    section_name="toy",
    plugin="nowhere:Toy",
    rules=(odd,),
    several_processes=True,
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The strategy as an installed package has it."""
    place = tmp_path / "toy-1.0.dist-info"
    place.mkdir()
    (place / "entry_points.txt").write_text("[accel_state.strategies]\ntoy = toy_of_a_test:TOY\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "toy_of_a_test", sys.modules[__name__])


def resolved(words="", environ=None, file=None):
    return resolve(file, environ=environ or {}, flags=parse_flags(words.split()), use_default_file=False)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        ("--use_toy", {}, ""),
        ("--distributed_type toy", {}, ""),
        ("", {"ACCELERATE_USE_TOY": "true"}, ""),
        ("", {"ACCELERATE_DISTRIBUTED_TYPE": "TOY"}, ""),
        ("", {}, "distributed_type: TOY\n"),
    ],
)
def test_every_place_can_select_it(words, environ, text, tmp_path):
    file = None
    if text:
        file = tmp_path / "c.yaml"
        file.write_text(text)
    config = resolved(words, environ, file).local()
    assert config.strategy is TOY
    assert config.use_toy
    assert config.toy == ToySection(size=3)  # the launcher's default
    assert config.is_active("toy")


@pytest.mark.usefixtures("toy")
def test_a_run_that_names_none_has_the_plain_root():
    config = resolved("--use_fsdp --fsdp_version 2").local()
    assert type(config) is LaunchConfig
    assert config.strategy is None
    assert not config.use_toy
    assert config.toy == ToySection()
    with pytest.raises(AttributeError, match="no option anything"):
        _ = config.anything
    assert root_for({"num_processes": 2, "fsdp.cpu_offload": True}) is LaunchConfig
    assert root_of_environment({"ACCELERATE_USE_FSDP": "true"}) is LaunchConfig


def test_such_a_run_reads_no_metadata():
    code = (
        "import sys; from accel_state.config import parse_flags, resolve\n"
        "from accel_state import entry_points\n"
        "entry_points.entry_points = None\n"
        "resolve(environ={}, flags=parse_flags(['--use_fsdp', '--num_processes', '2']), use_default_file=False)\n"
        "print('importlib.metadata' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.usefixtures("toy")
def test_an_empty_section_selects_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text("toy_config: {}\nnum_processes: 2\n")
    assert type(resolved(file=tmp_path / "c.yaml").config) is LaunchConfig


@pytest.mark.usefixtures("toy")
def test_its_rules_and_its_number_of_processes():
    with pytest.raises(ConfigError, match=r"^--toy_size 4 is even; leave --toy_size out$"):
        resolved("--use_toy --toy_size 4")
    assert resolved("--use_fsdp --toy_size 4").local().toy.size == 4  # the rules of what is selected
    config = resolved("--use_toy --cpu --num_processes 1")
    with pytest.raises(ConfigError, match=r"^--use_toy needs at least 2 processes, and there is 1; pass"):
        plan_world(config.local(), Accelerators(), config.sources)
    with pytest.raises(ConfigError, match="--use_toy and --use_fsdp exclude each other"):
        resolved("--use_toy --use_fsdp")
    assert resolved("--no-use_toy", {"ACCELERATE_USE_TOY": "true"}).local().strategy is None


@pytest.mark.usefixtures("toy")
def test_ranks_decode_it():
    assert decode({"ACCELERATE_USE_TOY": "true", "TOY_SIZE": "5"}).toy.size == 5
    assert decode({"TOY_SIZE": "5"}, ToySection).size == 5


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "no_such_module:TOY",
            "no_such_module:TOY, which its entry point in accel_state.strategies names, cannot",
        ),
        ("json:loads", "which is function; expected LaunchableStrategy"),
    ],
)
def test_a_broken_package_is_named(tmp_path, monkeypatch, place, message):
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text(f"[accel_state.strategies]\nbroken = {place}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        complete_root()
    assert type(resolved("--use_fsdp").config) is LaunchConfig
