"""Releasing memory, and finding a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch

from accel_state.errors import ConfigError, NoExecutableBatchSizeError
from accel_state.host.devices import empty_cache

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

P = ParamSpec("P")
R = TypeVar("R")
Backoff = Callable[[], int] | Callable[[int], int]

# Out-of-memory messages of PyTorch's allocators and cuDNN.
_OUT_OF_MEMORY = (
    " out of memory.",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
    "MPS backend out of memory",
)
_SHRINK = 0.9


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached accelerator memory; optionally run the garbage collector first."""
    if garbage_collection:
        gc.collect()
    empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release the memory of objects; the caller must rebind its variables to the result.

    Returns:
        One None per object: ``a, b = release_memory(a, b)``. The memory is free once no other reference to the
        objects remains. Until the assignment the caller's variables are such references, so the memory is then kept
        by PyTorch's allocator, for later tensors; ``clear_device_cache()`` gives it back to the device.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether ``exception`` is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(phrase in str(exception.args[0]) for phrase in _OUT_OF_MEMORY)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Backoff | None = None,
) -> Callable[P, R]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Backoff | None = None,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Backoff | None = None,
) -> Any:
    """Decorate ``function(batch_size, …)`` to retry with a smaller batch size when it runs out of memory.

    Later calls start with the size that worked. Each process decides independently: in a distributed run the other
    processes are not informed.

    Args:
        function: takes the batch size as its first argument; callers omit it. None: return a decorator.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size to try; takes the size that failed, or no argument. By
            default nine tenths, rounded down.

    Raises:
        NoExecutableBatchSizeError: (on call) no size above zero worked.
        TypeError: (on call) a batch size was passed.
        ConfigError: (on call) ``reduce_batch_size_fn`` did not return a smaller integer.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    run = function
    parameters = inspect.signature(run).parameters
    reduce = _with_size(reduce_batch_size_fn)
    batch_size = starting_batch_size

    @functools.wraps(run)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        if _passes_batch_size(parameters, args, kwargs):
            names = list(parameters)
            rest = ", ".join([*(f"{n}={a!r}" for n, a in zip(names[1:], args[1:], strict=False))])
            raise TypeError(
                f"{run.__name__}() gets its batch size from find_executable_batch_size; omit it from the call: "
                f"{run.__name__}({rest})"
            )
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return run(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside the except block, where the traceback would keep the tensors of its frames alive.
            clear_device_cache(garbage_collection=True)
            batch_size = _checked(reduce(batch_size), batch_size)
        raise NoExecutableBatchSizeError("No executable batch size found, reached zero.")

    return decorated


def _with_size(reduce: Backoff | None) -> Callable[[int], int]:
    if reduce is None:
        return lambda size: int(size * _SHRINK)
    try:
        inspect.signature(reduce).bind(1)
    except TypeError:
        return lambda _size: reduce()  # type: ignore[call-arg]
    return reduce  # type: ignore[return-value]


def _checked(new: int, old: int) -> int:
    if isinstance(new, bool) or not isinstance(new, int) or new >= old:
        raise ConfigError(
            f"reduce_batch_size_fn returned {new!r} after {old} ran out of memory; it must return an integer "
            f"below {old}"
        )
    return new


def _passes_batch_size(parameters: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call passes a value for the first parameter, or one positional argument too many."""
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and positional[0].name in kwargs:
        return True
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return not takes_any and len(args) + 1 > len(positional)
