"""Queries to nvidia-smi, with a replacement for the tool."""

from __future__ import annotations

import stat
import sys

import pytest

from accel_state.errors import DeviceError
from accel_state.host import nvidia


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """A simulated nvidia-smi."""
    if sys.platform == "win32":
        pytest.skip("the simulated tool is a shell script")

    def make(names, driver, code=0):
        tool = tmp_path / "nvidia-smi"
        listed, drivers = "\n".join(names), "\n".join([driver] * len(names))
        tool.write_text(
            f'#!/bin/sh\ncase "$1" in *name*) echo "{listed}";; *) echo "{drivers}";; esac\nexit {code}\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


@pytest.mark.parametrize(
    ("names", "driver", "answer"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.54.03", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.54.03", True),
        (["NVIDIA A100", "NVIDIA A100"], "535.54.03", True),
    ],
)
def test_cards_that_cannot_talk_to_each_other(smi, names, driver, answer):
    smi(names, driver)
    assert nvidia.get_gpu_info() == (names, len(names))
    assert nvidia.get_driver_version() == driver
    assert nvidia.check_cuda_p2p_ib_support() is answer


def test_nvidia_smi_missing_or_failing(smi):
    assert nvidia.check_cuda_p2p_ib_support()
    with pytest.raises(DeviceError, match="nvidia-smi is not on the PATH"):
        nvidia.get_gpu_info()
    smi([], "")
    with pytest.raises(DeviceError, match="lists no GPU"):
        nvidia.get_driver_version()
    smi(["x"], "1", code=9)
    with pytest.raises(DeviceError, match="--query-gpu=name failed"):
        nvidia.get_gpu_info()


def test_names_and_memory(smi):
    smi(["NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA GB10, [N/A]"], "")
    assert nvidia.describe_gpus() == [("NVIDIA H100 80GB HBM3", 81559 * 2**20), ("NVIDIA GB10", 0)]
