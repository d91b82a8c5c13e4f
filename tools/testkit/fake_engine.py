"""A strategy that differs from plain PyTorch in everything an engine may: the smallest proof of the seam.

Ranks form pairs. Both ranks of a pair read the same batch and hold one half of the rows of every parameter; before each
forward they gather the whole parameters, and their gradients stay with the engine until a window ends. Only then do the
optimizer's parameters get gradients: their rows of the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt import NamedModel, Part, SavedTensor
from accel_train import Capabilities, StateAdapter, Strategy, StrategyOptions, StrategyPlugin
from accel_train.mesh import Mesh
from accel_train.strategies.base import ModelSteps

__all__ = ["FakeEngine", "FakePlugin"]


@dataclass(frozen=True)
class FakePlugin(StrategyPlugin):
    """Selects `FakeEngine`."""

    strategy: ClassVar[str] = "fake"


class Engine(nn.Module):
    """A model whose parameters are this rank's rows, and which computes with whole ones."""

    def __init__(self, module: nn.Module, pair: Any) -> None:
        super().__init__()
        self.module, self.pair, self.place = module, pair, dist.get_rank(pair)
        self.rows: dict[str, nn.Parameter] = {}  # what optimizers hold
        self.whole: dict[str, Tensor] = {}  # what the model computes with; gradients of open windows are here
        self.stale = True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for child in module.modules():
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((child, key))
        for name, parameter in list(module.named_parameters()):
            mine = parameter.detach()[self.span(parameter.shape)].clone()
            self.rows[name] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
            self.whole[name] = torch.empty_like(parameter, requires_grad=parameter.requires_grad)
            for child, key in owners[id(parameter)]:
                child._parameters[key] = self.rows[name]

    def span(self, shape: torch.Size) -> slice:
        """This rank's rows of a tensor."""
        half = -(-shape[0] // 2)
        return slice(self.place * half, min(shape[0], (self.place + 1) * half))

    def gather(self) -> None:
        """Fill the whole parameters from the rows of both ranks."""
        with torch.no_grad():
            for name, whole in self.whole.items():
                whole.zero_()[self.span(whole.shape)] = self.rows[name]
                dist.all_reduce(whole, group=self.pair)
        self.stale = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        if self.stale:
            self.gather()
        return torch.func.functional_call(self.module, self.whole, args, kwargs, tie_weights=True)

    def reduce(self) -> None:
        """Give the rows their gradients: the mean over all ranks, in which each batch counts twice."""
        for name, whole in self.whole.items():
            if whole.grad is None:
                continue
            dist.all_reduce(whole.grad)
            mine = (whole.grad / dist.get_world_size())[self.span(whole.shape)]
            rows, whole.grad = self.rows[name], None
            rows.grad = mine.clone() if rows.grad is None else rows.grad + mine


class FakeStates(StateAdapter):
    """Rows as parts, and the gradients of open windows."""

    strategy: FakeEngine

    def _engine(self, model: nn.Module) -> Engine | None:
        return next(
            (engine for engine in self.strategy.engines if engine.module is self.strategy.plain(model)), None
        )

    def _part(self, engine: Engine, name: str, rows: Tensor) -> Part:
        shape = engine.whole[name].shape
        return Part(rows, (engine.span(shape).start, *(0 for _ in shape[1:])), tuple(shape))

    def model_state(self, model: nn.Module, named: NamedModel | None = None) -> dict[str, Any]:
        """Rows as parts; buffers as they are."""
        engine = self._engine(model)
        if engine is None:
            return super().model_state(model, named)
        names = {id(rows): name for name, rows in engine.rows.items()}
        state = engine.module.state_dict(keep_vars=True)
        named = accel_ckpt.canonical_state_dict(state, engine.module)
        return {
            key: self._part(engine, names[id(value)], value.detach()) if id(value) in names else value
            for key, value in named.items()
        }

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module | NamedModel]
    ) -> Any:
        """States of rows as parts, like the rows."""

        def part(engine: Engine, name: str, value: Any) -> Any:
            rows = engine.rows[name]
            divided = isinstance(value, Tensor) and value.dim() > 0 and value.shape == rows.shape
            return self._part(engine, name, value) if divided else value

        return self._mapped(super().optimizer_state(optimizer, models), models, part)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, tree: Any, models: Sequence[nn.Module]
    ) -> None:
        """Take this rank's rows of every state."""

        def rows(engine: Engine, name: str, value: Any) -> Any:
            whole = engine.whole[name]
            if not isinstance(value, Tensor | SavedTensor) or value.shape != whole.shape or not whole.dim():
                return value.read() if isinstance(value, SavedTensor) else value
            mine = torch.empty_like(engine.rows[name], requires_grad=False)
            if isinstance(value, SavedTensor):
                value.fill(self._part(engine, name, mine))
            else:
                mine.copy_(value[engine.span(whole.shape)])
            return mine

        super().load_optimizer_state(optimizer, self._mapped(tree, models, rows), models)

    def _mapped(self, tree: Any, models: Sequence[nn.Module | NamedModel], change: Callable[..., Any]) -> Any:
        """An optimizer's tree with the states of parameters of engines changed."""
        state = dict(tree["state"])
        for number, model in enumerate(models):
            engine = self._engine(model.module if isinstance(model, NamedModel) else model)
            for name in () if engine is None else engine.rows:
                key = f"model_{number}.{name}"
                if key in state:
                    state[key] = {k: change(engine, name, value) for k, value in state[key].items()}
        return {**tree, "state": state}

    def rank_state(self, model: nn.Module) -> dict[str, Any]:
        """The gradients of an open window."""
        engine = self._engine(model)
        whole = {} if engine is None else engine.whole
        return {"hidden": {name: tensor.grad for name, tensor in whole.items() if tensor.grad is not None}}

    def load_rank_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take the gradients of an open window up again."""
        engine = self._engine(model)
        for name, whole in (engine.whole if engine is not None else {}).items():
            gradient = state.get("hidden", {}).get(name)
            whole.grad = None if gradient is None else gradient.to(whole.device, copy=True)
        if engine is not None:
            engine.stale = True


class FakeEngine(Strategy):
    """Pairs of ranks that hold a half of each parameter."""

    name: ClassVar[str] = "fake"
    capabilities: ClassVar[Capabilities] = Capabilities(
        precisions=frozenset({"no", "bf16"}), needs_process_group=True, num_items=False, hides_gradients=True
    )
    adapter: ClassVar[type[StateAdapter]] = FakeStates

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__(options)
        pair = options.mesh.submesh("tp")
        assert pair is not None
        self.pair = pair.get_group()
        self.engines: list[Engine] = []
        self.last = True

    @classmethod
    def make_mesh(cls, config: Any, device: torch.device, world_size: int, rank: int) -> Mesh:
        """Pairs of neighbours read alike."""
        return Mesh({"dp_replicate": world_size // 2, "tp": 2}, device.type, world_size, rank)

    def prepare_model(self, model: nn.Module, steps: ModelSteps) -> nn.Module:
        """Replace all parameters."""
        if isinstance(model, Engine):
            return model
        self.engines.append(Engine(steps.place(steps.convert(model)), self.pair))
        return steps.compile(self.engines[-1])

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model inside its engine."""
        return model.module if isinstance(model, Engine) else model

    def release(self) -> None:
        """Forget the engines."""
        self.engines.clear()

    def begin_micro_batch(self, models: Sequence[nn.Module], *, last: bool, loss_factor: float) -> None:
        """Keep gradients until the last micro-batch."""
        self.last = last or self.options.sync_each_batch

    def end_micro_batch(self, models: Sequence[nn.Module], *, last: bool) -> None:
        """Outside of windows every backward is the last."""
        self.last = True

    def backward(
        self, models: Sequence[nn.Module], loss: Tensor, *, pending: bool, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, and at the end of a window give them out."""
        super().backward(models, loss, pending=pending, kwargs=kwargs)
        if self.last:
            for engine in self.engines:
                engine.reduce()

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Step, after which whole parameters must be gathered again."""
        for engine in self.engines:
            engine.stale = True
        return super().step(optimizer, closure)

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Drop the gradients that the engine keeps, too."""
        super().zero_grad(optimizer, set_to_none)
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for engine in self.engines:
            for name, rows in engine.rows.items():
                if id(rows) in owned:
                    engine.whole[name].grad = None

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm over the rows of both ranks."""
        norm = super().gradient_norm(parameters, norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.pair)
            return norm
        power = norm**norm_type
        dist.all_reduce(power, group=self.pair)
        return power ** (1 / norm_type)

    def clip_grad_norm_(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm over the rows of both ranks."""
        norm = self.gradient_norm(parameters, norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
