"""Peaks of accelerators."""

import re

import pytest
import torch

from accel_train.loop.device_peaks import DEVICE_PEAKS, device_peak, peak_flops


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("NVIDIA B200", "NVIDIA B200"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A40", "NVIDIA A40"),
        ("Tesla T4", "NVIDIA T4"),
        ("Tesla V100-SXM2-16GB", "NVIDIA V100 SXM2"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA RTX 4090"),
        ("AMD Instinct MI300X", "AMD MI300X"),
    ],
)
def test_names_that_torch_reports_find_their_entry(reported, name):
    assert device_peak(reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "cpu",
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Apple M3",
    ],
)
def test_unknown_devices_and_parts_of_devices_have_none(reported):
    assert device_peak(reported) is None
    assert peak_flops(reported, "bf16") is None


def test_figures_have_a_source_and_are_dense():
    for peak in DEVICE_PEAKS:
        assert peak.source
        assert re.compile(peak.pattern)
        if (
            peak.fp8 is not None and peak.bf16 is not None
        ):  # twice the 16-bit rate on all units that have both
            assert peak.fp8 / peak.bf16 == pytest.approx(2, rel=0.03), peak.name


def test_precision_selects_the_peak(monkeypatch):
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "no") == 67e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops("NVIDIA H100 80GB HBM3", "no") == 494e12
