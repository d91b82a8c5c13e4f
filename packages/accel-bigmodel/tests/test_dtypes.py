from __future__ import annotations

from torch import nn

from accel_bigmodel import CustomDtype, compute_module_sizes, dtype_byte_size, infer_auto_device_map


def test_sizes():
    assert [dtype_byte_size(kind) for kind in CustomDtype] == [1, 0.5, 0.25]
    assert CustomDtype("int4") is CustomDtype.INT4


def test_maps_of_quantised_weights():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))  # 256 bytes each
    assert compute_module_sizes(model, dtype=CustomDtype.INT4)[""] == 64
    assert infer_auto_device_map(model, {0: 64}, dtype=CustomDtype.INT4) == {"": 0}
    special = {"1.weight": CustomDtype.INT2}
    assert infer_auto_device_map(model, {0: 300, "cpu": 100}, special_dtypes=special) == {"": 0}
