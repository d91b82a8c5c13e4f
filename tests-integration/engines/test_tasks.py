"""Tasks of SkyPilot and dstack, read by their own models and tools. Run with `hatch run engines:tasks`."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.launching.submission import SUBMISSIONS, Job

pytest.importorskip("sky", reason="hatch run engines:tasks installs it")
pytest.importorskip("dstack", reason="hatch run engines:tasks installs it")

ALL = (
    *("--num_machines", "2", "--num_processes", "16", "--submit_gpus_per_machine", "H100:8", "--resume"),
    *("--submit_image", "me/train:1", "--submit_cpus_per_task", "32", "--submit_memory", "64Gi"),
    *(
        "--submit_retries",
        "3",
        "--submit_env",
        "A=b c",
        "--submit_setup",
        "nvidia-smi",
        "--submit_secrets",
        "HF_TOKEN",
    ),
)


def task(engine: str, *flags: str) -> dict[str, Any]:
    config = resolve(environ={}, flags=parse_flags(flags), use_default_file=False).local()
    text = SUBMISSIONS.get(engine).script(Job(config, ("accel",), "train.py", ("--lr", "1"), "ab12cd"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("flags", [ALL, ("--cpu",)], ids=["all options", "few options"])
def test_skypilot_reads_what_is_meant(flags: tuple[str, ...]) -> None:
    import sky

    written = task("skypilot", *flags)
    read = sky.Task.from_yaml_config(
        copy.deepcopy(written), secrets_overrides=dict.fromkeys(written.get("secrets", ()), "x")
    )
    (resources,) = read.resources
    assert read.name == "train-ab12cd"
    assert read.num_nodes == (2 if flags is ALL else 1)
    assert read.run == written["run"]
    recovery = resources.job_recovery
    assert recovery["recover_on_exit_codes"] == [75]
    assert recovery["max_restarts_on_errors"] == (3 if flags is ALL else 0)
    if flags is ALL:
        assert resources.accelerators == {"H100": 8}
        assert (resources.cpus, resources.memory) == ("32+", "64+")
        assert resources.extract_docker_image() == "me/train:1"
        assert read.envs["A"] == "b c"
        assert read.setup == "nvidia-smi"


def test_skypilot_refuses_a_code_that_there_is_not() -> None:
    import sky

    written = task("skypilot", *ALL)
    written["resources"]["job_recovery"]["recover_on_exit_codes"] = [7500]
    with pytest.raises(ValueError, match="7500"):
        sky.Task.from_yaml_config(written, secrets_overrides={"HF_TOKEN": "x"})


@pytest.mark.parametrize(
    "flags", [(*ALL, "--submit_shared_memory", "16Gi", "--submit_time", "4:00:00"), ("--cpu",)]
)
def test_dstack_reads_what_is_meant(flags: tuple[str, ...]) -> None:
    from dstack._internal.core.models.configurations import TaskConfiguration, parse_apply_configuration

    read = parse_apply_configuration(task("dstack", *flags))
    if isinstance(read, tuple):
        read = read[0]
    assert isinstance(read, TaskConfiguration)
    assert read.name == "train-ab12cd"
    assert [event.value for event in read.retry.on_events] == ["no-capacity", "interruption"]
    assert read.stop_duration == 300
    if len(flags) > 1:
        assert read.nodes == 2
        assert (read.resources.gpu.name, read.resources.gpu.count.min) == (["H100"], 8)
        assert read.resources.memory.min == 64
        assert read.resources.shm_size == 16
        assert read.max_duration == 4 * 3600


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("sky", "jobs", "launch"), ("--yes", "--async", "--secret")),
        (("sky", "jobs", "queue"), ("--all", "--output [table|json]")),
        (("sky", "jobs", "logs"), ("--follow / --no-follow",)),
        (("sky", "jobs", "cancel"), ("--yes",)),
        (("dstack", "apply"), ("--yes", "--detach", "--file")),
        (("dstack", "ps"), ("--all", "--format {plain,json}")),
        (("dstack", "logs"), ("run_name",)),
        (("dstack", "attach"), ("--logs",)),
        (("dstack", "stop"), ("--yes",)),
    ],
)
def test_the_tools_have_the_flags_that_they_are_given(words: tuple[str, ...], flags: tuple[str, ...]) -> None:
    tool = Path(sys.executable).parent / words[0]
    shown = subprocess.run(
        [tool, *words[1:], "--help"], capture_output=True, text=True, timeout=120, check=False
    ).stdout
    for flag in flags:
        assert flag in shown, shown
