"""Clients of Accelerate run unmodified: with the same results on this library as on the real package, and on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from testkit import clients


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        pytest.param(scenario, ranks, id=f"{scenario}-{ranks}")
        for scenario in clients.SCENARIOS
        for ranks in scenario.ranks
    ],
)
def test_a_client_gets_the_same_results(scenario, ranks, tmp_path):
    if absent := scenario.missing():
        pytest.skip(f"needs {', '.join(absent)}: hatch run engines:{scenario.engine or 'clients'}")
    found = []
    for name in ("ours", "real"):
        (tmp_path / name).mkdir()
        found.append(clients.run(scenario, ranks, name == "ours", tmp_path / name))
    assert clients.differences(*found, scenario.tolerance) == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    ["trainer-train", "trainer-accumulate", "lora-merge", "tuning-sft", "tuning-dpo", "images-unconditional"],
)
def test_a_client_is_proved_to_train_the_same_on_ranks(name, tmp_path):
    [scenario] = [one for one in clients.SCENARIOS if str(one) == name]
    if absent := scenario.missing():
        pytest.skip(f"needs {', '.join(absent)}: hatch run engines:clients")
    strategies = (
        "ddp" if scenario.client == "images" else "ddp,fsdp2"
    )  # diffusers' averages take no divided weights
    script = [str(clients.FOLDER / f"{scenario.client}.py"), scenario.name, str(tmp_path / "out")]
    flags = ["--as_accelerate", "--json", "--strategies", strategies]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(clients.SOURCES),
    }
    command = [sys.executable, "-m", "accel_cli", "prove", *flags, *script]
    done = subprocess.run(
        command, env=os.environ | offline, cwd=tmp_path, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for found in json.loads(done.stdout)["strategies"]:
        notes = [one["kind"] for one in found["findings"] if one["kind"] != "shared noise"]
        # diffusers' scripts plan their schedules for as many advances in a step as there are processes.
        assert notes == (["planned for ranks"] if scenario.client == "images" else []), found
        assert bool(found["differ"]) == bool(notes), found
        assert ("the schedule is planned to advance 2 times" in str(found)) == (scenario.client == "images")
