"""Where each public name of Accelerate is found here."""

from __future__ import annotations

import functools
import importlib

__all__ = ["SUBMODULES", "home_of"]

_PACKAGES = ("accel_train", "accel_bigmodel", "accel_ckpt", "accel_state", "accel_cli")
"""In this order: training scripts import from accel_train, which has most of them."""

# Two packages have a version of the first name; this is the one with Accelerate's arguments. Of the second only
# Accelerate knows the value.
_TAKEN = {"load_checkpoint_in_model": "accel_bigmodel", "__version__": "accelerate"}

SUBMODULES = frozenset(
    {
        "accelerator", "big_modeling", "checkpointing", "commands", "data_loader", "hooks", "inference", "launchers",
        "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "test_utils",
        "tracking", "utils",
    }
)  # fmt: skip
"""Modules of Accelerate 1.15 that scripts import."""


@functools.cache
def _exported(package: str) -> frozenset[str]:
    return frozenset(importlib.import_module(package).__all__)


def home_of(name: str) -> str | None:
    """The package to import ``name`` from; None if this version has no such name.

    The packages' own lists are asked, which are lazy: nothing heavy is imported.
    """
    if name in _TAKEN:
        return _TAKEN[name]
    return next((package for package in _PACKAGES if name in _exported(package)), None)
