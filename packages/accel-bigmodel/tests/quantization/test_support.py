from __future__ import annotations

from pathlib import Path

import pytest

from accel_bigmodel import QUANTIZATION_SUPPORT, QuantizationError
from accel_bigmodel.quantization.support import check_support, support_table

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "quantization.md"


@pytest.mark.parametrize("cell", QUANTIZATION_SUPPORT, ids=lambda cell: f"{cell.format} on {cell.device}")
def test_what_is_refused_says_why_and_what_to_do(cell):
    if cell.runs:
        check_support(cell.format, cell.device)
        return
    with pytest.raises(QuantizationError) as caught:
        check_support(cell.format, cell.device)
    for part in (cell.format, cell.device, cell.why):
        assert part in str(caught.value)
    assert any(remedy in cell.why for remedy in ("put the model on", "skip_modules"))


def test_an_unknown_device_is_refused():
    with pytest.raises(
        QuantizationError,
        match="torchao int8 weights on the device 'npu': untested; put the model on the CPU",
    ):
        check_support("torchao int8", "npu")


def test_every_format_has_a_cell_for_every_device():
    formats = {cell.format for cell in QUANTIZATION_SUPPORT}
    devices = {cell.device for cell in QUANTIZATION_SUPPORT}
    assert len({(cell.format, cell.device) for cell in QUANTIZATION_SUPPORT}) == len(QUANTIZATION_SUPPORT)
    assert len(QUANTIZATION_SUPPORT) == len(formats) * len(devices)


def test_the_guide_shows_the_table():
    assert support_table() in GUIDE.read_text(encoding="utf-8")
