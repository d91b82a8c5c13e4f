"""State of one `Accelerator`: what it decided, and where its gradient windows stand.

Both classes belong to an `Accelerator`. Called without arguments, as scripts written for other libraries do, they give
the state of the newest `Accelerator` that is alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from accel_state.enums import DistributedType
from accel_state.errors import StateError
from accel_state.world.process import PartialState

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator
    from accel_train.config import GradientAccumulationPlugin, TorchDynamoPlugin
    from accel_train.data.active_loaders import LoaderLedger
    from accel_train.loop.accumulation import Accumulator

__all__ = ["AcceleratorState", "GradientState", "is_initialized"]

# The one exception to "no process-wide state": a weak reference, read only by calls without arguments.
_newest: weakref.ref[Accelerator] | None = None


def register_newest(accelerator: Accelerator) -> None:
    """Make `accelerator` the one that calls without arguments refer to."""
    global _newest
    _newest = weakref.ref(accelerator)


def _newest_alive() -> Accelerator | None:
    return _newest() if _newest is not None else None


def is_initialized() -> bool:
    """Whether an `Accelerator` is alive in this process."""
    return _newest_alive() is not None


class AcceleratorState:
    """What an `Accelerator` decided; the process's own facts are passed through from `PartialState`.

    Raises:
        StateError: called without arguments while no `Accelerator` is alive, or with options of one.
    """

    mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin

    # Engines and meshes of which this version has none.
    deepspeed_plugin: None = None
    fsdp_plugin: None = None
    megatron_lm_plugin: None = None
    torch_tp_plugin: None = None
    parallelism_config: None = None
    device_mesh: None = None

    def __new__(cls, process_state: PartialState | None = None, **decided: Any) -> AcceleratorState:
        """A new state, or without arguments the newest accelerator's."""
        if process_state is None and not decided:
            newest = _newest_alive()
            if newest is None:
                raise StateError(
                    "AcceleratorState() gives the state of the newest Accelerator, and there is none. Create "
                    "`Accelerator()` first; for ranks and devices alone use `PartialState()`."
                )
            return newest.state
        if not isinstance(process_state, PartialState):
            option = next(iter(decided), "mixed_precision")
            raise StateError(
                f"AcceleratorState takes no options of its own, got {option}. Create Accelerator({option}=…); its "
                "state is then AcceleratorState()."
            )
        return super().__new__(cls)

    def __init__(self, process_state: PartialState | None = None, **decided: Any) -> None:
        if process_state is None:
            return  # __new__ returned a state that exists
        self.__dict__.update(decided, _process_state=process_state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_process_state":
            raise AttributeError(name)
        return getattr(self._process_state, name)

    @property
    def initialized(self) -> bool:
        """Always true: the object exists with its `Accelerator`."""
        return True

    @property
    def distributed_type(self) -> DistributedType:
        """How processes cooperate."""
        kind: DistributedType = self._process_state.distributed_type
        return kind

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with FSDP2."""
        return False

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the newest `Accelerator`, and the process state too if asked; for tests."""
        global _newest
        _newest = None
        if reset_partial_state:
            PartialState.reset()

    def __repr__(self) -> str:
        return f"{self._process_state!r}Mixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Where the gradient windows of an `Accelerator` stand."""

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accumulator: Accumulator | None = None,
        ledger: LoaderLedger | None = None,
    ) -> None:
        if accumulator is None or ledger is None:
            newest = _newest_alive()
            if newest is None:
                raise StateError(
                    "GradientState() gives the gradient state of the newest Accelerator, and there is none. Create "
                    "`Accelerator()` first."
                )
            self.__dict__.update(newest.gradient_state.__dict__)
            return
        assert gradient_accumulation_plugin is not None
        self._accumulator = accumulator
        self._ledger = ledger
        self._plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """Always true: the object exists with its `Accelerator`."""
        return True

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation options that differ from their defaults."""
        return self._plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Planned number of micro-batches in a window."""
        return self._accumulator.num_steps

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        self._accumulator.num_steps = steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers also advance while gradients accumulate."""
        return self._plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window."""
        return self._accumulator.sync_with_dataloader

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are complete: false while a window is being filled."""
        return self._accumulator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulator.sync_gradients = value

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients were reduced by hand on XLA; elsewhere backward reduces them."""
        return True

    @property
    def active_dataloader(self) -> Any | None:
        """The loader being iterated that yielded last."""
        return self._ledger.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders being iterated, the one that began first first."""
        return self._ledger.live

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._ledger.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader yielded its last batch; false outside a loader."""
        active = self._ledger.active
        return active is not None and bool(active.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Real samples in the active loader's last global batch; -1 outside a loader or when unknown."""
        active = self._ledger.active
        return -1 if active is None else int(active.remainder)

    @staticmethod
    def _reset_state() -> None:
        """Nothing is shared between accelerators, so there is nothing to reset; kept for test suites that call it."""
