"""Finding 4-bit layers without importing bitsandbytes."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from accel_bigmodel import has_4bit_bnb_layers


class Linear4bit(nn.Linear):
    pass


@pytest.mark.parametrize("imported", [True, False])
def test_layers_are_found_if_bitsandbytes_is_imported(monkeypatch, imported):
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    if imported:
        monkeypatch.setitem(
            sys.modules, "bitsandbytes", SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit))
        )
    assert has_4bit_bnb_layers(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Linear4bit(2, 2)))) is imported
    assert not has_4bit_bnb_layers(nn.Sequential(nn.Linear(2, 2)))
