"""The stages that a rank holds: the script's model without the modules of other stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from accel_train.errors import PrepareError
from accel_train.strategies.pipeline.cut import Cut

__all__ = ["TARGET", "Absent", "Stage", "counted_tokens", "is_causal", "make_stages", "tensors_of"]

_IGNORED = -100
TARGET = "target"
"""Argument of the prepared model that `PipelineParallelConfig.loss_function` gets."""


class Absent(nn.Module):
    """In the place of a module of another stage: returns its first input. It keeps plain attributes of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in module.__dict__.items():
            if name not in self.__dict__ and not name.startswith("_"):
                self.__dict__[name] = value
        # An embedding has tokens as its input, which are no activations; what depends on it is not computed here.
        self._zero = module.weight.new_zeros(()).detach() if isinstance(module, nn.Embedding) else None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first input; of an embedding 0."""
        if self._zero is not None:
            return self._zero
        return inputs[0] if inputs else next(iter(named.values()))


class _Reached(Exception):  # noqa: N818 (no error)
    """The last layer of a stage has returned. It ends the forward, past all that follows in the model."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class Stage(nn.Module):
    """One stage of a pipeline. The first one takes the model's arguments, the others what the one before returned.

    Args:
        model: the script's model without the modules of other stages.
        cut: how the model is cut.
        index: number of the stage.
        loss_function: see `PipelineParallelConfig`.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        index: int,
        loss_function: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.module = model
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(cut.stages) - 1
        self._names = cut.stages[index]
        self.chain = cut.chain
        self._loss_function = loss_function
        self._layers = [name for name in self._names if name in cut.layers]
        self._received: Any = None
        if self.chain:
            self.module.forward = self._through_chain

    def enter_and_leave(self) -> None:
        """Let the first layer take what was received, and the last one end the forward. Called when hooks are set."""
        if self.chain:
            return
        if not self.is_first:
            first = self.module.get_submodule(self._layers[0])
            first.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if not self.is_last:
            self.module.get_submodule(self._layers[-1]).register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (self._received, *inputs[1:]), named
        return inputs, {**named, "hidden_states": self._received}

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        raise _Reached(output[0] if isinstance(output, tuple) else output)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the next stage takes, a tensor or a tuple of tensors; of the last stage the model's output."""
        named = dict(named)
        target = named.pop(TARGET, None)
        if not self.chain:
            inputs, named = self._arguments(inputs, named)
        try:
            output = self.module(*inputs, **(named if self.is_first or not self.chain else {}))
        except _Reached as end:
            return end.hidden
        finally:
            self._received = None
        labels = named.get("labels")
        if self.is_last and labels is not None and is_causal(self.module) and not counted_tokens(labels):
            # The mean over no tokens is not a number; this micro-batch has no share in the loss.
            return {**output, "loss": output["logits"].sum() * 0.0}
        if self.is_last and target is not None:
            assert self._loss_function is not None, "checked where the model is called"
            return {"loss": self._loss_function(output, target)}
        return output

    def _through_chain(self, *inputs: Any, **named: Any) -> Any:
        """The forward of a model whose modules make a chain."""
        value: Any = inputs
        for name in self._names:
            inner = self.module.get_submodule(name)
            value = inner(*value, **named) if isinstance(value, tuple) else inner(value, **named)
            named = {}
        if not self.is_last:
            raise _Reached(value)  # past what converts outputs to float32
        return value

    def _arguments(
        self, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model's own forward is called with."""
        if not self.is_first:
            named.pop("input_ids", None)
            [self._received] = inputs
            inputs, named["inputs_embeds"] = (), self._received
        if not self.is_last:
            named.pop("labels", None)
        return inputs, {**named, "use_cache": False}


def is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers computes the mean loss of following tokens from `labels`."""
    kind = getattr(model, "loss_type", "")
    return kind == "ForCausalLM" or (kind is None and type(model).__name__.endswith("LMHeadModel"))


def counted_tokens(labels: Tensor) -> Tensor:
    """How many tokens count in the loss: all but the first of each sequence, and those that are ignored."""
    return (labels[..., 1:] != _IGNORED).sum()


def make_stages(
    model: nn.Module,
    cut: Cut,
    held: Sequence[int],
    loss_function: Callable[..., Any] | None,
) -> list[Stage]:
    """Divide a model: it keeps the modules of the stages that this rank holds, and no others.

    Args:
        model: the whole model, changed in place.
        cut: the modules of each stage.
        held: numbers of the stages of this rank, ascending.
        loss_function: see `PipelineParallelConfig`.
    """
    own = {name for number in held for name in cut.stages[number]}
    _drop(model, "", {name for name in cut.names if name not in own})
    stages = []
    for number in held:
        others = own - set(cut.stages[number])
        inner = _without(model, "", others) if others or cut.chain else model
        stages.append(Stage(inner, cut, number, loss_function))
    return stages


def _drop(module: nn.Module, prefix: str, names: Collection[str]) -> None:
    """Put placeholders into the model itself, so that other stages' parameters are freed."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        full = prefix + name
        if full in names:
            module._modules[name] = Absent(child)
        elif any(other.startswith(f"{full}.") for other in names):
            _drop(child, f"{full}.", names)


def _without(module: nn.Module, prefix: str, names: Collection[str]) -> nn.Module:
    """A copy of the modules around those that are left out; all others, and all tensors, are shared with it."""
    copied = copy.copy(module)
    copied._modules = {}
    for name, child in module._modules.items():
        full = prefix + name
        if child is not None and full in names:
            child = Absent(child)
        elif child is not None and any(other.startswith(f"{full}.") for other in names):
            child = _without(child, f"{full}.", names)
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
