"""The loss scale of DeepSpeed's engines in fp16, saved in the form of torch's gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from accel_train.state_part import SavedTrees, StatePart, Trees, taken_up

__all__ = ["LossScale", "LossScales", "scale_of"]

_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scale_of(engine: Any) -> LossScale | None:
    """The loss scale of an engine; None: it scales no losses."""
    return LossScale(engine.optimizer) if engine.fp16_enabled() else None


class LossScale:
    """The loss scale of one engine.

    Args:
        optimizer: the engine's optimizer. With ZeRO it has a scaler, without ZeRO fields of one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        zero = hasattr(optimizer, "loss_scaler")
        self._scaler = optimizer.loss_scaler if zero else optimizer.loss_scale_config
        self.is_dynamic = bool(self._scaler.dynamic if zero else self._scaler.dynamic_loss_scale)

    @property
    def value(self) -> float:
        """What losses are multiplied by."""
        return float(self._optimizer.loss_scale)

    def state(self) -> dict[str, Any]:
        """Plain values of the engine."""
        return {name: getattr(self._scaler, name) for name in _FIELDS if hasattr(self._scaler, name)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned, unless the configuration fixes the scale."""
        if self.is_dynamic:
            for name in _FIELDS:
                if name in state and hasattr(self._scaler, name):
                    setattr(self._scaler, name, state[name])

    def load_steps(self, scale: float, good_steps: int) -> None:
        """Take over a scale with which some steps were finite, of another scaler."""
        self.load({"cur_scale": scale, "cur_iter": good_steps, "last_overflow_iter": -1})

    def as_gradient_scaler(self) -> dict[str, Any]:
        """What torch's gradient scaler would save."""
        window = int(getattr(self._scaler, "scale_window", None) or 2000)
        good_steps = 0
        if self.is_dynamic:
            good_steps = (self._scaler.cur_iter - self._scaler.last_overflow_iter - 1) % window
        return {
            "scale": self.value,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": window,
            "_growth_tracker": good_steps,
        }


class LossScales(StatePart):
    """The loss scales of all engines. Without engines' own values a state is another strategy's.

    Args:
        engines: the engines.
    """

    group: ClassVar[str | None] = "optimizers"

    def __init__(self, engines: Sequence[Any]) -> None:
        self._scales = [scale for engine in engines if (scale := scale_of(engine)) is not None]

    def dump(self, trees: Trees) -> None:
        """A shared tree, if losses are scaled; other strategies begin with the lowest scale."""
        if self._scales:
            lowest = min(self._scales, key=lambda scale: scale.value)
            engines = [scale.state() for scale in self._scales]
            trees.shared["scaler"] = {**lowest.as_gradient_scaler(), "engines": engines}

    def expected(self) -> Iterator[str]:
        """The tree, if losses are scaled."""
        if self._scales:
            yield "scaler"

    def load(self, taken: Any, saved: SavedTrees) -> None:
        """Continue with the saved scales."""
        tree = saved.shared.get("scaler")
        if not tree or not self._scales:
            return
        with taken_up("the loss scale", saved.directory):
            engines = tree.get("engines", [])
            for scale, own in zip(self._scales, engines, strict=False):
                scale.load(own)
            for scale in self._scales[len(engines) :]:
                scale.load_steps(float(tree["scale"]), int(tree["_growth_tracker"]))
