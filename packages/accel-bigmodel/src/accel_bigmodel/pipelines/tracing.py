"""A model as a chain of stages, traced for inputs of one shape.

torch.distributed.pipelining splits a traced graph. ``_Flat``, a module around the model, is what is traced, and adds
what pipelining lacks:

- its inputs and outputs are flat lists of tensors, so that any tree of inputs and outputs works;
- the first stage passes on an alias of each input, because a later stage can only receive results of a stage;
- the last stage makes an alias of each output, because results of an earlier stage are otherwise not returned.

Two more corrections are made to the stages: they send contiguous tensors, and they receive in the order in which others
send, because between two ranks only the order tells tensors apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from accel_bigmodel.errors import PipelineError
from accel_state.log import get_logger

__all__ = ["Inputs", "Program", "Weights", "are_still_those_of", "tensors_of"]

_logger = get_logger(__name__)
_Output = tuple[list[tuple[Any, Any]], pytree.TreeSpec]
_LOST = "fake tensor in the exported program"  # in the message of torch.export
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class _Shape:
    """A tensor without its values. If ``cut``, the first dimension is the batch, and ``shape`` a micro-batch's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: bool


@dataclass(frozen=True)
class Inputs:
    """The shapes and constants of a call, on which ranks must agree and for which a trace is made.

    Attributes:
        tree: ``(args, kwargs)`` with shapes in place of the tensors; can be sent to other ranks.
    """

    tree: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, num_chunks: int) -> Inputs:
        """Describe inputs whose batch of ``rows`` rows is split into ``num_chunks`` micro-batches.

        Raises:
            PipelineError: an input is neither a dense tensor nor a plain value.
        """
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        described: list[Any] = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.layout is not torch.strided or leaf.is_nested:
                    raise PipelineError(
                        f"the input{_at(path)} is {'nested' if leaf.is_nested else 'sparse'}, which cannot be split "
                        "into micro-batches: give a dense tensor"
                    )
                cut = leaf.dim() > 0 and leaf.shape[0] == rows
                shape = (rows // num_chunks, *leaf.shape[1:]) if cut else tuple(leaf.shape)
                described.append(_Shape(tuple(shape), leaf.dtype, cut))
            elif isinstance(leaf, _PLAIN):
                described.append(leaf)
            else:
                hint = _hint(leaf, "give tensors, plain numbers and strings, and trees of them")
                raise PipelineError(
                    f"the input{_at(path)} is of type {type(leaf).__name__}, which cannot be split into "
                    f"micro-batches: {hint}"
                )
        return cls(pytree.tree_unflatten(described, spec))

    @property
    def key(self) -> str:
        """Text that is equal for equal shapes and constants, including types: ``1`` is not ``True``."""
        return repr(self.tree)

    def flatten(self) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves and the structure."""
        return pytree.tree_flatten(self.tree)


def _at(path: Any) -> str:
    return f" {pytree.keystr(path)}" if path else ""


def _hint(leaf: Any, otherwise: str) -> str:
    if is_dataclass(leaf):
        return f"register it with torch.export.register_dataclass({type(leaf).__name__})"
    return otherwise


class _Flat(nn.Module):
    """A model as a function of flat tensors.

    Args:
        model: the model.
        inputs: the shapes and constants of its inputs.
        record: called with the paths, leaves and structure of the output, because torch reverts all changes that
            tracing makes to a module.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, record: Callable[[_Output], None]) -> None:
        super().__init__()
        self.model = model
        self._leaves, self._spec = inputs.flatten()
        self._record = record

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter([torch.ops.aten.alias.default(tensor) for tensor in tensors])
        leaves = [next(given) if isinstance(leaf, _Shape) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # Calls forward, not the model: the model's own PyTorch hooks run around the pipeline, on the whole batch.
        found, spec = pytree.tree_flatten_with_path(self.model.forward(*args, **kwargs))
        for path, leaf in found:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                hint = (
                    "pass use_cache=False"
                    if "Cache" in type(leaf).__name__
                    else _hint(leaf, "return tensors")
                )
                raise PipelineError(
                    f"the output{_at(path)} of {type(self.model).__name__} is of type {type(leaf).__name__}, which "
                    f"cannot be merged from micro-batches: {hint}"
                )
        self._record((found, spec))
        return tuple(torch.ops.aten.alias.default(leaf) for _, leaf in found if isinstance(leaf, Tensor))


class _Schedule(ScheduleGPipe):
    """Returns micro-batches unmerged, because torch's own merge fails for outputs without dimensions."""

    def _merge_outputs(self, output_chunks: list[Any]) -> list[Any]:
        return list(output_chunks)


class Program:
    """The stages of a model for inputs of one shape; this rank runs one of them.

    Args:
        model: completely in memory on every rank; not changed.
        forward: the model's own forward.
        inputs: the shapes and constants of a call.
        split_points: names of the modules that begin the second and later stages.
        num_chunks: number of micro-batches.
        stage: number of the stage that this rank runs.
        device: where it runs.

    Attributes:
        weights: the model's tensors that this rank's stage uses, for :func:`are_still_those_of`.

    Raises:
        PipelineError: the model cannot be traced, the number of stages is not one more than that of split points, or an
            output cannot be merged from micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        inputs: Inputs,
        split_points: Sequence[str],
        num_chunks: int,
        stage: int,
        device: torch.device,
    ) -> None:
        leaves, _ = inputs.flatten()
        shapes = [leaf for leaf in leaves if isinstance(leaf, _Shape)]
        outputs: list[_Output] = []
        flat = _Flat(model, inputs, outputs.append)
        pipe = _trace(flat, forward, shapes, split_points)
        if pipe.num_stages != len(split_points) + 1:
            raise PipelineError(
                f"the split points {list(split_points)} split {type(model).__name__} into {pipe.num_stages} stages "
                f"instead of {len(split_points) + 1}: each must be a module that a call with these inputs runs "
                "exactly once, by calling the module, after the ones before it"
            )
        found, self._spec = outputs[-1]
        self._leaves = [leaf for _, leaf in found]
        _check_outputs(found, shapes, num_chunks)
        self._used = [int(node.name.rpartition("_")[2]) for node in _first_stage(pipe).args]  # type: ignore[union-attr]
        self._order = _order_of_outputs(pipe)
        module = pipe.get_stage_module(stage)
        self.weights = _share_weights(module, model, device)
        _exchange_contiguous_tensors(module)
        _receive_in_the_order_of_sending(pipe, stage)
        self._failure: Exception | None = None
        self._go_on_after_failure(module, device)
        self._stage = pipe.build_stage(stage, device)
        # Inputs that are not split go to every micro-batch unchanged. torch's annotation does not include that type.
        specs: Any = tuple(
            TensorChunkSpec.from_tuple((0,))[0] if shapes[index].cut else _Replicate() for index in self._used
        )
        self._schedule = _Schedule(
            self._stage, num_chunks, args_chunk_spec=specs if self._stage.is_first else None
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this rank's stage for every micro-batch. Collective.

        Args:
            args: the model's inputs, on its device; of rank 0 only.
            kwargs: its keyword inputs; of rank 0 only.

        Returns:
            the model's output on the last rank, None on the others.

        Raises:
            Exception: this rank's stage failed; it sent zeros instead, so that no other rank waits for it.
        """
        self._failure = None
        tensors: list[Tensor] = []
        if self._stage.is_first:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            tensors = [given[index] for index in self._used]
        with torch.no_grad():
            chunks = self._schedule.step(*tensors)
            self._stage.clear_runtime_states()  # otherwise activations are kept until the next call
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            return self._merged(chunks) if self._stage.is_last else None

    def _go_on_after_failure(self, module: nn.Module, device: torch.device) -> None:
        """Make a failed stage take part until the end of the call, because the next stage waits for its output."""
        assert isinstance(module, fx.GraphModule)
        forward, (output,) = module.forward, module.graph.output_node().args

        def zeros(node: fx.Node) -> Any:
            like = node.meta["val"]
            return torch.zeros(like.shape, dtype=like.dtype, device=device)

        def guarded(*tensors: Tensor) -> Any:
            if self._failure is None:
                try:
                    return forward(*tensors)
                except Exception as error:  # raised at the end of the call
                    self._failure = error
            return fx.node.map_arg(output, zeros)

        module.forward = guarded

    def _merged(self, chunks: list[Any]) -> Any:
        flat = [list(chunk) if isinstance(chunk, tuple | list) else [chunk] for chunk in chunks]
        # A new tensor even for one chunk, because an output may be a buffer that the next call receives into.
        merged = iter([_joined([chunk[index] for chunk in flat]) for index in self._order])
        leaves = [next(merged) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _joined(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0].clone()


def _trace(
    flat: _Flat, forward: Callable[..., Any], shapes: Sequence[_Shape], split_points: Sequence[str]
) -> Pipe:
    first = next(flat.model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    examples = tuple(torch.zeros(shape.shape, dtype=shape.dtype, device=device) for shape in shapes)
    with warnings.catch_warnings(), torch.no_grad():
        # torch warns about copies of tree specs that it makes itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        try:
            return _exported(flat, forward, examples, split_points)
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, PipelineError):
                raise cause from None
            reason = next((line for line in str(cause).splitlines() if line.strip()), repr(cause))
            given = ", ".join(f"{shape.shape}{' (cut)' if shape.cut else ''}" for shape in shapes)
            raise PipelineError(
                f"{type(flat.model).__name__} cannot be traced for inputs of the shapes {given}: "
                f"{type(cause).__name__}: {reason.strip()}. Tensors whose first dimension is the batch size are "
                "split. A pipeline needs a forward whose control flow does not depend on values; for other models "
                "use a device map (dispatch_model)"
            ) from cause


def _exported(
    flat: _Flat, forward: Callable[..., Any], examples: tuple[Tensor, ...], split_points: Sequence[str]
) -> Pipe:
    """Trace and split, a second time if torch.export lost track of a tensor of its own.

    That was seen rarely, for T5 on busy machines and on one rank of several; a model that cannot be traced fails again.
    """
    touched = [flat.model, *(flat.model.get_submodule(point) for point in split_points)]

    def once() -> Pipe:
        with _restored(touched):
            flat.model.forward = forward
            marks = {f"model.{point}": SplitPoint.BEGINNING for point in split_points}
            return pipeline(flat, examples, split_spec=marks)

    try:
        return once()
    except Exception as error:
        cause = error.__cause__ or error
        if _LOST not in str(cause):
            raise
        _logger.debug(f"{type(flat.model).__name__} is traced again: {cause}")
    return once()


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the ``forward`` of modules, which marking a split point replaces permanently."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.__dict__.pop("_orig_forward", None)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _check_outputs(found: Sequence[tuple[Any, Any]], shapes: Sequence[_Shape], num_chunks: int) -> None:
    rows = next(shape.shape[0] for shape in shapes if shape.cut)
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)]
    if not tensors:
        raise PipelineError("the model returns no tensor, so there is nothing for a pipeline to return")
    if num_chunks == 1:
        return
    for path, leaf in tensors:
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise PipelineError(
                f"the output{_at(path)} has the shape {tuple(leaf.shape)} for a micro-batch of {rows} rows, so it "
                "cannot be merged from micro-batches: its first dimension must be the batch. Do not return it from "
                "the model (for a loss, pass no labels), or use num_chunks=1"
            )


def _first_stage(pipe: Pipe) -> fx.Node:
    nodes: Iterator[fx.Node] = iter(pipe.split_gm.graph.nodes)
    return next(node for node in nodes if node.op == "call_module")


def _order_of_outputs(pipe: Pipe) -> list[int]:
    """For each output of the model, the index of the last stage's output."""
    (nodes,) = next(node for node in pipe.split_gm.graph.nodes if node.op == "output").args
    return [0 if node.op == "call_module" else node.args[1] for node in nodes]


Weights = dict[str, tuple[Tensor, tuple[Any, ...]]]


def _share_weights(stage: nn.Module, model: nn.Module, device: torch.device) -> Weights:
    """Make a stage use the weights of the model, or copies on its device.

    Building a stage moves the parameters that it shares with the model, and tracing copies those that several stages
    use: either would leave a model that cannot be traced for another shape.

    Returns:
        the parameters and buffers of the model that the stage uses, with facts to detect that they were replaced.
    """
    original = dict(model.named_parameters(remove_duplicate=False))
    placed: dict[int, nn.Parameter] = {}
    for name, _ in list(stage.named_parameters(remove_duplicate=False)):
        weight = original[name.removeprefix("model.")]
        if id(weight) not in placed:
            # torch chooses kernels by requires_grad, even if no gradient is computed.
            placed[id(weight)] = nn.Parameter(weight.detach().to(device), weight.requires_grad)
        parent, _, leaf = name.rpartition(".")
        stage.get_submodule(parent)._parameters[leaf] = placed[id(weight)]
    held = tensors_of(model)
    used = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    names = {name.removeprefix("model.") for name, _ in used} & held.keys()
    return {name: (held[name], _identity(held[name], device)) for name in names}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def are_still_those_of(model: nn.Module, weights: Weights, device: torch.device) -> bool:
    """Whether the model still has these parameters and buffers, which a stage uses."""
    now = tensors_of(model)
    return all(
        name in now and _identity(now[name], device) == identity for name, (_, identity) in weights.items()
    )


def _identity(tensor: Tensor, device: torch.device) -> tuple[Any, ...]:
    # A stage on another device has copies, which in-place changes do not reach.
    is_copied = tensor.device != device and not tensor.is_inference()
    version = tensor._version if is_copied else None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.device, version


def _exchange_contiguous_tensors(stage: nn.Module) -> None:
    """Make a stage send and receive contiguous tensors of the traced dtype.

    Process groups can send only these, and receive buffers have the strides and the dtype of the trace.
    """
    assert isinstance(stage, fx.GraphModule)
    graph = stage.graph
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = node.meta["val"].contiguous()
    output = graph.output_node()

    def contiguous(node: fx.Node) -> fx.Node:
        new = graph.call_method("contiguous", (graph.call_method("to", (node, node.meta["val"].dtype)),))
        new.meta["val"] = node.meta["val"].contiguous()
        return new

    with graph.inserting_before(output):
        output.args = fx.node.map_arg(output.args, contiguous)
    stage.recompile()


def _receive_in_the_order_of_sending(pipe: Pipe, stage: int) -> None:
    """Order the inputs of a stage by the stage that sends them, and by their position among its outputs.

    Tensors between two ranks are identified only by their order. A stage sends in the order of its outputs, but torch
    makes the next stages receive in the order of use, which can differ.
    """
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]

    def origin(node: Any) -> tuple[int, int]:
        source, index = (node, 0) if node.op == "call_module" else node.args
        return calls.index(source), index

    for call in calls:  # torch numbers outputs by their users
        indices = [user.args[1] for user in call.users if user.op == "call_function"]
        assert indices == list(range(len(indices))), indices
    if stage == 0:  # its inputs are those of the model
        return
    module = pipe.get_stage_module(stage)
    assert isinstance(module, fx.GraphModule)
    call = calls[stage]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    pairs = sorted(zip(call.args, placeholders, strict=True), key=lambda pair: origin(pair[0]))
    call.args = tuple(arg for arg, _ in pairs)
    for _, placeholder in reversed(pairs):
        next(iter(module.graph.nodes)).prepend(placeholder)
    module.recompile()
