"""The strategy and its plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import accel_ckpt
from accel_ckpt import NamedModel, Part
from accel_state import gather_object
from accel_train import Capabilities, StrategyOptions
from accel_train.plugins import SectionPlugin, StrategyPlugin
from accel_train.strategies.ddp import DDPStates, DDPStrategy
from zero_redundancy.launchable import ZeroRedundancySection

__all__ = ["ZeroRedundancyPlugin", "ZeroRedundancyStates", "ZeroRedundancyStrategy"]


@dataclass(frozen=True, repr=False, eq=False)
class ZeroRedundancyPlugin(StrategyPlugin, SectionPlugin, ZeroRedundancySection):
    """Selects the strategy in a script: `Accelerator(strategy=ZeroRedundancyPlugin())`."""

    strategy: ClassVar[str] = "zero_redundancy"
    section: ClassVar[str] = "zero_redundancy"
    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType({"parameters_as_bucket_view": False})


class ZeroRedundancyStates(DDPStates):
    """The states of the `ZeroRedundancyOptimizer`, under the names of the script's parameters."""

    strategy: ZeroRedundancyStrategy

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """Every rank lists every state, and has the values of its own parameters; single numbers are known to all."""
        tree = super().optimizer_state(optimizer, models)  # groups; the script's optimizer has no states
        mine = super().optimizer_state(self.strategy.sharded(optimizer).optim, models)["state"]
        about = {
            name: {key: _described(value) for key, value in state.items()} for name, state in mine.items()
        }
        tree["state"] = {
            name: {key: _leaf(mine.get(name, {}).get(key), value) for key, value in state.items()}
            for of_rank in gather_object([about])
            for name, state in of_rank.items()
        }
        return tree

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Give the groups to the script's optimizer, and to the other one the states of this rank's parameters."""
        super().load_optimizer_state(optimizer, {**tree, "state": {}}, models)
        steps = self.strategy.sharded(optimizer).optim
        named = super().optimizer_state(steps, models)["param_groups"]
        mine = {name for group in named for name in group["params"]}
        own = {
            **tree,
            "state": {name: state for name, state in tree["state"].items() if name in mine},
            "param_groups": [
                {**group, "params": [name for name in group["params"] if name in mine]}
                for group in tree["param_groups"]
            ],
        }
        accel_ckpt.load_optimizer_state(steps, own, models)


class ZeroRedundancyStrategy(DDPStrategy):
    """Gradients are averaged as under ddp; each rank steps a part of the parameters and sends them to the others.

    The script keeps its own optimizer, which schedulers and groups belong to. A `ZeroRedundancyOptimizer` with the same
    groups steps in its place, and holds the states.
    """

    name: ClassVar[str] = "zero_redundancy"
    # A rank that is out of data, or trains a copy of its own, does not step, and the others wait for its parameters.
    capabilities: ClassVar[Capabilities] = replace(
        DDPStrategy.capabilities, dimensions=frozenset({"dp_replicate"}), separate_steps=False
    )
    adapter = ZeroRedundancyStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        self.config = options.config or ZeroRedundancyPlugin()  # None where only the name was given
        self._sharded: WeakKeyDictionary[torch.optim.Optimizer, ZeroRedundancyOptimizer] = WeakKeyDictionary()

    def sharded(self, optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
        """What steps in the place of the script's optimizer; made when it is first needed, after parameters moved."""
        found = self._sharded.get(optimizer)
        if found is None:
            accepted = inspect.signature(type(optimizer)).parameters
            found = ZeroRedundancyOptimizer(
                [dict(group) for group in optimizer.param_groups],
                optimizer_class=type(optimizer),
                process_group=self.loss.group,
                parameters_as_bucket_view=self.config.parameters_as_bucket_view,
                **{name: value for name, value in optimizer.defaults.items() if name in accepted},
            )
            self._sharded[optimizer] = found
        # The same groups: what schedulers and scripts write is read at every step. Others come by load_state_dict().
        found.param_groups = optimizer.param_groups
        if optimizer.state:  # of steps before prepare(), or loaded by the script
            mine = {parameter for group in found.optim.param_groups for parameter in group["params"]}
            found.optim.state.update({key: state for key, state in optimizer.state.items() if key in mine})
            optimizer.state.clear()
        return found

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Of the optimizer that steps, so that the scaler knows it."""
        super().unscale_(self.sharded(optimizer))

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step this rank's part, and get the parameters of the others."""
        optimizer._opt_called = True  # torch's schedulers look here for a step of their optimizer
        return super().step(self.sharded(optimizer), closure)

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        super().zero_grad(optimizer, set_to_none)
        self.precision.forget_unscaled(self.sharded(optimizer))


def _described(value: Any) -> Any:
    """What other ranks need of a state: shape and dtype of a tensor, and single numbers themselves."""
    if isinstance(value, Tensor) and value.dim():
        return tuple(value.shape), value.dtype
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _leaf(mine: Any, described: Any) -> Any:
    """This rank's values as the whole of a tensor that no other rank has, or nothing of it."""
    if isinstance(mine, Tensor) and mine.dim():
        return Part.whole(mine)
    if isinstance(described, tuple) and len(described) == 2 and isinstance(described[1], torch.dtype):
        shape, dtype = described
        return Part(torch.empty(0, dtype=dtype), (0,) * len(shape), shape)
    return described
