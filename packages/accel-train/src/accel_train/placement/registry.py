"""Placements by name; outside packages add theirs through the entry-point group `accel_train.placement`."""

from __future__ import annotations

from accel_train.placement.base import Placement
from accel_train.setup.registry import Registry

__all__ = ["PLACEMENTS"]

PLACEMENTS: Registry[type[Placement]] = Registry(
    "placement",
    "accel_train.placement",
    {
        "as_is": "accel_train.placement.base:Placement",
        "device": "accel_train.placement.single_device:SingleDevicePlacement",
    },
)
