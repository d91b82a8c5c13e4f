"""Passing tensors between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.communication.torch_collectives import hold_outside_python
from accel_train.errors import PrepareError

__all__ = ["Exchange", "Form"]

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_MOST_TENSORS, _MOST_DIMENSIONS = 8, 8
_HEADER = 1 + _MOST_TENSORS * (2 + _MOST_DIMENSIONS)


class Form(NamedTuple):
    """Shape and dtype of a tensor that another rank sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


_HEADER_FORM = Form((_HEADER,), torch.int64)


class Exchange:
    """Sends tensors from rank to rank of one pipeline; ranks are counted within it.

    Args:
        group: the ranks of the pipeline, in order.
        device: on which they compute.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._calls: Any = None
        self._nothing = torch.zeros(1)
        self._owner = hold_outside_python(self._nothing)

    def begin(self) -> Any:
        """Begin a call on all ranks; the returned work is to be waited for at its end.

        A rank that waits for a message is in no collective. It is in this one, so ranks see if another never begins.
        None beside devices that gloo does not know: no group of it can be made there.
        """
        if self._device.type not in dist.Backend.backend_capability[dist.Backend.GLOO]:
            return None
        if self._calls is None:  # of its own, because messages count as collectives of a group
            self._calls = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
        return dist.all_reduce(self._nothing, group=self._calls, async_op=True)

    def send(self, tensors: Sequence[Tensor], to: int, *, described: bool) -> list[Any]:
        """Begin to send tensors.

        Args:
            tensors: what is sent; it must not change before the returned works are waited for.
            to: the rank.
            described: send their forms first, because the other rank does not know them.

        Returns:
            Works, to be waited for.
        """
        messages = [
            *([self._header(tensors)] if described else []),
            *(t.detach().contiguous() for t in tensors),
        ]
        works = [dist.isend(message, self._ranks[to], group=self._group) for message in messages]
        return [(work, message) for work, message in zip(works, messages, strict=True)]

    def receive(self, source: int, forms: Sequence[Form] | None) -> list[Tensor]:
        """Receive tensors.

        Args:
            source: the rank.
            forms: of the tensors; None: the other rank describes them.
        """
        if forms is None:
            [header] = self._memory([_HEADER_FORM])
            dist.recv(header, self._ranks[source], group=self._group)
            forms = _forms(header)
        found = self._memory(forms)
        for tensor in found:
            dist.recv(tensor, self._ranks[source], group=self._group)
        return found

    def share(self, tensors: Sequence[Tensor] | None, source: int) -> list[Tensor]:
        """Give all ranks of the pipeline the tensors of one of them. Collective.

        Args:
            tensors: on the source; None elsewhere.
            source: the rank that has them.
        """
        [header] = self._memory([_HEADER_FORM]) if tensors is None else [self._header(tensors)]
        root = self._ranks[source]
        dist.broadcast(header, root, group=self._group)
        if tensors is None:
            found = self._memory(_forms(header))
        else:
            found = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in found:
            dist.broadcast(tensor, root, group=self._group)
        return found

    def _memory(self, forms: Sequence[Form]) -> list[Tensor]:
        return [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]

    def _header(self, tensors: Sequence[Tensor]) -> Tensor:
        values = [len(tensors)]
        if len(tensors) > _MOST_TENSORS:
            raise PrepareError(
                f"{len(tensors)} tensors pass from a stage of a pipeline to the next one, and {_MOST_TENSORS} is the "
                "most. Cut the model elsewhere (PipelineParallelConfig(cuts=[…]))."
            )
        for tensor in tensors:
            if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
                raise PrepareError(
                    f"A tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot pass from a stage of a pipeline "
                    "to the next one. Cut the model elsewhere (PipelineParallelConfig(cuts=[…]))."
                )
            sizes = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
            values += [_DTYPES.index(tensor.dtype), tensor.dim(), *sizes]
        values += [0] * (_HEADER - len(values))
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def wait(works: Sequence[tuple[Any, Tensor]]) -> None:
    """Wait for what `Exchange.send` returned."""
    for work, _ in works:
        work.wait()


def _forms(header: Tensor) -> list[Form]:
    values = header.tolist()
    forms = []
    for place in range(values[0]):
        start = 1 + place * (2 + _MOST_DIMENSIONS)
        dtype, dimensions, *sizes = values[start : start + 2 + _MOST_DIMENSIONS]
        forms.append(Form(tuple(sizes[:dimensions]), _DTYPES[dtype]))
    return forms
