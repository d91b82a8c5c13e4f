"""Recipes, with the fields of version 2.0."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    """Formats, with the largest numbers in forward and backward."""

    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Scaling factors from the magnitudes of earlier steps."""

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    override_linear_precision: Any = (False, False, False)
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."


@dataclass
class MXFP8BlockScaling:
    """One scaling factor per block of 32 values."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."
