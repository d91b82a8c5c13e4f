"""What each strategy supports and refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Capabilities"]


@dataclass(frozen=True)
class Capabilities:
    """What a strategy supports, as data; checked before anything is built or changed.

    Attributes:
        precisions: names of the supported precisions, or None for all.
        device_types: supported device types, or None for all that run operations eagerly; device types with lazy
            operations, such as "xla", must be named.
        needs_process_group: it needs more than one process.
        num_items: it can weight micro-batches by items, as `backward(loss_sum, num_items=n)` asks.
        window: "planned" if the number of micro-batches of a window must be known when the window opens; "any" if
            gradients can still be scaled when it ends.
        hides_gradients: gradients of an unfinished window are not in `parameter.grad`, so that they can neither be
            rescaled nor saved unless `StateAdapter.gradients` or `rank_state` gives them.
        saves_windows: a state can be saved while a window is unfinished.
        max_models: how many models it can train at a time, or None for any number.
        prepares_together: a model and its optimizer must be passed to the same `prepare()` call; a model passed alone
            is only evaluated.
        requires: the package, as `pip install` takes it, that it needs.
        precisions_on: by device type, the supported precisions there, where these are fewer.
        computes_precision: its engine casts models and scales losses itself, so `Precision` does neither.
        communication_hooks: it runs the `comm_hook` of `DistributedDataParallelKwargs`.
        skips_steps: an update can be skipped by not calling `step` and dropping the gradients.
        dimensions: mesh dimensions that can have several ranks, when a script or a launcher sets degrees of
            parallelism.
        separate_steps: ranks can take different numbers of steps, in `join_uneven_inputs()` and in LocalSGD: the
            strategy has `uneven` and `local`.
        in_stages: with `pp_size`, strategy "pp" trains the stages of a pipeline as this one would the model.
    """

    precisions: frozenset[str] | None = None
    device_types: frozenset[str] | None = None
    needs_process_group: bool = False
    num_items: bool = True
    window: str = "any"
    hides_gradients: bool = False
    saves_windows: bool = True
    max_models: int | None = None
    prepares_together: bool = False
    requires: tuple[str, ...] = ()
    precisions_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    computes_precision: bool = False
    communication_hooks: bool = False
    skips_steps: bool = True
    dimensions: frozenset[str] = frozenset({"dp_replicate"})
    separate_steps: bool = False
    in_stages: bool = False

    def precisions_for(self, device_type: str) -> frozenset[str] | None:
        """Names of the supported precisions on a type of device; None: all."""
        return self.precisions_on.get(device_type, self.precisions)
