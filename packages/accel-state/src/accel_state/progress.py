"""A progress bar per node instead of one per process."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from accel_state.errors import ConfigError
from accel_state.world.process import PartialState

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown by the first process of each node only.

    Args:
        *args: arguments of ``tqdm``, usually an iterable.
        main_process_only: hide the bar on the other processes.
        **kwargs: keyword arguments of ``tqdm``; ``disable=True`` hides the bar on all processes.

    Raises:
        ConfigError: the first argument is a bool, which was ``main_process_only`` in old scripts.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, …): pass main_process_only={args[0]} by name; the first argument is the "
            "iterable"
        )
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return _tqdm(*args, **kwargs)
