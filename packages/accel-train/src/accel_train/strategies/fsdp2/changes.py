"""Changes of a divided model after it was prepared: parameters added, frozen, unfrozen or replaced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_ckpt.parts import is_sharded, reshard
from accel_state.log import get_logger
from accel_state.operations.collectives import broadcast
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.initial_values import agree

__all__ = ["ParameterWatch"]

_logger = get_logger(__name__)
_is_trained = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in a module that holds a parameter.

    Attributes:
        module: whose place it is; kept, so that its `id` stays its own.
        name: of the parameter in the module.
        parameter: what is there while nothing is gathered.
        trained: whether it required a gradient.
        unit: the module that gathers it; None: every rank holds it whole.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    trained: bool
    unit: nn.Module | None


class _Picture:
    """What all modules of a model held at one time, compared without a Python call for each of them.

    torch tells nobody when a parameter is frozen, or put into a module, so nothing less would see every change.

    Args:
        model: looked at now.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        tables: list[dict[str, Any]] = [module._parameters for module in modules]
        self._tables = tables + [module._modules for module in modules]
        self._sizes = [*map(len, self._tables)]
        self._filled = [table for table in self._tables if table]
        self._names = [*chain.from_iterable(self._filled)]
        self._held = [*chain.from_iterable(map(dict.values, self._filled))]
        self._parameters = [item for item in self._held if isinstance(item, torch.Tensor)]
        self._trained = [*map(_is_trained, self._parameters)]

    def holds(self) -> bool:
        """Whether the model has the same objects in the same places, and the same parameters are trained."""
        return (
            [*map(len, self._tables)] == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._held))
            and [*chain.from_iterable(self._filled)] == self._names
            and [*map(_is_trained, self._parameters)] == self._trained
        )


class ParameterWatch:
    """Forward pre-hook of a divided model that looks for changes, before they could be lost or differ between ranks.

    FSDP manages the parameters that the model had when it was divided. A parameter that is added later (an adapter)
    would start with other values on each rank, and its gradients would not be averaged. Without a change a call costs
    only a comparison with the former model, some microseconds, and no communication.

    Args:
        model: the divided model, without wrappers.
        changed: called after each change.
        lists: modules of the model whose divided parameters are not gathered by FSDP.
    """

    def __init__(
        self, model: nn.Module, changed: Callable[[], None], lists: Collection[nn.Module] = ()
    ) -> None:
        self.model = model
        self._lists = lists
        self._kind = type(model).__name__.removeprefix("FSDP")  # the engine makes a class of that name
        self._changed = changed
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._sizes: Counter[int] = Counter()  # divided parameters of each unit, by the unit's `id`
        # The unchanged model, while nothing is gathered, and while units are that forward and backward leave so.
        self._unchanged: deque[_Picture] = deque(maxlen=4)
        self._note()

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Handle changes of the model, on all ranks alike.

        Raises:
            PrepareError: a divided parameter was replaced, or the ranks' models have become different.
        """
        if torch.compiler.is_compiling():
            return  # Dynamo would trace the walk and guard on every module
        for picture in self._unchanged:
            if picture.holds():
                return
        if self._has_changed():
            self._take_up()
        else:
            self._unchanged.append(_Picture(self.model))

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters of which every rank holds the whole values, each once."""
        found = {id(slot.parameter): slot.parameter for slot in self._slots.values() if slot.unit is None}
        return list(found.values())

    def gathered(self) -> dict[int, nn.Parameter]:
        """The parameters that are gathered now, by the `id` of the whole tensors in their place."""
        return {
            id(there): slot.parameter
            for module, name, there, _ in _walk(self.model, self._lists)
            if (slot := self._slots.get((id(module), name))) is not None
            if slot.unit is not None and there is not slot.parameter
        }

    def _note(self) -> None:
        """Remember the model as it is; nothing is gathered."""
        self._slots.clear()
        self._sizes.clear()
        for module, name, parameter, unit in _walk(self.model, self._lists):
            divided = unit if is_sharded(parameter) else None
            self._slots[id(module), name] = _Slot(module, name, parameter, parameter.requires_grad, divided)
            if divided is not None:
                self._sizes[id(divided)] += 1
        self._unchanged.clear()

    def _has_changed(self) -> bool:
        slots = self._slots
        elsewhere: Counter[int] = Counter()
        count = 0
        for module, name, parameter, _ in _walk(self.model, self._lists):
            slot = slots.get((id(module), name))
            if slot is None or parameter.requires_grad is not slot.trained:
                return True
            if parameter is not slot.parameter:
                if slot.unit is None or _is_other_part(parameter, slot.parameter):
                    return True
                elsewhere[id(slot.unit)] += 1
            count += 1
        # A unit is gathered as a whole.
        return count != len(slots) or any(self._sizes[unit] != number for unit, number in elsewhere.items())

    def _take_up(self) -> None:
        agree(self.model)
        self._refuse_replaced()
        wanted = {
            (id(module), name): parameter.requires_grad
            for module, name, parameter, _ in _walk(self.model, self._lists)
        }
        reshard(self.model)
        units: dict[int, nn.Module] = {}
        for key, slot in self._slots.items():
            trained = wanted.get(key, slot.trained)
            if trained is not slot.trained and slot.unit is not None:
                slot.parameter.requires_grad_(trained)
                units[id(slot.unit)] = slot.unit
        with torch.inference_mode(False), torch.no_grad():
            for unit in units.values():
                if isinstance(unit, FSDPModule):
                    unit.unshard()  # it looks again for what is trained, and in which dtype gradients are reduced
                    unit.reshard()
        self._share_added()
        self._note()
        self._changed()

    def _refuse_replaced(self) -> None:
        """Refuse what the engine would overwrite, or never gather."""
        present = list(_walk(self.model, self._lists))
        elsewhere: Counter[int] = Counter()
        for module, name, parameter, _ in present:
            slot = self._slots.get((id(module), name))
            if slot is not None and slot.unit is not None and parameter is not slot.parameter:
                elsewhere[id(slot.unit)] += 1
        for module, name, parameter, _ in present:
            slot = self._slots.get((id(module), name))
            if slot is None:
                replaced = is_sharded(parameter)
            elif slot.unit is None or parameter is slot.parameter:
                continue
            else:
                gathered = elsewhere[id(slot.unit)] == self._sizes[id(slot.unit)]
                replaced = _is_other_part(parameter, slot.parameter) or not gathered
            if replaced:
                raise PrepareError(
                    f"The parameter {self._name(module, name)!r} of {self._kind} was replaced after "
                    "the model was prepared, so that neither the sharding nor its optimizer know it. Replace "
                    "parameters before prepare(), or copy values into those that are there: "
                    "`with torch.no_grad(): parameter.copy_(values)`, load_state_dict(…) without assign=True, or "
                    "accelerator.load_state()."
                )

    def _share_added(self) -> None:
        """Give parameters that were added rank 0's values; every rank keeps them whole."""
        added: dict[int, tuple[str, nn.Parameter]] = {}
        for module, name, parameter, _ in _walk(self.model, self._lists):
            slot = self._slots.get((id(module), name))
            if slot is None or (slot.unit is None and slot.parameter is not parameter):
                added.setdefault(id(parameter), (self._name(module, name), parameter))
        if not added:
            return
        names = [name for name, _ in added.values()]
        _logger.warning(
            f"{len(names)} parameters were added to {self._kind} after it was prepared "
            f"({names[0]}{', …' if len(names) > 1 else ''}): all ranks take rank 0's values, and keep them whole. Add "
            "them before prepare() to have them sharded"
        )
        broadcast([parameter.detach() for _, parameter in added.values()])

    def _name(self, module: nn.Module, name: str) -> str:
        prefix = next((prefix for prefix, item in self.model.named_modules() if item is module), "")
        return f"{prefix}.{name}".lstrip(".")


def _walk(
    model: nn.Module, lists: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Module]]:
    """Every place that holds a parameter, and the unit that it is in."""
    seen = {id(model)}
    stack = [(model, model)]
    while stack:
        module, unit = stack.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter, unit
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append((child, child if isinstance(child, FSDPModule) or child in lists else unit))


def _is_other_part(parameter: Any, known: Any) -> bool:
    """Whether it is divided as the known one is; a gathered one is whole, or divided among fewer ranks."""
    return is_sharded(parameter) and parameter.device_mesh == known.device_mesh
