"""Support table: which format runs on which device. The guide shows it, and tests check each of its cells."""

from __future__ import annotations

from dataclasses import dataclass

from accel_bigmodel.errors import QuantizationError

__all__ = ["OFFLOADED", "QUANTIZATION_SUPPORT", "QuantizationSupport", "check_support", "support_table"]

OFFLOADED = "offloaded"
"""In place of a device type: weights that are kept on the host or disk and compute on another device."""


@dataclass(frozen=True, slots=True)
class QuantizationSupport:
    """A format on a type of device."""

    format: str
    """Engine and format, as in a configuration's ``format``."""
    device: str
    """``torch.device(…).type``, or ``"offloaded"``."""
    runs: bool
    """Whether it is supported; otherwise it is refused."""
    why: str = ""
    """A condition, or the reason for the refusal and what to do instead."""


_PARKED = (
    "the engine also computes with tensors beside the weight, which are not moved with it; give these modules a "
    "device, or name them in skip_modules, so that they are offloaded unquantised"
)
_ENGINES_WORD = "according to the engine; tested only on machines with such a device"
_TO_CPU = "put the model on the CPU: device_map={'': 'cpu'}"
_NO_KERNELS = f"bitsandbytes has no 8-bit kernels for it; {_TO_CPU}"
_NOT_TRIED = f"torchao is untested there; {_TO_CPU}"


def _rows(format: str, cells: dict[str, tuple[bool, str]]) -> list[QuantizationSupport]:
    all_cells = {**cells, OFFLOADED: (False, _PARKED)}
    return [QuantizationSupport(format, device, *cell) for device, cell in all_cells.items()]


_BNB_INT8 = {
    "cpu": (True, "inputs are rounded to float16"),
    "cuda": (True, "inputs are rounded to float16"),
    "xpu": (True, _ENGINES_WORD),
    "mps": (False, _NO_KERNELS),
}
_BNB_4BIT = {
    "cpu": (True, ""),
    "cuda": (True, ""),
    "xpu": (True, _ENGINES_WORD),
    "mps": (True, _ENGINES_WORD),
}
_AO = {"cpu": (True, ""), "cuda": (True, ""), "xpu": (False, _NOT_TRIED), "mps": (False, _NOT_TRIED)}
_AO_INT4 = {
    **_AO,
    "cpu": (True, "inputs must be a multiple of group_size, outputs of 16"),
    "cuda": (
        True,
        "requires compute capability 8.0 or later, torch_dtype='bf16', and inputs that are a multiple of group_size",
    ),
}

QUANTIZATION_SUPPORT: tuple[QuantizationSupport, ...] = (
    *_rows("bitsandbytes int8", _BNB_INT8),
    *_rows("bitsandbytes fp4", _BNB_4BIT),
    *_rows("bitsandbytes nf4", _BNB_4BIT),
    *_rows("torchao int8", _AO),
    *_rows("torchao int4", _AO_INT4),
    *_rows("torchao float8", _AO),
)
"""Every format on every known type of device; others are refused."""


def check_support(format: str, device: str) -> None:
    """Refuse a format on a device where it is not supported.

    Args:
        format: the ``format`` of a configuration.
        device: a ``torch.device(…).type``, or ``"offloaded"``.

    Raises:
        QuantizationError: names both, the reason, and what to do.
    """
    for cell in QUANTIZATION_SUPPORT:
        if (cell.format, cell.device) == (format, device):
            if not cell.runs:
                raise QuantizationError(f"{format} weights on the device {device!r}: {cell.why}")
            return
    raise QuantizationError(f"{format} weights on the device {device!r}: untested; {_TO_CPU}")


def support_table() -> str:
    """Write the table in Markdown: a row per format, a column per device, then the conditions and reasons as notes."""
    devices = list(dict.fromkeys(cell.device for cell in QUANTIZATION_SUPPORT))
    cells = {(cell.format, cell.device): cell for cell in QUANTIZATION_SUPPORT}
    notes = list(dict.fromkeys(cell.why for cell in QUANTIZATION_SUPPORT if cell.why))
    lines = [f"| | {' | '.join(devices)} |", "|---|" + "---|" * len(devices)]
    for format in dict.fromkeys(cell.format for cell in QUANTIZATION_SUPPORT):
        row = (cells[format, device] for device in devices)
        marks = (f" ({notes.index(cell.why) + 1})" if cell.why else "" for cell in row)
        texts = ("runs" if cells[format, device].runs else "refused" for device in devices)
        lines.append(f"| {format} | {' | '.join(map(str.__add__, texts, marks))} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"
