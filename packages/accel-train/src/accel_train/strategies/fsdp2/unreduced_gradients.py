"""Gradients that FSDP keeps on a rank until an accumulation window ends: whole ones, of this rank's samples alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.parts import fsdp_groups, fsdp_modules, reshard
from accel_state.operations.collectives import gather_object
from accel_train.errors import AccumulationError
from accel_train.strategies.gradients import local_part
from accel_train.strategies.window_gradients import OwnGradient, UnreducedGradient, WindowGradients

__all__ = ["FSDPGradient", "FSDPGradients"]

_NONE, _ZEROS, _VALUES = range(3)


class FSDPGradient:
    """What FSDP has not reduced of the gradient of one parameter.

    Args:
        managed: FSDP's object for the parameter.
        unit: the module that gathers it.
    """

    def __init__(self, managed: Any, unit: Any) -> None:
        self._managed, self._unit = managed, unit

    @property
    def parameter(self) -> Any:
        """This rank's part of the parameter, which the optimizer steps."""
        return self._managed.sharded_param

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's values."""
        return tuple(self._managed._orig_size)

    @property
    def mesh_dimensions(self) -> int:
        """How many dimensions of a mesh the script has divided the parameter over; 0: none."""
        return int(getattr(self._division, "ndim", 0))

    @property
    def value(self) -> OwnGradient | None:
        """The gradient; None: there is none.

        Raises:
            AccumulationError: it is divided in a way that a saved state has no word for.
        """
        found = self._managed.unsharded_accumulated_grad
        if found is None:
            found = getattr(self._whole, "grad", None)
        if found is None:
            return None
        return OwnGradient(local_part(found.detach()), [*map(_word, getattr(found, "placements", ()))])

    def replace(self, gradient: OwnGradient | None) -> None:
        """Keep another gradient; None: none."""
        managed, whole = self._managed, self._whole
        made = None if gradient is None else self._made(gradient)
        if whole is not None:
            whole.grad = made if self._is_of_leaf else None
        if not self._is_of_leaf:
            # FSDP adds what the next backward computes, in either of its places in the same order.
            managed.unsharded_accumulated_grad = made

    def zeros(self) -> OwnGradient:
        """A gradient for a rank that has none: negative zeros, which change nothing that is added to them."""
        whole = self._whole
        assert whole is not None, "it was gathered"
        values = torch.full(self.shape, -0.0, dtype=self._dtype, device=self._managed.device)
        return OwnGradient(values, [*map(_word, getattr(whole, "placements", ()))])

    def gather_once(self) -> None:
        """Let FSDP make the tensor that gradients belong to, if no forward has needed it yet. Collective."""
        if self._whole is None:
            self._unit.unshard()
            self._unit.reshard()

    @property
    def _is_of_leaf(self) -> bool:
        """Whether autograd alone accumulates, in the whole parameter, as since PyTorch 2.15."""
        return isinstance(getattr(type(self._managed), "unsharded_accumulated_grad", None), property)

    @property
    def _whole(self) -> Any:
        return getattr(self._managed, "_unsharded_param", None)

    @property
    def _division(self) -> Any:
        specs = (getattr(self._managed, name, None) for name in ("_unsharded_dtensor_spec", "_tp_spec"))
        return next((spec.mesh for spec in specs if spec is not None), None)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which FSDP accumulates."""
        policy = self._managed.mp_policy
        told: torch.dtype | None = getattr(self._managed, "unsharded_grad_dtype", None)  # since PyTorch 2.15
        dtype: torch.dtype = told or policy.reduce_dtype or policy.param_dtype or self.parameter.dtype
        return dtype

    def _made(self, gradient: OwnGradient) -> Tensor:
        values = gradient.values.to(self._managed.device, self._dtype, copy=True)
        if not gradient.placements:
            return values
        from torch.distributed.tensor import DTensor

        whole = self._whole
        placements = [*map(_placement, gradient.placements)]
        return DTensor.from_local(
            values, self._division, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def _word(placement: Any) -> str:
    """What a saved state calls a placement."""
    if placement.is_replicate():
        return "whole"
    if placement.is_partial() and placement.reduce_op in ("sum", "avg"):
        return str(placement.reduce_op)
    if placement.is_shard() and type(placement).__name__ == "Shard":
        return str(placement.dim)
    raise AccumulationError(
        f"The state cannot be saved inside this accumulation window: a gradient has the placement {placement!r}, which "
        "a saved state cannot describe. Save after optimizer.step()."
    )


def _placement(word: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if word == "whole":
        return Replicate()
    return Shard(int(word)) if word.isdecimal() else Partial(word)


class FSDPGradients(WindowGradients):
    """The whole gradients that FSDP keeps until it reduces them, of all models that a strategy divides."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models, or stages, of this rank that FSDP divides."""
        divided: list[nn.Module] = self.strategy.divided
        return divided

    @property
    def group(self) -> Any:
        """The ranks that reduce them together; None: all ranks of the world."""
        return None

    def unreduced(self, parameters: Mapping[str, Tensor]) -> dict[str, UnreducedGradient]:
        """The places of gradients of parameters that FSDP gathers."""
        held = {id(each.parameter): each for each in _gathered(self.models)}
        return {name: held[id(parameter)] for name, parameter in parameters.items() if id(parameter) in held}

    def set_unreduced(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, OwnGradient | None]
    ) -> None:
        """Let FSDP keep other gradients; those of parameters that have no name here are dropped.

        FSDP reduces a unit with the parameters that have a gradient, so these must be the same on all ranks. Where
        another rank has one, this rank gets zeros. What is zero on all ranks needs no whole tensor: parts of zeros take
        its place.
        """
        wanted = {id(parameters[name]): gradient for name, gradient in gradients.items()}
        held = [*_gathered(self.models)]
        mine = [
            _NONE
            if id(each.parameter) not in wanted
            else _ZEROS
            if wanted[id(each.parameter)] is None
            else _VALUES
            for each in held
        ]
        levels = [max(level) for level in zip(*gather_object([mine], group=self.group), strict=True)]
        with torch.inference_mode(False), torch.no_grad():
            for model in self.models:
                reshard(model)
            for each, level in zip(held, levels, strict=True):
                if level != _VALUES:
                    each.replace(None)
                    if level == _ZEROS and each.parameter.grad is None:
                        each.parameter.grad = torch.zeros_like(each.parameter)
                    continue
                each.gather_once()
                each.replace(wanted.get(id(each.parameter)) or each.zeros())


def _gathered(models: Iterable[nn.Module]) -> Iterator[FSDPGradient]:
    """Every parameter that FSDP gathers, each once, in the same order on all ranks."""
    seen: set[int] = set()
    for unit in itertools.chain.from_iterable(map(fsdp_modules, models)):
        for group in fsdp_groups(unit):
            for managed in group.fsdp_params:
                if id(managed) not in seen:
                    seen.add(id(managed))
                    yield FSDPGradient(managed, unit)
