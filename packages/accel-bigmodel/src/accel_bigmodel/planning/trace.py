"""Tracing the course of memory in a forward and backward, by running them on tensors without values."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from accel_bigmodel.errors import EstimateError
from accel_bigmodel.estimates.activations import GroupedProducts
from accel_bigmodel.planning.model import find_units, text_config
from accel_bigmodel.planning.shape import Phase, Timeline

__all__ = ["Numbers", "Traced", "combine", "trace_model", "trace_step"]

_FEW = 4  # the first unit, the last, and two between them, whose difference is what one adds
MakeInputs = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The dtypes in which a step computes.

    Attributes:
        weights: dtype of the weights while a unit computes.
        frozen: dtype of weights that are not trained; None: that of the others.
        autocast: dtype of autocast; None: off.
    """

    weights: torch.dtype
    frozen: torch.dtype | None = None
    autocast: torch.dtype | None = None


@dataclass(slots=True)
class Traced:
    """A phase of one trace, in bytes.

    `left` is what was made in it and is still alive when the backward ends, such as a cache of keys and values.
    """

    unit: int | None
    backward: bool
    peak: int = 0
    logits: int = 0
    gradients: int = 0
    left: int = 0


def trace_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    numbers: Numbers,
    *,
    checkpointing: bool = False,
    vocabulary: int = 0,
    device: str | torch.device = "cpu",
) -> list[Traced]:
    """Run one forward and backward without values, and measure the memory of each of its phases.

    All storages that operations create are counted: tensors that autograd keeps, temporaries, outputs, and gradients
    until they are complete. Weights, buffers and inputs are not counted. Workspaces inside of kernels are not known.

    Args:
        model: on any device; it is copied.
        inputs: keyword inputs; only shapes and dtypes matter. With ``labels`` the model computes its loss; otherwise
            it is the mean of all floating-point outputs.
        numbers: the dtypes in which it computes.
        checkpointing: recompute each unit in the backward.
        vocabulary: tensors whose last dimension has this size are listed as logits; 0: none are.
        device: type of the device whose kernels are assumed: "cpu", or a type that this build of PyTorch supports.

    Raises:
        EstimateError: the model cannot run without values.
    """
    ready = copy.deepcopy(model).train()  # outside of the mode, which cannot copy
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
            _without_values(ready, numbers, torch.device(device))
            given = pytree.tree_map_only(
                Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), dict(inputs)
            )
            watch = _Watch(vocabulary)
            _run(ready, given, numbers, watch, checkpointing, torch.device(device))
            return watch.phases
    except Exception as error:
        raise EstimateError(
            f"a training step of {type(model).__name__} cannot run without values: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0].rstrip('.')}"
        ) from error


def combine(one: Sequence[Traced], two: Sequence[Traced]) -> Timeline:
    """Compute the timeline for any number of samples, from traces of one sample and of two.

    Raises:
        EstimateError: the traces do not have the same phases.
    """
    if [(a.unit, a.backward) for a in one] != [(b.unit, b.backward) for b in two]:
        raise EstimateError(
            "the steps of one sample and of two run different parts of the model, so there is no figure per sample"
        )
    phases = []
    for a, b in zip(one, two, strict=True):
        slope = max(0, b.peak - a.peak)
        logits = max(0, b.logits - a.logits)
        phases.append(Phase(a.unit, a.backward, a.peak - slope, slope, logits, a.gradients))
    return Timeline(tuple(phases))


def trace_model(
    model: nn.Module,
    make_inputs: MakeInputs,
    numbers: Numbers,
    *,
    checkpointing: bool = False,
    device: str | torch.device = "cpu",
) -> Timeline:
    """Trace the timeline of a model's training step, for any number of samples.

    Of many equal units only a few are run, and the others are assumed to need the same.

    Args:
        model: on any device, meta included; not changed.
        make_inputs: makes the keyword inputs for a number of samples.
        numbers: the dtypes in which it computes.
        checkpointing: recompute each unit in the backward.
        device: type of the device whose kernels are assumed.

    Raises:
        EstimateError: the model cannot run without values.
    """
    vocabulary = int(getattr(text_config(model), "vocab_size", 0) or 0)
    few = _with_few_units(model)

    one, two = (
        trace_step(
            few or model,
            make_inputs(samples),
            numbers,
            checkpointing=checkpointing,
            vocabulary=vocabulary,
            device=device,
        )
        for samples in (1, 2)
    )
    timeline = combine(one, two)
    if few is None:
        return timeline
    first, second = (next(each.left for each in step if each.unit == 2) for step in (one, two))
    left = (2 * first - second, second - first)
    return timeline.with_more_units(len(find_units(model)) - _FEW, left)


def _with_few_units(model: nn.Module) -> nn.Module | None:
    """A copy with only the first units of a list of equal ones; None: it has no such list, or it is short."""
    units = find_units(model)
    kinds = {
        (type(unit), tuple((tuple(p.shape), p.requires_grad) for p in unit.parameters())) for unit in units
    }
    if len(units) <= _FEW or len(kinds) != 1:
        return None
    # By these `deepcopy` knows a list of units already, and copies none that is left out.
    copied: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(units):
            copied[id(module)] = copy.deepcopy(module[:_FEW], copied)
    few = copy.deepcopy(model, copied)
    return few if len(find_units(few)) == _FEW else None


def _without_values(model: nn.Module, numbers: Numbers, device: torch.device) -> None:
    """Replace the tensors of a model by some that have shapes only."""
    made: dict[int, Tensor] = {}

    def unreal(tensor: Tensor, is_parameter: bool) -> Tensor:
        if id(tensor) not in made:
            dtype = tensor.dtype
            if is_parameter and tensor.is_floating_point():
                dtype = numbers.weights if tensor.requires_grad else numbers.frozen or numbers.weights
            fake = torch.empty(tensor.shape, dtype=dtype, device=device)
            made[id(tensor)] = (
                nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
            )
        return made[id(tensor)]

    for module in model.modules():
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = unreal(tensor, is_parameter)  # type: ignore[assignment]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types here
    """Adds up the storages that operations make, and notes the most in each phase."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary = vocabulary
        self.live = 0
        self.is_outside = False  # a unit has ended, and no other has begun
        self.logits: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.made_in: dict[int, Traced] = {}
        self.phases: list[Traced] = []
        self.known: set[int] = set()

    def enter(self, unit: int | None, backward: bool) -> None:
        """Begin a phase, unless it is the current one."""
        self.is_outside = False
        if not self.phases or (self.phases[-1].unit, self.phases[-1].backward) != (unit, backward):
            self.phases.append(Traced(unit, backward))
            self.note()

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor: it is there before the step, or counted otherwise."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._forget(key)
        if key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self.known.discard, key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.is_outside:
            self.enter(None, False)
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as the mode below answers, which two of three calls ask for
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.note()
        return result

    def note(self) -> None:
        """Compare what is alive with the most so far in this phase."""
        current = self.phases[-1]
        if self.live >= current.peak:
            current.peak, current.logits = self.live, sum(self.logits.values())

    def end(self) -> None:
        """Note what each phase leaves."""
        for key, phase in self.made_in.items():
            phase.left += self.sizes[key]

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self.known:
            return
        self.sizes[key] = storage.nbytes()
        self.made_in[key] = self.phases[-1]
        self.live += self.sizes[key]
        if self.vocabulary and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
            self.logits[key] = storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)
        self.made_in.pop(key, None)
        self.logits.pop(key, None)


def _run(
    model: nn.Module,
    inputs: dict[str, Any],
    numbers: Numbers,
    watch: _Watch,
    checkpointing: bool,
    device: torch.device,
) -> None:
    precision: Callable[[], AbstractContextManager[Any]] = (
        (lambda: torch.autocast(device.type, numbers.autocast))
        if numbers.autocast is not None
        else nullcontext
    )
    # What derives grouped products is below the watch, which counts their results and not its casts.
    grouped = GroupedProducts()  # type: ignore[no-untyped-call]  # PyTorch has no types here
    with _hooked(model, watch, checkpointing) as state, grouped, watch:
        watch.enter(None, False)
        for tensor in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs)):
            if isinstance(tensor, Tensor):
                watch.leave_out(tensor)
        with torch.enable_grad():
            with precision():
                outputs = model(**inputs)
            # Copies that autocast made end here, so what follows is compared with the backward.
            watch.enter(None, True)
            if numbers.autocast is not None or numbers.weights != torch.float32:
                # Prepared models return float32.
                outputs = pytree.tree_map_only(Tensor, _float, _plain(outputs))
            else:
                outputs = _plain(outputs)
            loss = _loss(outputs)
            state["backward"] = True
            loss.backward()  # type: ignore[no-untyped-call]
        watch.end()
        del outputs, loss


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _plain(outputs: Any) -> Any:
    """Outputs of transformers as the mapping that they are, which the trees of PyTorch know."""
    return dict(outputs) if isinstance(outputs, Mapping) else outputs


def _loss(outputs: Any) -> Tensor:
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        found: Tensor = outputs["loss"]
        return found
    parts = [
        each.square().mean()
        for each in pytree.tree_leaves(outputs)
        if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad
    ]
    if not parts:
        raise ValueError("no output depends on a trained parameter")
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@contextlib.contextmanager
def _hooked(model: nn.Module, watch: _Watch, checkpointing: bool) -> Iterator[dict[str, bool]]:
    """Tell the watch which unit runs, and which gradients are complete."""
    state = {"backward": False}
    units = find_units(model)
    owner: dict[int, int] = {}
    for index, unit in enumerate(units):
        for parameter in unit.parameters():
            owner.setdefault(id(parameter), index)
        if checkpointing:
            _checkpoint(unit)

        def before(module: nn.Module, args: Any, index: int = index) -> None:
            watch.enter(index, state["backward"])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not state["backward"]:
                watch.is_outside = True

        unit.register_forward_pre_hook(before)
        unit.register_forward_hook(after)
    for parameter in dict.fromkeys(model.parameters()):
        if parameter.requires_grad:

            def complete(tensor: Tensor) -> None:
                gradient = tensor.grad
                assert gradient is not None
                watch.enter(owner.get(id(tensor)), True)
                watch.note()
                watch.leave_out(gradient)
                watch.phases[-1].gradients += tensor.numel()

            parameter.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]
    yield state


def _checkpoint(unit: nn.Module) -> None:
    forward = unit.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _without_cache(args, kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    unit.forward = recomputed


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block of transformers by which it caches nothing, because recomputing would append again."""
    caches = {name: None for name, value in kwargs.items() if _is_cache(value)}
    off = {"use_cache": False} if "use_cache" in kwargs else {}
    if not caches and not any(map(_is_cache, args)):
        return args, kwargs
    return tuple(None if _is_cache(value) else value for value in args), {**kwargs, **caches, **off}


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")  # keys and values, as objects that tell how many they hold
