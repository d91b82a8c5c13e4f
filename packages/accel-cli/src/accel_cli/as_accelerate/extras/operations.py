"""Names of ``accelerate.utils.operations``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_state import (
    DistributedOperationException,
    DistributedType,
    PartialState,
    gather_object,
    get_shape,
)
from accel_train.loop.state import AcceleratorState

_Function = TypeVar("_Function", bound=Callable[..., Any])

TENSOR_TYPE_TO_INT = {
    dtype: number
    for number, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.bool,
        ),
        start=1,
    )
}
"""Numbers of dtypes, in messages between ranks."""

TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}
"""The inverse of ``TENSOR_TYPE_TO_INT``."""


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """Shape and number of the dtype of a tensor that one rank has. Collective.

    Args:
        tensor: the tensor; None on all other ranks.

    Raises:
        DistributedOperationException: no rank has one, or several.
    """
    facts = [] if tensor is None else [(list(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])]
    found = gather_object(facts)
    if len(found) != 1:
        raise DistributedOperationException(
            f"gather_tensor_shape() needs a tensor on one rank and None on the others; {len(found)} ranks have one."
        )
    shape, number = found[0]
    return torch.tensor(shape, dtype=torch.int, device=PartialState().device), number


def verify_operation(function: _Function) -> _Function:
    """Decorate a collective so that under ``ACCELERATE_DEBUG_MODE`` it checks first that shapes are equal.

    The operations of this library check that in any mode.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.distributed_type is not DistributedType.NO and state.debug:
            shapes = gather_object([get_shape(kwargs["tensor"] if "tensor" in kwargs else args[0])])
            if any(shape != shapes[0] for shape in shapes):
                each = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
                raise DistributedOperationException(
                    f"{function.__module__}.{function.__name__}() was called with tensors of different shapes: {each}"
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def chained_operation(function: _Function) -> _Function:
    """Decorate a function so that an error of a collective inside it names the function."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"while calling {name}(): {error}") from error

    return named  # type: ignore[return-value]


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802
    params: Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather the parameters that DeepSpeed's ZeRO-3 divides, inside a block; elsewhere do nothing.

    Args:
        params: the parameters.
        modifier_rank: the rank whose changes all ranks get; None: changes are lost.
        fwd_module: as for ``deepspeed.zero.GatheredParameters``.
        enabled: False: nothing is done.
    """
    state = AcceleratorState()
    plugin = state.deepspeed_plugin if state.distributed_type is DistributedType.DEEPSPEED else None
    if plugin is None or plugin.zero_stage != 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module, enabled):
        yield
