"""Inference with a model split into stages, one per process, with ``torch.distributed.pipelining``.

Before a call ranks exchange descriptions of their inputs, so that all use the same program or raise the same error.
Work that can fail outside of the stages, such as moving inputs to the device, is part of that exchange.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from accel_bigmodel.dispatch import is_dispatched
from accel_bigmodel.errors import PipelineError
from accel_bigmodel.pipelines.stages import check_split_points, choose_split_points, generate_device_map
from accel_bigmodel.pipelines.tracing import Inputs, Program, Weights, are_still_those_of, tensors_of
from accel_ckpt.coordination.ranks import default_coordinator, run_together
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.tensors import check_is_module
from accel_state.operations.collectives import broadcast
from accel_state.trees import (
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    recursively_apply,
    send_to_device,
)
from accel_state.world.process import PartialState

__all__ = [
    "Pipeline",
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_KEPT_PROGRAMS = 32


def prepare_pippy(
    model: M,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Collection[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> M:
    """Split a model into pipeline stages, one per process, which work on different micro-batches at once. Collective.

    Afterwards all processes call the model, under ``torch.no_grad()``. The inputs of rank 0 are used; other ranks pass
    nothing, or inputs of the same shapes. A batch of any size is split into ``num_chunks`` micro-batches along the
    first dimension of every tensor whose first dimension is the batch size; other inputs go to all micro-batches.
    Padding that makes micro-batches equal is removed from the output. Each new shape is traced once, and the last 32
    traces are kept.

    Args:
        model: in evaluation mode, the same on every rank; changed in place. These attributes are set on it:
            ``hf_split_points`` (the names), ``pippy_stage`` (the ``Pipeline``; None in a world of one),
            ``_original_forward`` and ``_original_call``.
        split_points: names of the modules that begin the second and later stages; ``"auto"``: stages of about equal
            bytes.
        no_split_module_classes: for ``"auto"``: names of classes whose modules stay whole.
        example_args: inputs of one micro-batch; only shapes and non-tensor values are used.
        example_kwargs: keyword inputs of one micro-batch.
        num_chunks: number of micro-batches; None: the number of processes.
        gather_output: return the output on every rank, not only on the last one (None on the others).

    Returns:
        The model.

    Raises:
        PipelineError: raised on all ranks: the model is in training mode, cannot be traced, or has fewer parts than
            there are processes; a split point is wrong; or ranks have different arguments.
    """
    state = PartialState()
    size = state.num_processes
    chunks = size if num_chunks is None else num_chunks
    auto = split_points == "auto"

    def describe() -> dict[str, str]:
        _check_model(model)
        tensors = tensors_of(model).items()
        return {name: f"{tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in tensors}

    def plan() -> tuple[list[str], int, bool]:
        if not isinstance(chunks, int) or chunks < 1:
            raise PipelineError(f"num_chunks must be a whole number of 1 or more, got {chunks!r}")
        if not isinstance(example_args, tuple | list):
            kind = type(example_args).__name__
            raise PipelineError(f"example_args must be a tuple of inputs, such as (x,), got a {kind}")
        if auto:
            return choose_split_points(model, size, no_split_module_classes), chunks, gather_output
        if not isinstance(split_points, Sequence):
            raise PipelineError(
                f"split_points must be 'auto' or names of modules in order, got {split_points!r}"
            )
        points = [split_points] if isinstance(split_points, str) else list(split_points)
        check_split_points(model, points, size)
        return points, chunks, gather_output

    _require_same_model(_together(describe, "looking at the model"))
    plans = _together(plan, "planning the pipeline")
    _require_same("split points, num_chunks and gather_output", plans)
    points = plans[0][0]
    original_call, original_forward = model.__call__, model.forward
    stage = None
    if size > 1:
        stage = build_pipeline(model, points, tuple(example_args), dict(example_kwargs or {}), chunks)
    step = original_forward if stage is None else stage.step

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return pippy_forward(step, chunks, gather_output, *args, **kwargs)

    # Functions that unwrap a model follow this attribute.
    forward.__wrapped__ = MethodType(forward, model)  # type: ignore[attr-defined]
    attributes = {
        "hf_split_points": points,
        "pippy_stage": stage,
        "_original_call": original_call,
        "_original_forward": original_forward,
        "forward": forward,
    }
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Pipeline:
    """A model split at some points, traced once for each shape of its inputs.

    Args:
        model: the model.
        split_points: names of the modules that begin the second and later stages.
        num_chunks: number of micro-batches.
    """

    def __init__(self, model: nn.Module, split_points: Sequence[str], num_chunks: int) -> None:
        self.split_points = list(split_points)
        self.num_chunks = num_chunks
        self._model = model
        self._forward = model.forward
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._weights: Weights = {}  # of all programs

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch whose size is a multiple of ``num_chunks``. Collective; inputs as for ``prepare_pippy``.

        Returns:
            The output on the last rank, None on the others.

        Raises:
            PipelineError: on all ranks, before anything is computed, or because the stage of another rank failed.
            Exception: on the rank whose stage failed.
        """

        def describe() -> Inputs | None:
            nonlocal args, kwargs
            _check_mode(self._model)
            state = PartialState()
            if state.process_index > 0 and not args and not kwargs:
                return None
            rows = _batch_size(args, kwargs)
            if rows % self.num_chunks:
                raise PipelineError(
                    f"a batch of {rows} rows cannot be split evenly into {self.num_chunks} micro-batches; pad it, as "
                    "pippy_forward does"
                )
            inputs = Inputs.of(args, kwargs, rows, self.num_chunks)
            if state.process_index == 0:  # inside the collective step: a failure is seen by all
                args, kwargs = _map_tensors(lambda tensor: tensor.to(state.device), (args, kwargs))
            return inputs

        program = self._program(describe)
        outputs: list[Any] = []
        _together(lambda: outputs.append(program.run(args, kwargs)), "running the stages of the pipeline")
        return outputs[0]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the model for micro-batches like this one. Collective.

        Raises:
            PipelineError: on all ranks.
        """
        self._program(lambda: Inputs.of(args, kwargs, _batch_size(args, kwargs), 1))

    def _program(self, describe: Callable[[], Inputs | None]) -> Program:
        """The program for the shapes of rank 0's inputs and the autocast mode; the same on every rank."""
        calls = _together(
            lambda: (describe(), _autocast(), self._is_stale()), "looking at the inputs of the pipeline"
        )
        inputs = [each for each, _, _ in calls if each is not None]
        modes = [mode for _, mode, _ in calls]
        _require_same("inputs", inputs, lambda each: each.tree)
        _require_same("modes of autocast", modes)
        if any(stale for *_, stale in calls):
            self._programs.clear()
            self._weights.clear()
        key = f"{modes[0]} {inputs[0].key}"
        if key not in self._programs:
            made: list[Program] = []
            _together(lambda: made.append(self._trace(inputs[0])), "cutting the model into stages")
            self._programs[key] = made[0]  # only when all ranks have one
            self._weights |= made[0].weights
            if len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _is_stale(self) -> bool:
        """Whether the model has other weights than when the programs were made."""
        return not are_still_those_of(self._model, self._weights, PartialState().device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PipelineError(
            "a model that is split into stages is bound to its processes, so it cannot be copied or pickled; copy "
            "the model before prepare_pippy, or save its state_dict()"
        )

    def _trace(self, inputs: Inputs) -> Program:
        state = PartialState()
        return Program(
            self._model,
            self._forward,
            inputs,
            self.split_points,
            self.num_chunks,
            state.process_index,
            state.device,
        )


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int,
) -> Pipeline:
    """Split a model at some points, and trace it for an example micro-batch. Collective.

    Raises:
        PipelineError: on all ranks.
    """
    pipeline = Pipeline(model, split_points, num_chunks)
    pipeline.prepare(tuple(args), kwargs or {})
    return pipeline


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a pipeline on a batch of any size. Collective.

    Args:
        forward: ``Pipeline.step``; in a world of one, any function.
        num_chunks: number of micro-batches; the batch is padded to a multiple of it by repeating its last row.
        gather_output: return the output on every rank.
        *args: inputs of rank 0; other ranks pass nothing, or inputs of the same shapes.
        **kwargs: keyword inputs.

    Returns:
        The output for the given rows, on the last rank or on all.

    Raises:
        PipelineError: on all ranks, see :meth:`Pipeline.step`.
    """
    state = PartialState()
    if state.num_processes == 1:
        return forward(*args, **kwargs)
    needed = state.process_index == 0

    def pad() -> int | None:
        nonlocal args, kwargs
        if not (needed or args or kwargs):
            return None
        rows = _batch_size(args, kwargs)
        args, kwargs = _map_tensors(lambda tensor: _padded(tensor, rows, num_chunks), (args, kwargs))
        return rows

    rows = _together(pad, "padding the batch")[0]
    assert rows is not None
    output = forward(*args, **kwargs)

    def cut() -> None:
        nonlocal output
        output = _map_tensors(lambda tensor: tensor[:rows].clone(), output)

    if rows % num_chunks:
        _together(cut, "cutting the padding from the output")
    return _copied_from_last(output) if gather_output else output


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> int | None:
    """Size of the first dimension of the first tensor that has one, in ``args``, then in ``kwargs``."""
    for value in (*(args or ()), *(kwargs or {}).values()):
        size = ignorant_find_batch_size(value)
        if size is not None:
            return size
    return None


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    size = find_pippy_batch_size(args, kwargs)
    if size is None:
        raise PipelineError(
            "the inputs contain no tensor with a first dimension, so there is no batch to split into micro-batches; "
            "rank 0 must pass the model's inputs, and prepare_pippy needs an example of them (example_args or "
            "example_kwargs)"
        )
    if size == 0:
        raise PipelineError("the batch has no rows; give at least one")
    return size


def _padded(tensor: Tensor, rows: int, num_chunks: int) -> Tensor:
    missing = -rows % num_chunks
    if not missing or tensor.dim() == 0 or tensor.shape[0] != rows:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])


def _copied_from_last(output: Any) -> Any:
    state = PartialState()
    structure = _together(lambda: get_data_structure(output), "describing the output")[-1]

    def make_room() -> None:
        nonlocal output
        if not state.is_last_process:
            output = send_to_device(initialize_tensors(structure), state.device)

    _together(make_room, "making room for the output")
    tensors: list[Tensor] = []
    recursively_apply(tensors.append, output)
    broadcast(tensors, from_process=state.num_processes - 1)
    return output


def _map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """Apply a function to the tensors of a structure, of all kinds that tracing supports."""
    mapped: T = pytree.tree_map_only(Tensor, function, tree)
    return mapped


def _check_model(model: nn.Module) -> None:
    check_is_module(model)
    _check_mode(model)
    if getattr(model, "hf_split_points", None) is not None:
        raise PipelineError(
            f"this {type(model).__name__} is split into stages already; build the model again to split it differently"
        )
    if is_dispatched(model):
        raise PipelineError(
            f"this {type(model).__name__} is dispatched over devices (hf_device_map); a pipeline needs a model in "
            "memory, without a device map"
        )
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise PipelineError(
            f"these weights have no values yet (meta device): {listed(meta)}; load them before splitting the model "
            "into stages"
        )


def _autocast() -> str:
    """The autocast mode on this rank, because a trace is valid for one mode only."""
    device = PartialState().device.type
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "no autocast"


def _require_same_model(models: Sequence[dict[str, str]]) -> None:
    for rank, model in enumerate(models):
        for name in (*models[0], *model):
            here, there = models[0].get(name, "missing"), model.get(name, "missing")
            if here != there:
                raise PipelineError(
                    f"ranks have different models: {name} is {here} on rank 0 and {there} on rank {rank}. Build the "
                    "same model on all ranks"
                )


def _check_mode(model: nn.Module) -> None:
    if model.training:
        raise PipelineError(
            f"this {type(model).__name__} is in training mode; call model.eval() before inference"
        )


def _together(function: Callable[[], T], doing: str) -> list[T]:
    return run_together(function, default_coordinator(), doing=doing, error=PipelineError)


def _require_same(what: str, values: Sequence[T], shown: Callable[[T], Any] = lambda value: value) -> None:
    if any(repr(shown(value)) != repr(shown(values[0])) for value in values):
        lines = "\n".join(f"  rank {rank}: {shown(value)}" for rank, value in enumerate(values))
        raise PipelineError(f"ranks have different {what}:\n{lines}\nUse the same ones on all ranks.")
