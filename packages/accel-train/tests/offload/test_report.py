"""What was freed, in words and numbers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from accel_train import OffloadReport


def test_bytes_are_summed_by_kind_and_device():
    first = SimpleNamespace(
        freed={("parameters", "npu:0"): 3 << 20, ("gradients", "npu:0"): 5}, kept=Counter()
    )
    second = SimpleNamespace(freed={("parameters", "npu:1"): 1 << 20}, kept=Counter({"a reason": 7}))
    report = OffloadReport.of([first, second])
    assert report.by_kind == {"parameters": 4 << 20, "gradients": 5}
    assert report.by_device == {"npu:0": (3 << 20) + 5, "npu:1": 1 << 20}
    assert report.total == (4 << 20) + 5
    assert str(report) == (
        "freed 4.0 MiB on npu:0, npu:1 (parameters 4.0 MiB, gradients 5 bytes); 7 bytes stay: a reason"
    )


def test_nothing_is_said_so():
    assert str(OffloadReport.of([])) == "freed nothing: all states are in host memory"
