"""What the stages of other ranks would pass on, in a rehearsal, where these ranks do not exist."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from accel_state.world.rehearsal import Rehearsal
from accel_train.strategies.pipeline.cut import Cut
from accel_train.strategies.pipeline.exchange import Form
from accel_train.strategies.pipeline.schedules import MicroBatch, StageLayout, run_forward
from accel_train.strategies.pipeline.stages import make_stages

__all__ = ["Foreseen", "Foresight", "made_up"]

_VALUE = 0.02
"""As small as a weight, so that what is computed from it stays finite."""


@dataclass(frozen=True)
class Foreseen:
    """What the stages pass on for one micro-batch.

    Attributes:
        forms: of what each stage receives.
        output: what the last stage returns.
    """

    forms: dict[int, list[Form]]
    output: Any


class Foresight:
    """Runs all stages of a model whose weights have shapes and no memory, so that a rank knows what it would receive.

    Args:
        model: the whole model, before it is divided; not changed.
        cut: how it is cut.
        loss_function: see `PipelineParallelConfig`.
        convert: lets a module compute in the precision of the training.
        rehearsal: of this process.
        policies: the dtypes in which FSDP computes, of stages and of the units inside them; None: it does not.
        gathered: names of the units of FSDP.
        whole: parameters that FSDP does not gather.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        loss_function: Callable[..., Any] | None,
        convert: Callable[[nn.Module], object],
        rehearsal: Rehearsal,
        policies: tuple[MixedPrecisionPolicy, MixedPrecisionPolicy] | None,
        gathered: Sequence[str] = (),
        whole: Collection[nn.Parameter] = (),
    ) -> None:
        dtype = None if policies is None else policies[0].param_dtype
        light = _without_memory(model, dtype, whole).eval()
        units = [light.get_submodule(name) for name in gathered]
        self._stages = make_stages(light, cut, range(len(cut.stages)), loss_function, None)
        self._rehearsal = rehearsal
        for stage in self._stages:
            convert(stage.module)
        if policies is not None:
            for stage in self._stages:
                _cast(stage, policies[0])
            for unit in units:
                _cast(unit, policies[1])

    def of(self, micro_batch: MicroBatch) -> Foreseen:
        """Run a micro-batch through all stages.

        Another thread runs it: the rehearsal counts the tensors of this one, and no rank has those of all stages.
        """
        with self._rehearsal.aside(), ThreadPoolExecutor(1) as thread:
            return thread.submit(contextvars.copy_context().run, self._run, micro_batch).result()

    def _run(self, micro_batch: MicroBatch) -> Foreseen:
        forms: dict[int, list[Form]] = {}
        everything = StageLayout(1, len(self._stages))
        exchange: Any = None  # one rank holds all stages, and sends nothing
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found = run_forward(self._stages, everything, 0, exchange, [micro_batch], forms, trains=False)
        [output] = found.outputs
        return Foreseen(forms, output)


def made_up(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same forms, whose values mean nothing."""
    return [torch.full_like(tensor, _VALUE if tensor.is_floating_point() else 0) for tensor in tensors]


def _without_memory(
    model: nn.Module, dtype: torch.dtype | None, whole: Collection[nn.Parameter]
) -> nn.Module:
    """A copy whose parameters, and buffers on the meta device, are one value that is repeated.

    On the meta device the model could not run where its forward reads values of the batch, such as masks.
    """
    kept = {id(parameter) for parameter in whole}
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        floating = parameter.is_floating_point()
        data = _repeated(parameter, dtype if floating and id(parameter) not in kept else None)
        copies[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for buffer in model.buffers():
        copies[id(buffer)] = _repeated(buffer) if buffer.is_meta else buffer
    copied: nn.Module = copy.deepcopy(model, copies)
    return copied


def _repeated(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    value = torch.tensor(_VALUE).to(dtype or tensor.dtype)
    found = value.expand(part.shape)
    if not isinstance(tensor, DTensor):
        return found
    return DTensor.from_local(
        found,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _cast(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast what a module receives and returns, as FSDP does."""

    def received(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return _in(policy.param_dtype, (inputs, named)) if policy.cast_forward_inputs else None

    def returned(_: nn.Module, inputs: Any, output: Any) -> Any:
        return _in(policy.output_dtype, output)

    module.register_forward_pre_hook(received, with_kwargs=True)
    module.register_forward_hook(returned)


def _in(dtype: torch.dtype | None, values: Any) -> Any:
    if dtype is None:
        return values
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )
