"""Averages of the weights of a training (EMA, SWA), divided among ranks as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import Part, fill_part, parts_of, reshard
from accel_train.accelerator import Accelerator
from accel_train.errors import AccumulationError, OptionError, PrepareError
from accel_train.strategies.gradients import local_part

__all__ = ["AveragedWeights"]

_LOW = (torch.float16, torch.bfloat16)


class AveragedWeights:
    """Averages a prepared model's parameters over updates (EMA, or SWA without `decay`), also of a sharded model.

    Computes the same as `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, or without `decay`
    its plain mean, but makes no copy of the module, because a divided model cannot be copied. Each rank averages the
    parts that it holds. Nothing is communicated, except where ranks train copies of the model (`LocalSGD`,
    `join_uneven_inputs`): what makes the copies equal makes their averages equal. `save_state` includes the average,
    and `load_state` restores it, also on another number of ranks and under another strategy. Parameters of 16 bits are
    averaged in float32; integers are taken as they are. Buffers are the model's own.

        average = AveragedWeights(accelerator, model, decay=0.999)
        for batch in loader:
            with accelerator.accumulate(model):
                ...
                optimizer.step()
                average.update()
        with average.applied():
            evaluate(model)
            accelerator.save_model(model, "averaged")

    Args:
        accelerator: the `Accelerator` that prepared the model.
        model: the prepared model.
        decay: the weight of the average in each update, from 0 to 1: `average * decay + parameter * (1 - decay)`. None:
            all updates count alike.

    Attributes:
        plain: the model without wrappers.
        count: number of updates in the average.

    Raises:
        OptionError: `decay` is not from 0 to 1.
        PrepareError: an engine holds the parameters in parts of its own. Raised later, in the first `update()`, in
            `applied()` and on saving, if the model's parameters have changed since the constructor.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, decay: float | None = 0.999) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise OptionError(
                f"AveragedWeights(decay={decay}): decay must be a number from 0 to 1, such as 0.999."
            )
        self._accelerator = accelerator
        self._strategy = accelerator.strategy
        self._model = model
        self.plain = self._strategy.plain(model)
        elsewhere = self._strategy.states.parameters_elsewhere(model)
        self._elsewhere = {
            name: Part.nothing(part.shape, _wide(part.tensor.dtype)) for name, part in elsewhere.items()
        }
        self.decay = decay
        self.count = 0
        reshard(self.plain)
        named = NamedModel(self.plain).parameters()  # its tied parameters by every name
        distinct = {id(parameter): name for name, parameter in reversed(named.items())}
        self._parameters = {name: p for name, p in named.items() if distinct[id(p)] == name}
        self._averages = {
            name: _copy(parameter, _wide(parameter.dtype)) for name, parameter in self._parameters.items()
        }
        self._applied = False
        accelerator.register_for_checkpointing(self)
        self._strategy.weight_averages.append(self)

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters to the average, after an optimizer step; inside a window or after a skipped step: nothing.

        Raises:
            AccumulationError: the averages are applied to the model.
        """
        self._refuse_applied("update()")
        accelerator, model = self._accelerator, self._model
        if not accelerator.gradients_complete(model) or accelerator.step_was_skipped(model):
            return
        if self.count == 0:
            self._refuse_others()
            weight = 1.0
        else:
            weight = 1 / (self.count + 1) if self.decay is None else 1 - self.decay
        for name, parameter in self._parameters.items():
            average, value = local_part(self._averages[name]), local_part(parameter.detach())
            if _is_averaged(average):
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.copy_(value)
        self.count += 1

    @contextmanager
    def shared(self) -> Iterator[list[Tensor]]:
        """Context in which the caller makes the averages equal on all ranks, after these trained copies of the model.

        Yields:
            The averages, and the number of updates as one more tensor.
        """
        averages = [local_part(average) for average in self._averages.values() if _is_averaged(average)]
        count = torch.tensor(float(self.count), dtype=torch.float32, device=self._strategy.options.device)
        yield [*averages, count]
        self.count = round(count.item())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the averages are the model's parameters; all ranks enter and leave it together.

        A state that is saved inside would mix both, so `save_state` is refused; `save_model`, `get_state_dict`
        and `whole_parameters` return the averages.
        """
        self._refuse_applied("applied()")
        self._refuse_others()
        kept = {name: _copy(local_part(p)) for name, p in self._parameters.items()}
        self._put({name: local_part(average) for name, average in self._averages.items()})
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        reshard(self.plain)  # else what is gathered would be used once more
        for name, parameter in self._parameters.items():
            local_part(parameter.detach()).copy_(_copy(values[name]))
        self._strategy.precision.values_changed(self.plain)

    def _refuse_applied(self, what: str) -> None:
        if self._applied:
            raise AccumulationError(
                f"AveragedWeights: {what} inside applied(), where the averages replace the model's trained parameters. "
                "Leave applied() first."
            )

    def _refuse_others(self) -> None:
        reshard(self.plain)  # else the model has what was gathered of its parameters
        named = NamedModel(self.plain).parameters()
        known = {id(parameter) for parameter in self._parameters.values()}
        others = [name for name, parameter in named.items() if id(parameter) not in known]
        others += [name for name in self._parameters if name not in named]
        if others:
            raise PrepareError(
                f"{len(others)} parameters of {type(self.plain).__name__} were changed after AveragedWeights was "
                f"created, the first {others[0]!r}: they are not averaged. Create it after prepare(), and a new one "
                "when parameters are added or replaced."
            )

    def held_tensors(self) -> list[Tensor]:
        """The averages, which `Accelerator.offload_states` moves with all other states."""
        return list(self._averages.values())

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, divided like the parameters, and the number of updates in them."""
        self._refuse_applied("save_state()")
        self._refuse_others()
        averages: dict[str, Any] = dict(self._averages)
        if self._elsewhere:  # other ranks list these too, and do not hold them
            averages = {
                name: parts_of(average) or Part.nothing(average.shape, average.dtype)
                for name, average in averages.items()
            }
        # In one order on all ranks, whose states are compared.
        return {"count": self.count, "averages": dict(sorted({**averages, **self._elsewhere}.items()))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; each rank takes its part of whole averages.

        Raises:
            PrepareError: the names or shapes are not those of the model's parameters.
        """
        self._refuse_applied("load_state()")
        saved = state_dict["averages"]
        known = {name: tuple(average.shape) for name, average in (self._averages | self._elsewhere).items()}
        wrong = [
            name
            for name in {**saved, **known}
            if name not in saved or known.get(name) != tuple(saved[name].shape)
        ]
        if wrong:
            raise PrepareError(
                f"The saved averages are not of {type(self.plain).__name__}: {wrong[0]!r} (of {len(wrong)} names) is "
                "missing or has another shape. Build the model as it was when the state was saved."
            )
        for name, average in self._averages.items():
            fill_part(average, saved[name])
        self.count = int(state_dict["count"])


@torch.no_grad()
def _copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values in memory of their own.

    They are computed: what torch_xla copies shares the memory of the original, which the next update in place frees.
    """
    return tensor.detach().to(dtype or tensor.dtype) * 1


def _is_averaged(tensor: Tensor) -> bool:
    """Whether the mean of its values means something; integers, such as quantised weights, are taken as they are."""
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW else dtype
