"""Relinking optimizers to parameters that preparation replaced.

Sharding, tensor parallelism and conversions to other layers put new `Parameter`s into a model. An optimizer that was
built before still holds the old ones, which no longer get gradients: it would train nothing, without an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.parts import is_sharded
from accel_train.errors import PrepareError

__all__ = ["Replaced", "followed", "link_parts", "step_both_kinds"]


class Replaced:
    """Parameters that were replaced while models were prepared, and their replacements; keeps neither alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._led_to: dict[int, list[int]] = {}  # keys of what a parameter is in the place of, by its `id`

    def add(self, old: Tensor, new: Tensor) -> None:
        """Record that `new` replaces `old`, and everything that `old` had replaced."""
        key, successor = id(old), id(new)
        latest = weakref.ref(new, lambda _: self._led_to.pop(successor, None))
        keys = [key]
        for earlier in self._led_to.pop(key, []):  # `old` may be gone when somebody asks for its successor
            found = self._found.get(earlier)
            if found is not None and found[1]() is old:
                self._found[earlier] = found[0], latest
                keys.append(earlier)
        self._found[key] = weakref.ref(old, lambda _: self._found.pop(key, None)), latest
        self._found.pop(successor, None)  # what is in a model has no successor
        self._led_to.setdefault(successor, []).extend(keys)

    def successor(self, parameter: Tensor) -> Tensor | None:
        """The current replacement of `parameter`; None if it was never replaced, or its model no longer exists."""
        found = self._found.get(id(parameter))
        return None if found is None or found[0]() is not parameter else found[1]()

    def __contains__(self, parameter: Tensor) -> bool:
        found = self._found.get(id(parameter))
        return found is not None and found[0]() is parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return Replaced, ()  # parameters of a copy are other objects

    def relink(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer and its state the parameters that are in the models now.

        So do lists that it keeps besides its groups, and optimizers inside it. Lists stay the same objects, which an
        optimizer may keep in several places.

        Raises:
            PrepareError: the optimizer holds a replaced parameter whose successor no longer exists, or state that
                cannot be divided like the new parameter: nothing is changed then. Or it cannot step its parameters: see
                `step_both_kinds`.
        """
        if not self._found:
            return
        linked: list[tuple[Any, int, Tensor, Tensor]] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self:
                    continue
                new = self.successor(parameter)
                if new is None:
                    raise PrepareError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} (group "
                        f"{number}, place {place}) that preparation replaced in a model that no longer exists; it "
                        "would train nothing. Build the optimizer from the prepared model's parameters()."
                    )
                linked.append((group["params"], place, parameter, new))
        states = {
            id(old): {
                key: _divided(value, old, new, optimizer) for key, value in optimizer.state[old].items()
            }
            for _, _, old, new in linked
            if old in optimizer.state
        }
        for params, place, old, new in linked:
            params[place] = new
            if old in optimizer.state:
                del optimizer.state[old]
                optimizer.state[new] = states[id(old)]
        if linked:
            step_both_kinds(optimizer)
            for own in vars(optimizer).values():
                if isinstance(own, torch.optim.Optimizer):
                    self.relink(own)
                elif isinstance(own, list):
                    own[:] = [item if (new := self.successor(item)) is None else new for item in own]


@contextlib.contextmanager
def followed(
    models: Sequence[nn.Module],
    replaced: Replaced,
    prepared: Callable[[], Iterable[nn.Module]],
) -> Iterator[None]:
    """Record each parameter's name, and afterwards which parameter has that name now.

    Args:
        models: the models before they are prepared, without wrappers.
        replaced: records the replacements.
        prepared: called at the end; the same models, prepared and without wrappers, in the same order.
    """
    before = [list(model.named_parameters(remove_duplicate=False)) for model in models]
    yield
    for named, model in zip(before, prepared(), strict=True):
        now = list(model.named_parameters(remove_duplicate=False))
        if [(name, id(new)) for name, new in now] == [(name, id(old)) for name, old in named]:
            continue  # as most strategies leave it
        after = accel_ckpt.canonical_state_dict(dict(now), model)
        for name, old in accel_ckpt.canonical_state_dict(dict(named)).items():
            new = after.get(name)
            if new is not None and new is not old:
                replaced.add(old, new)


def link_parts(optimizer: torch.optim.Optimizer, gathered: Mapping[int, Tensor]) -> None:
    """Replace whole parameters by this rank's parts in an optimizer that was built while parameters were gathered.

    Args:
        optimizer: changed in place.
        gathered: parts by the `id` of the whole parameter that is in the model in its place now.

    Raises:
        PrepareError: the optimizer has state for a whole parameter, or holds one whose memory is freed. Nothing is
            changed then.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            known = id(parameter) in gathered
            if (known and parameter in optimizer.state) or (not known and _is_freed(parameter)):
                raise PrepareError(
                    f"{type(optimizer).__name__} was built while the parameters of a sharded model were gathered, as a "
                    f"forward leaves them for its backward, and holds a whole one of shape {tuple(parameter.shape)} "
                    f"(group {number}, place {place}), which gets no gradient. Build it from the model's parameters() "
                    "before such a forward, and prepare it before the model runs again."
                )
    for group in optimizer.param_groups:
        group["params"][:] = [gathered.get(id(parameter), parameter) for parameter in group["params"]]


def step_both_kinds(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step whole and divided parameters of one group one by one, unless the script chose a kernel.

    Torch's multi-tensor kernels, its default on accelerators, take only one kind at a time.

    Raises:
        PrepareError: the script has chosen such a kernel, which torch would refuse in the middle of a step.
    """
    for number, group in enumerate(optimizer.param_groups):
        divided = sum(map(is_sharded, group["params"]))
        if not 0 < divided < len(group["params"]):
            continue
        if option := next((name for name in ("fused", "foreach") if group.get(name)), None):
            raise PrepareError(
                f"Group {number} of {type(optimizer).__name__} has {option}=True, {divided} divided parameters "
                f"(DTensor) and {len(group['params']) - divided} whole ones; torch cannot step both together. Leave "
                f"out {option}, or give the optimizer one group of each kind."
            )
        if "foreach" in group:
            group["foreach"] = False


def _is_freed(parameter: Tensor) -> bool:
    """Whether it is a whole parameter whose memory FSDP has given back."""
    if is_sharded(parameter) or parameter.is_meta or not parameter.numel():
        return False
    return parameter.layout == torch.strided and parameter.untyped_storage().size() == 0


def _divided(value: Any, old: Tensor, new: Any, optimizer: torch.optim.Optimizer) -> Any:
    """State of an old parameter as that of the new one: divided among ranks as the new one is."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != old.shape:
        return value
    if is_sharded(value) or value.shape != new.shape:
        raise PrepareError(
            f"{type(optimizer).__name__} already has state of shape {tuple(value.shape)}"
            f"{' that is divided among ranks' if is_sharded(value) else ''}, for a parameter that this rank holds as "
            f"{tuple(new.shape)} after preparation. Prepare the optimizer before it has state, then load "
            "the state with load_state()."
        )
    if not is_sharded(new):
        return value.to(new.device)
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the same whole value, so nothing needs to be sent.
    return distribute_tensor(value.to(new.device), new.device_mesh, new.placements, src_data_rank=None)
