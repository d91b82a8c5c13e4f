"""The stages that a rank holds: the script's model without the modules of other stages."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel_train.errors import PrepareError
from accel_train.strategies.pipeline.cut import Cut

__all__ = [
    "TARGET",
    "Absent",
    "Stage",
    "copied_around",
    "counted_labels",
    "loss_kind",
    "make_stages",
    "tensors_of",
    "without_cache",
]

_IGNORED = -100
_CAUSAL = "ForCausalLM"
TARGET = "target"
"""Argument of the prepared model that `PipelineParallelConfig.loss_function` gets."""


class _Calls:
    """What the modules of one rank's stages share while a stage is called.

    Attributes:
        running: a stage is called now.
        received: what the stage received.
    """

    def __init__(self) -> None:
        self.running = False
        self.received: Any = None


class Absent(nn.Module):
    """In the place of a module of another stage: returns an activation. It keeps plain attributes of the module."""

    def __init__(self, name: str, module: nn.Module, calls: _Calls) -> None:
        super().__init__()
        for attribute, value in module.__dict__.items():
            if attribute not in self.__dict__ and not attribute.startswith("_"):
                self.__dict__[attribute] = value
        self.name = name
        self._calls = calls

    @property
    def weight(self) -> Any:
        """For models that ask embeddings for their device and dtype."""
        return self._calls.received

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first input; zeros of the form of what the stage received if that is no activation, such as tokens.

        Raises:
            PrepareError: the model is called by itself, not by its pipeline.
        """
        if not self._calls.running:
            raise PrepareError(
                f"{self.name!r} is in another stage of the pipeline, so this rank cannot run the model by itself. "
                "Call what prepare() returned, on all ranks; for a whole model load what save_model() writes."
            )
        first = next(iter((*inputs, *named.values())), None)
        if isinstance(first, Tensor) and first.is_floating_point():
            return first
        return torch.zeros_like(self._calls.received)  # the model may change it in place


class _Reached(Exception):  # noqa: N818 (no error)
    """The last layer of a stage has returned. It ends the forward, past all that follows in the model."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class _Edge(nn.Module):
    """The first or the last layer of a stage: takes what the stage received, or ends the forward.

    A layer that recomputes its activations runs its hooks again in backward, so this wraps it.
    """

    def __init__(self, layer: nn.Module, calls: _Calls, *, enters: bool, leaves: bool) -> None:
        super().__init__()
        self.layer = layer
        self._calls = calls
        self._enters, self._leaves = enters, leaves

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layer"], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the layer returns."""
        if self._enters and inputs:
            inputs = (self._calls.received, *inputs[1:])
        elif self._enters:
            named = {**named, next(iter(named)): self._calls.received}
        output = self.layer(*inputs, **named)
        if self._leaves:
            raise _Reached(output[0] if isinstance(output, tuple | list) else output)
        return output


class _Chain(nn.Module):
    """Modules of which each is called with what the one before returned."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, leaves: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in names)
        self._leaves = leaves

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the last one returns."""
        value: Any = inputs
        for part in self.parts:
            value = part(*value, **named) if isinstance(value, tuple) else part(value, **named)
            named = {}
        if self._leaves:
            raise _Reached(value)  # past what converts outputs to float32
        return value


class Stage(nn.Module):
    """One stage of a pipeline. The first one takes the model's arguments, the others what the one before returned.

    Args:
        model: the script's model without the modules of other ranks.
        cut: how the model is cut.
        index: number of the stage.
        calls: shared by the stages of this rank.
        loss_function: see `PipelineParallelConfig`.

    Attributes:
        module: what is called: the model without the modules of other stages, or its part of the chain.
        layers: the layers of the stage.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        index: int,
        calls: _Calls,
        loss_function: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(cut.stages) - 1
        self.chain = cut.chain
        self._calls = calls
        self._loss_function = loss_function
        self._loss_kind = "" if cut.chain else loss_kind(model)
        self.layers = [model.get_submodule(name) for name in cut.stages[index] if name in cut.layers]
        self.module: nn.Module
        if cut.chain:
            self.module = _Chain(model, cut.stages[index], leaves=not self.is_last)
        else:
            self.module = copied_around(model, "", self._places(model, cut))
            self._without_cache = without_cache(model)

    def _places(self, model: nn.Module, cut: Cut) -> dict[str, nn.Module]:
        """What replaces modules of the model."""
        names = cut.stages[self.index]
        layers = [name for name in names if name in cut.layers]
        others = [(name, model.get_submodule(name)) for name in cut.names if name not in names]
        found: dict[str, nn.Module] = {
            name: module if isinstance(module, Absent) else Absent(name, module, self._calls)
            for name, module in others
        }
        for name in {layers[0], layers[-1]}:
            enters = name == layers[0] and not self.is_first
            leaves = name == layers[-1] and not self.is_last
            if enters or leaves:
                found[name] = _Edge(model.get_submodule(name), self._calls, enters=enters, leaves=leaves)
        return found

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the next stage takes, a tensor or a tuple of tensors; of the last stage the model's output."""
        target = named.pop(TARGET, None)
        if self.chain:
            named = named if self.is_first else {}
        else:
            if not self.is_first:
                [self._calls.received] = inputs
                inputs = ()
            if not self.is_last:
                named.pop("labels", None)
            named |= self._without_cache
        self._calls.running = True
        try:
            output = self.module(*inputs, **named)
        except _Reached as end:
            return end.hidden
        finally:
            self._calls.running, self._calls.received = False, None
        given = {TARGET: target} if target is not None else {} if self.chain else named
        counted = counted_labels(self._loss_kind, given, self._loss_function)
        if counted is not None and not counted:
            # The mean over no labels is not a number; this micro-batch has no share in the loss.
            logits = output["logits"] if target is None else tree_leaves(output)[0]
            return {**(output if target is None else {}), "loss": logits.sum() * 0.0}
        if target is not None:
            assert self._loss_function is not None, "checked where the model is called"
            return {"loss": self._loss_function(output, target)}
        return output


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The argument with which a model of transformers keeps nothing for generation, if it takes that."""
    parameters = inspect.signature(model.forward).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {"use_cache": False} if any_name or "use_cache" in parameters else {}


def loss_kind(model: nn.Module) -> str:
    """The name that transformers has for the loss of a model; empty: it has none."""
    kind: str | None = getattr(model, "loss_type", "")
    if kind is None and type(model).__name__.endswith("LMHeadModel"):
        return _CAUSAL
    return kind or ""


def counted_labels(
    kind: str, named: Mapping[str, Any], loss_function: Callable[..., Any] | None
) -> Tensor | None:
    """How many labels of a batch count in a mean loss; None: all, so that it is a mean over rows.

    Args:
        kind: see `loss_kind`.
        named: what the model is called with.
        loss_function: see `PipelineParallelConfig`.
    """
    labels = named.get(TARGET, named.get("labels"))
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    ignored = getattr(loss_function, "ignore_index", _IGNORED) if TARGET in named else _IGNORED
    if kind == _CAUSAL and TARGET not in named:
        following = named.get("shift_labels")  # the first label of a sequence follows nothing
        labels = labels[..., 1:] if following is None else following
    counted: Tensor = (labels != ignored).sum()
    return counted


def make_stages(
    model: nn.Module,
    cut: Cut,
    held: Sequence[int],
    loss_function: Callable[..., Any] | None,
    fill: Callable[[nn.Module], None] | None,
) -> list[Stage]:
    """Divide a model: it keeps the modules of the stages that this rank holds, and no others.

    Args:
        model: the whole model, changed in place.
        cut: the modules of each stage.
        held: numbers of the stages of this rank, ascending.
        loss_function: see `PipelineParallelConfig`.
        fill: gives modules their values, on all ranks together; None: they get theirs later.
    """
    calls = _Calls()
    for number, names in enumerate(cut.stages):
        if fill is not None:  # stage by stage: a rank never has memory for more than one of the others
            fill(nn.ModuleList(model.get_submodule(name) for name in names))
        for name in names if number not in held else ():
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = Absent(name, model.get_submodule(name), calls)
    if fill is not None:
        fill(model)
    return [Stage(model, cut, number, calls, loss_function) for number in held]


def copied_around(module: nn.Module, prefix: str, places: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the modules around some, in whose places others stand; all else, and all tensors, is shared with it."""
    copied = copy.copy(module)
    copied._modules = {}
    for name, child in module._modules.items():
        full = prefix + name
        if child is not None and full in places:
            child = places[full]
        elif child is not None and any(other.startswith(f"{full}.") for other in places):
            child = copied_around(child, f"{full}.", places)
        copied._modules[name] = child
    return copied


def tensors_of(value: Any, what: str) -> list[Tensor]:
    """What passes from a stage to the next one.

    Raises:
        PrepareError: it is no tensor, and no tuple of tensors.
    """
    found = list(value) if isinstance(value, tuple | list) else [value]
    for item in found:
        if not isinstance(item, Tensor) or hasattr(item, "full_tensor"):
            raise PrepareError(
                f"{what} returned {type(item).__name__}, and only plain tensors pass from a stage of a pipeline to the "
                "next one. Cut the model elsewhere (PipelineParallelConfig(cuts=[…]))."
            )
    return found
