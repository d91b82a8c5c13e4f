"""Peak FLOPs per second of accelerators, against which model FLOPs utilisation (MFU) is measured.

All figures are for dense matrix products (without structured sparsity), in 10^12 floating-point operations per second,
of one device as `torch` counts devices, at boost clock, as the manufacturer states them. Where a data sheet only states
the figure with 2:4 sparsity, half of it is taken. 16-bit figures of GeForce cards are those with accumulation in
float32, which `torch` uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

__all__ = ["DEVICE_PEAKS", "DevicePeak", "device_peak", "peak_flops"]


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The peaks of one kind of device, in 10^12 FLOPs per second; None: it has no such units, or no figure is stated.

    Attributes:
        name: the manufacturer's name of the device.
        pattern: regular expression that is searched in torch's name of the device; case does not matter.
        bf16: bfloat16.
        fp16: float16.
        fp32: float32.
        fp8: 8-bit floats.
        tf32: float32 matrices multiplied in TF32, which `torch.set_float32_matmul_precision("high")` allows.
        source: document of the manufacturer.
    """

    name: str
    pattern: str
    bf16: float | None
    fp16: float | None
    fp32: float | None
    fp8: float | None
    tf32: float | None
    source: str


#: The first whose pattern is found counts, so narrower ones come first.
DEVICE_PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("NVIDIA GB200", r"\bGB200\b", 2500, 2500, 80, 5000, 1250, "NVIDIA GB200 NVL72 data sheet"),
    DevicePeak("NVIDIA B200", r"\bB200\b", 2250, 2250, 75, 4500, 1125, "NVIDIA HGX B200 specifications"),
    DevicePeak("NVIDIA GH200", r"\bGH200\b", 990, 990, 67, 1979, 494, "NVIDIA GH200 Superchip data sheet"),
    DevicePeak("NVIDIA H200 NVL", r"\bH200 NVL\b", 835, 835, 60, 1671, 417, "NVIDIA H200 data sheet"),
    DevicePeak("NVIDIA H200 SXM", r"\bH200\b", 989, 989, 67, 1979, 494, "NVIDIA H200 data sheet"),
    DevicePeak("NVIDIA H100 NVL", r"\bH100 NVL\b", 835, 835, 60, 1671, 417, "NVIDIA H100 data sheet"),
    DevicePeak("NVIDIA H100 PCIe", r"\bH100 PCIe\b", 756, 756, 51, 1513, 378, "NVIDIA H100 data sheet"),
    DevicePeak("NVIDIA H100 SXM", r"\bH100\b", 989, 989, 67, 1979, 494, "NVIDIA H100 data sheet"),
    DevicePeak("NVIDIA H800 SXM", r"\bH800$", 989, 989, 67, 1979, 494, "NVIDIA H800 data sheet"),
    DevicePeak("NVIDIA H20", r"\bH20\b", 148, 148, 44, 296, 74, "NVIDIA H20 data sheet"),
    DevicePeak("NVIDIA A100", r"\bA[18]00\b", 312, 312, 19.5, None, 156, "NVIDIA A100 data sheet"),
    DevicePeak("NVIDIA A30", r"\bA30\b", 165, 165, 10.3, None, 82, "NVIDIA A30 data sheet"),
    DevicePeak("NVIDIA A40", r"\bA40\b", 149.7, 149.7, 37.4, None, 74.8, "NVIDIA A40 data sheet"),
    DevicePeak("NVIDIA A10", r"\bA10\b", 125, 125, 31.2, None, 62.5, "NVIDIA A10 data sheet"),
    DevicePeak(
        "NVIDIA RTX A6000", r"RTX A6000", 154.8, 154.8, 38.7, None, 77.4, "NVIDIA RTX A6000 data sheet"
    ),
    DevicePeak("NVIDIA L40S", r"\bL40S\b", 362, 362, 91.6, 733, 183, "NVIDIA L40S data sheet"),
    DevicePeak("NVIDIA L40", r"\bL40\b", 181, 181, 90.5, 362, 90.5, "NVIDIA L40 data sheet"),
    DevicePeak("NVIDIA L4", r"\bL4\b", 121, 121, 30.3, 242, 60, "NVIDIA L4 data sheet"),
    DevicePeak("NVIDIA V100 PCIe", r"V100.*PCIe", None, 112, 14, None, None, "NVIDIA V100 data sheet"),
    DevicePeak("NVIDIA V100 SXM2", r"V100.*SXM2", None, 125, 15.7, None, None, "NVIDIA V100 data sheet"),
    DevicePeak("NVIDIA T4", r"\bT4\b", None, 65, 8.1, None, None, "NVIDIA T4 data sheet"),
    DevicePeak(
        "NVIDIA RTX 5090",
        r"RTX 5090(?! )",
        209.5,
        209.5,
        104.8,
        419,
        104.8,
        "NVIDIA RTX Blackwell whitepaper",
    ),
    DevicePeak(
        "NVIDIA RTX 4090",
        r"RTX 4090(?! )",
        165.2,
        165.2,
        82.6,
        330.3,
        82.6,
        "NVIDIA Ada GPU architecture whitepaper",
    ),
    DevicePeak(
        "NVIDIA RTX 3090", r"RTX 3090(?! )", 71, 71, 35.6, None, 35.6, "NVIDIA Ampere GA102 whitepaper"
    ),
    DevicePeak("AMD MI355X", r"MI355X", 2516, 2516, 157.3, 5033, None, "AMD Instinct MI355X data sheet"),
    DevicePeak(
        "AMD MI325X", r"MI325X", 1307.4, 1307.4, 163.4, 2614.9, 653.7, "AMD Instinct MI325X data sheet"
    ),
    DevicePeak(
        "AMD MI300X", r"MI300X", 1307.4, 1307.4, 163.4, 2614.9, 653.7, "AMD Instinct MI300X data sheet"
    ),
    DevicePeak("AMD MI300A", r"MI300A", 980.6, 980.6, 122.6, 1961.2, 490.3, "AMD Instinct MI300A data sheet"),
    # torch counts each of the two dies of an MI250 as a device.
    DevicePeak(
        "AMD MI250X, one die", r"MI250X", 191.5, 191.5, 47.9, None, None, "AMD Instinct MI250X data sheet"
    ),
    DevicePeak("TPU v6e", r"TPU v6", 918, None, None, None, None, "Google Cloud TPU v6e documentation"),
    DevicePeak("TPU v5p", r"TPU v5p", 459, None, None, None, None, "Google Cloud TPU v5p documentation"),
    DevicePeak(
        "TPU v5e", r"TPU v5( ?lite|e)", 197, None, None, None, None, "Google Cloud TPU v5e documentation"
    ),
    DevicePeak("TPU v4", r"TPU v4", 275, None, None, None, None, "Google Cloud TPU v4 documentation"),
)


def device_peak(name: str) -> DevicePeak | None:
    """Look up a device by torch's name of it; None if the table has no entry.

    A slice of a device (MIG) has no entry, because it has only a part of the units. Versions for notebooks have none
    either.
    """
    if re.search(r"\bMIG\b|laptop|max-q", name, re.IGNORECASE):
        return None
    return next((peak for peak in DEVICE_PEAKS if re.search(peak.pattern, name, re.IGNORECASE)), None)


def peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOPs per second of a device; None if not known.

    Args:
        name: name of the device, as `torch.cuda.get_device_name` returns it.
        precision: "no" (float32, in TF32 where torch may use that), "bf16", "fp16" or "fp8".
    """
    peak = device_peak(name)
    if peak is None:
        return None
    known: dict[str, float | None] = {"bf16": peak.bf16, "fp16": peak.fp16, "fp8": peak.fp8, "no": peak.fp32}
    if precision == "no" and peak.tf32 is not None and torch.get_float32_matmul_precision() != "highest":
        known["no"] = peak.tf32
    tera = known.get(precision)
    return None if tera is None else tera * 1e12
