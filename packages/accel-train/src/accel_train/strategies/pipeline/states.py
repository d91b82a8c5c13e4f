"""Saving and loading what the stages of a pipeline hold, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel, Part
from accel_ckpt.parts import is_leaf, parts_of, shape_of
from accel_state.operations.collectives import gather_object
from accel_train.strategies.engines import check_groups
from accel_train.strategies.fsdp2.unreduced_gradients import FSDPGradients
from accel_train.strategies.pipeline.model import PipelineModel
from accel_train.strategies.state_adapter import StateAdapter
from accel_train.strategies.window_gradients import OwnGradient, WindowGradients

__all__ = ["PipelineStates", "UndividedModel"]


@dataclass
class UndividedModel:
    """What a model was before it was divided into stages.

    Attributes:
        module: the script's model, which has this rank's modules now.
        forms: shape and dtype of all tensors of its state dict, by name.
        parameters: of these, the names of the parameters; a tied one has its first.
    """

    module: nn.Module
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]]
    parameters: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> UndividedModel:
        """Describe a model before it is divided."""
        named = NamedModel(module)
        tensors = {name: tensor for name, tensor in named.state_dict().items() if isinstance(tensor, Tensor)}
        first = {id(parameter): name for name, parameter in reversed(named.parameters().items())}
        return cls(
            module,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
            frozenset(first.values()),
        )


class StageGradients(FSDPGradients):
    """The whole gradients of this rank's stages that FSDP keeps until it reduces them."""

    @property
    def group(self) -> Any:
        """The ranks of these stages."""
        return self.strategy.loss.group

    def set_unreduced(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, OwnGradient | None]
    ) -> None:
        """Let FSDP keep other gradients; without FSDP nothing is exchanged."""
        if self.strategy.shards:
            super().set_unreduced(parameters, gradients)


class PipelineStates(StateAdapter):
    """Each rank gives the tensors of its stages; those of other stages are listed as held elsewhere."""

    strategy: Any
    window_gradients: ClassVar[type[WindowGradients]] = StageGradients

    def model_state(self, model: nn.Module, named: NamedModel | None = None) -> dict[str, Any]:
        """This rank's tensors, and the forms of all others, in the order of the whole model."""
        own = super().model_state(model, named)
        whole: UndividedModel | None = self.strategy.whole_of(model)
        if whole is None:
            return own
        held = {name: _held(leaf) for name, leaf in own.items()}
        found = {
            name: held.pop(name) if name in held else Part.nothing(*form)
            for name, form in whole.forms.items()
        }
        return {**found, **held}

    def frozen(self, named: NamedModel) -> set[str]:
        """The frozen parameters of all stages."""
        ranks: list[set[str]] = gather_object([super().frozen(named)], group=self.strategy.pipeline_group)
        return set().union(*ranks)

    def parameters_elsewhere(self, model: nn.Module) -> dict[str, Part]:
        """The parameters of other stages."""
        whole: UndividedModel | None = self.strategy.whole_of(model)
        if whole is None:
            return super().parameters_elsewhere(model)
        own = NamedModel(whole.module).parameters()
        return {name: Part.nothing(*whole.forms[name]) for name in whole.parameters - own.keys()}

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """An optimizer's state by parameter name, of all stages; a collective of the ranks of a pipeline."""
        tree = super().optimizer_state(optimizer, models)
        described = {
            "state": {name: _described(entry) for name, entry in tree["state"].items()},
            "groups": [group["params"] for group in tree["param_groups"]],
        }
        ranks: list[dict[str, Any]] = gather_object([described], group=self.strategy.pipeline_group)
        state: dict[str, Any] = {}
        for other in ranks:
            for name, entry in other["state"].items():
                if name not in tree["state"]:
                    state.setdefault(name, _elsewhere(entry))
        tree["state"] = {**{name: _held_tree(entry) for name, entry in tree["state"].items()}, **state}
        for place, group in enumerate(tree["param_groups"]):
            names = [name for other in ranks for name in other["groups"][place]]
            group["params"] = list(dict.fromkeys(names))
        return tree

    def check_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Check that all stages together have the saved groups, and that this rank's states fit."""
        own = self._names(optimizer, models)
        ranks: list[list[list[str]]] = gather_object([own], group=self.strategy.pipeline_group)
        check_groups([[name for other in ranks for name in other[place]] for place in range(len(own))], tree)
        super().check_optimizer_state(optimizer, self._own(own, tree), models)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Load the states of this rank's parameters."""
        super().load_optimizer_state(optimizer, self._own(self._names(optimizer, models), tree), models)

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """How far a window has come, and how long batches are, of which the last one may be shorter."""
        if not isinstance(model, PipelineModel):
            return {}
        return {"accumulated": model.accumulated, "most_rows": model.most_rows}

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Continue there."""
        if isinstance(model, PipelineModel):
            model.forget_calls()
            model.accumulated = bool(state.get("accumulated", False))
            model.most_rows = int(state.get("most_rows", 0))

    def _names(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
        return [group["params"] for group in super().optimizer_state(optimizer, models)["param_groups"]]

    @staticmethod
    def _own(names: Sequence[Sequence[str]], tree: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a saved state that this rank's optimizer has, whose groups are `names`."""
        known = {name for group in names for name in group}
        return {
            **tree,
            "state": {name: entry for name, entry in tree["state"].items() if name in known},
            "param_groups": [
                {**group, "params": [name for name in group["params"] if name in known]}
                for group in tree["param_groups"]
            ],
        }


def _held(leaf: Any) -> Any:
    """A tensor as parts, because ranks of other stages list it, and do not hold it."""
    if not isinstance(leaf, Tensor):
        return leaf
    return parts_of(leaf) or Part.nothing(shape_of(leaf), leaf.dtype)


def _held_tree(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: _held(value) if _has_elements(value) else value for key, value in entry.items()}


def _described(entry: Any) -> Any:
    """What ranks of other stages need to list a parameter's state."""
    if not isinstance(entry, Mapping):
        return entry
    return {
        key: _Form(tuple(shape_of(value)), value.dtype) if _has_elements(value) else value
        for key, value in entry.items()
    }


def _elsewhere(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {
        key: Part.nothing(value.shape, value.dtype) if isinstance(value, _Form) else value
        for key, value in entry.items()
    }


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _has_elements(value: object) -> bool:
    """Whether a state has an element for each of its parameter's; a step has not."""
    return is_leaf(value) and isinstance(value, Tensor) and value.dim() > 0
