"""Slots of device memory."""

import torch

from accel_bigmodel.streaming.slot_layout import SlotLayout
from accel_bigmodel.streaming.types import Slot


def test_views_are_made_once():
    layout = SlotLayout([torch.zeros(2)])
    slot = Slot(torch.empty(512, dtype=torch.uint8), None)
    assert slot.views(layout) is slot.views(layout)
