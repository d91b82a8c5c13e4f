"""XLA devices (TPUs), through torch_xla: the one module of this package that imports it.

It has the functions by which `torch.cuda` and its like read and write random states, because PyTorch has no such module
for XLA.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_state.environment import provide
from accel_state.errors import DeviceError, NotAvailableError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig

__all__ = [
    "get_rng_state",
    "is_installed",
    "is_selected",
    "manual_seed",
    "seed_as_torch",
    "set_rng_state",
    "xla_device",
]

REQUIREMENT = "torch_xla[tpu]>=2.9"


def is_selected(environ: Mapping[str, str], launched: LaunchConfig) -> bool:
    """Whether this process computes on XLA devices.

    Asking torch_xla would start its runtime, or choose a device for a process that wants none. So the launcher decides
    (``--tpu``), or PJRT_DEVICE, from which torch_xla itself reads its device; USE_TORCH_XLA=0 overrides the latter.
    """
    if launched.use_tpu:
        return True
    disabled = environ.get("USE_TORCH_XLA", "").strip().lower() in ("0", "false", "no", "n", "off", "f")
    return bool(environ.get("PJRT_DEVICE")) and not disabled


def is_installed() -> bool:
    """Whether torch_xla can be found; it is not imported."""
    return importlib.util.find_spec("torch_xla") is not None


def xla_device(local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """The XLA device of this process; its runtime starts when the first tensor gets there.

    Processes of one machine get a TPU chip each, by the variables from which libtpu learns it; those that are set stay.
    Other devices ignore them.

    Args:
        local_rank: index of this process on its machine.
        local_world_size: processes on its machine.

    Raises:
        NotAvailableError: torch_xla is not installed.
        DeviceError: torch_xla cannot be imported, for example because it was built for another version of torch.
    """
    if not is_installed():
        raise NotAvailableError(
            "XLA devices are selected (--tpu, or PJRT_DEVICE is set), but torch_xla is not installed. Install it: pip "
            f"install '{REQUIREMENT}', of the same version as torch; or unset PJRT_DEVICE to compute without it."
        )
    if local_world_size > 1:
        one = "1,1,1"
        provide(TPU_VISIBLE_CHIPS=local_rank, TPU_CHIPS_PER_PROCESS_BOUNDS=one, TPU_PROCESS_BOUNDS=one)
    try:
        importlib.import_module("torch_xla")
    except ImportError as error:
        raise DeviceError(
            f"torch_xla cannot be imported with torch {torch.__version__}: {error}. Install the version of torch_xla "
            "for this version of torch."
        ) from error
    return torch.device("xla", 0)  # each process has one; in SPMD mode it stands for all of them


def _model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def get_rng_state(device: torch.device | None = None) -> torch.Tensor:
    """The state of the device's generator, one 64-bit number, as eight bytes."""
    state: int = _model().get_rng_state()
    return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")


def set_rng_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Restore a state that `get_rng_state` returned."""
    _model().set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))


def manual_seed(seed: int) -> None:
    """Seed the device's generator, which `torch.manual_seed` leaves as it is."""
    _model().set_rng_state(seed)


@functools.cache
def seed_as_torch() -> None:
    """Seed the device's generator as torch's was seeded, once in a process: scripts seed before there is a device."""
    manual_seed(torch.initial_seed() % 2**64)
