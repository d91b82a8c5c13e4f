"""Options of prepared data loaders."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from accel_train.errors import ArgumentTypeError

__all__ = ["DataLoaderConfiguration"]


@dataclass
class DataLoaderConfiguration:
    """Options of prepared data loaders; `accelerator.dataloader_config` may change between two calls of `prepare`.

    Attributes:
        split_batches: the loader's batch size is the global one, divided among ranks; else each rank's own.
        dispatch_batches: rank 0 reads and sends each rank its part; None: only for iterable datasets on a device.
        even_batches: repeat samples at the end, so that every rank gets the same number of batches.
        use_seedable_sampler: the order depends on `data_seed` and the epoch alone.
        data_seed: seed of the seedable sampler; None: torch's initial seed.
        non_blocking: copy batches to the device asynchronously; requires pinned memory.
        use_stateful_dataloader: loaders save and restore their position inside an epoch.
        pre_sharded: the dataset already gives each rank its own part; None: detect it.

    Raises:
        ArgumentTypeError: a value, passed or assigned later, has another type than its option.
        AttributeError: an assigned option does not exist.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    pre_sharded: bool | None = None

    def __setattr__(self, name: str, value: object) -> None:
        options = {option.name: option for option in fields(self)}
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"DataLoaderConfiguration has no option {name!r}.{hint}")
        may_be_none = options[name].default is None
        wanted: type = int if name == "data_seed" else bool
        if not isinstance(value, wanted) and not (may_be_none and value is None):
            raise ArgumentTypeError(
                f"DataLoaderConfiguration({name}={value!r}) must be {wanted.__name__}"
                f"{' or None' if may_be_none else ''}, not {type(value).__name__}. Give one of those."
            )
        object.__setattr__(self, name, value)
