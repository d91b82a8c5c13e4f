"""A name that a script of Accelerate imports and accel-train does not have is found where the error says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import import_table

ROOT = Path(__file__).parents[2]


def test_every_name_of_accelerate_is_here_or_its_place_is_told():
    exported = import_table.exports(ROOT)
    known = {row.name for row in import_table.load_rows(ROOT / "tools/data/accelerate_api.tsv")}
    elsewhere = sorted(known & exported["accel-bigmodel"] - exported["accel-train"])
    assert len(elsewhere) > 40
    top = importlib.import_module("accel_train")
    for name in elsewhere:
        with pytest.raises(AttributeError, match=re.escape(f"from accel_bigmodel import {name}")):
            getattr(top, name)
        assert hasattr(importlib.import_module("accel_bigmodel"), name)
