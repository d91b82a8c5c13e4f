"""State of one `Accelerator`: its settings, and where its accumulation windows stand.

Both classes belong to an `Accelerator`. Called without arguments, as scripts written for other libraries do, they
return the state of the newest `Accelerator`: its settings for as long as the process runs, as clients of Accelerate
expect, and the state of its windows for as long as it is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from accel_state.enums import DistributedType
from accel_state.errors import StateError
from accel_state.world.process import PartialState
from accel_train.errors import ArgumentTypeError, OptionError

if TYPE_CHECKING:
    from accel_train.data.active_loaders import ActiveLoaders
    from accel_train.loop.accumulation import Accumulator
    from accel_train.plugins import GradientAccumulationPlugin, ParallelismConfig, TorchDynamoPlugin
    from accel_train.strategies.base import Strategy

__all__ = ["AcceleratorState", "GradientState", "is_initialized", "newest_strategy", "register_newest"]


class _Owner(Protocol):
    """What is known here of an `Accelerator`."""

    state: AcceleratorState
    gradient_state: GradientState

    @property
    def strategy(self) -> Strategy: ...


# The one exception to "no process-wide state": read only by calls without arguments. The state of an `Accelerator` is
# kept when that is gone; it holds no models.
_newest: weakref.ref[Any] | None = None
_newest_state: AcceleratorState | None = None


def register_newest(accelerator: _Owner) -> None:
    """Make `accelerator` the one that calls without arguments refer to."""
    global _newest, _newest_state
    _newest, _newest_state = weakref.ref(accelerator), accelerator.state


def _newest_alive() -> _Owner | None:
    return _newest() if _newest is not None else None


def newest_strategy() -> Strategy | None:
    """The strategy of the newest `Accelerator` that is alive; None without one."""
    newest = _newest_alive()
    return None if newest is None else newest.strategy


def is_initialized() -> bool:
    """Whether an `Accelerator` was created in this process."""
    return _newest_state is not None


class _SharedState:
    """What `AcceleratorState()` would say, as a dictionary; empty before there is an `Accelerator`."""

    def __get__(self, state: AcceleratorState | None, owner: type[AcceleratorState]) -> dict[str, Any]:
        state = _newest_state if state is None else state
        if state is None:
            return {}
        return {**vars(state.process_state), **vars(state), "mixed_precision": state.mixed_precision}


class AcceleratorState:
    """The settings of an `Accelerator`, such as strategy and precision, and the attributes of `PartialState`.

    Raises:
        StateError: called without arguments before there is an `Accelerator`, or with options of an `Accelerator`.
    """

    dynamo_plugin: TorchDynamoPlugin
    parallelism_config: ParallelismConfig | None = None
    _shared_state = _SharedState()

    def __new__(cls, process_state: PartialState | None = None, **decided: Any) -> AcceleratorState:
        """A new state, or without arguments the newest accelerator's."""
        if process_state is None and not decided:
            if _newest_state is None:
                raise StateError(
                    "AcceleratorState() returns the state of the newest Accelerator, and there is none. Create "
                    "`Accelerator()` first; for ranks and devices alone use `PartialState()`."
                )
            return _newest_state
        if not isinstance(process_state, PartialState):
            option = next(iter(decided), "mixed_precision")
            raise StateError(
                f"AcceleratorState takes no options of its own, got {option}. Create Accelerator({option}=…); its "
                "state is then AcceleratorState()."
            )
        return super().__new__(cls)

    def __init__(
        self, process_state: PartialState | None = None, *, strategy: Strategy | None = None, **decided: Any
    ) -> None:
        if process_state is None or strategy is None:
            return  # __new__ returned a state that exists
        # A strategy knows the models that it trains, and this object outlives them.
        facts = {
            ("_mixed_precision" if name == "mixed_precision" else name): value
            for name, value in decided.items()
        }
        self.__dict__.update(facts, _process_state=process_state, _strategy=weakref.ref(strategy))
        options = strategy.options
        self._config, self._kind = options.config, strategy.distributed_type or process_state.distributed_type
        mesh = options.mesh.device_mesh
        asked = self.parallelism_config is not None
        divided = mesh is not None and any(not name.startswith("dp_") for name in mesh.mesh_dim_names or ())
        self._mesh = mesh if asked or divided else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_process_state", "_strategy"):
            raise AttributeError(name)
        try:
            return getattr(self._process_state, name)
        except AttributeError as error:
            raise AttributeError(f"'AcceleratorState' object has no attribute {name!r}: {error}") from None

    @property
    def initialized(self) -> bool:
        """Always true: the object exists with its `Accelerator`."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, ({**vars(self), "_strategy": self._strategy()},)

    @property
    def mixed_precision(self) -> str:
        """The precision that models compute in: "no", "fp16", "bf16" or "fp8"."""
        return self._mixed_precision

    @property
    def _mixed_precision(self) -> str:
        """As `mixed_precision`, under the name that clients of Accelerate write.

        Raises:
            OptionError: another one is written: models, scaler and loss scaling were set up for this one.
        """
        precision: str = vars(self)["_mixed_precision"]
        return precision

    @_mixed_precision.setter
    def _mixed_precision(self, precision: str) -> None:
        if precision != self._mixed_precision:
            raise OptionError(
                f"_mixed_precision cannot become {precision!r}: this Accelerator was set up for "
                f"{self._mixed_precision!r}. Create Accelerator(mixed_precision={precision!r})."
            )

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.process_state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.process_state.use_distributed

    @property
    def process_state(self) -> PartialState:
        """The `PartialState` of this process."""
        state: PartialState = self._process_state
        return state

    @property
    def strategy(self) -> Strategy:
        """The strategy of the `Accelerator`.

        Raises:
            StateError: the `Accelerator` is gone.
        """
        strategy: Strategy | None = self._strategy()
        if strategy is None:
            raise StateError("The Accelerator of this AcceleratorState is gone, and its strategy with it.")
        return strategy

    @property
    def distributed_type(self) -> DistributedType:
        """How processes cooperate. A client may assign another value, which changes nothing else."""
        return self._kind

    @distributed_type.setter
    def distributed_type(self, kind: DistributedType) -> None:
        self._kind = DistributedType(kind)

    @property
    def device_mesh(self) -> Any:
        """PyTorch's `DeviceMesh` of the dimensions with more than one rank; None for data parallelism alone.

        Replicas and shards without a `ParallelismConfig` count as data parallelism alone, as clients expect. A client
        may assign another value, which changes nothing else.
        """
        return self._mesh

    @device_mesh.setter
    def device_mesh(self, mesh: Any) -> None:
        self._mesh = mesh

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed, the selected one of several; None if another strategy runs."""
        plugin = self._plugin("deepspeed_plugin")
        return getattr(plugin, "active", plugin)

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The plugins of DeepSpeed by name; None if another strategy runs, or there is one without a name."""
        return getattr(self._plugin("deepspeed_plugin"), "plugins", None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin that has this name in `deepspeed_plugins`."""
        return self._named_plugins().get(name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Use one of `deepspeed_plugins` for the models that are prepared next."""
        self._named_plugins().select(name)

    def _named_plugins(self) -> Any:
        plugins = self._plugin("deepspeed_plugin")
        if not hasattr(plugins, "plugins"):
            raise StateError(
                "This Accelerator has no named DeepSpeed plugins. Pass Accelerator(deepspeed_plugins={name: "
                "DeepSpeedPlugin(…)})."
            )
        return plugins

    @property
    def fsdp_plugin(self) -> Any:
        """The plugin that selected fully sharded data parallelism; None if another strategy runs."""
        return self._plugin("fsdp_plugin")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The plugin that selected Megatron-LM; None if another strategy runs."""
        return self._plugin("megatron_lm_plugin")

    @property
    def torch_tp_plugin(self) -> Any:
        """The plugin that selected tensor parallelism; None if another strategy runs."""
        return self._plugin("torch_tp_plugin")

    def _plugin(self, argument: str) -> Any:
        return self._config if getattr(type(self._config), "argument", None) == argument else None

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with FSDP2."""
        return self.distributed_type is DistributedType.FSDP

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the newest `Accelerator`, and the process state too if asked; for tests."""
        global _newest, _newest_state
        _newest = _newest_state = None
        if reset_partial_state:
            PartialState.reset()

    def __repr__(self) -> str:
        return f"{self._process_state!r}Mixed precision type: {self.mixed_precision}\n"


def _restored(facts: dict[str, Any]) -> AcceleratorState:
    """A state that was pickled; without arguments the class would return the newest one."""
    state = object.__new__(AcceleratorState)
    strategy = facts["_strategy"]
    vars(state).update(facts, _strategy=_gone if strategy is None else weakref.ref(strategy))
    return state


def _gone() -> None:
    return None


class _PluginKwargs(dict[str, Any]):
    """Options of accumulation; what is written changes them.

    Args:
        accumulator: has those that may change.
        current: as they are.
    """

    def __init__(self, accumulator: Accumulator, current: Mapping[str, Any]) -> None:
        super().__init__(current)
        self._accumulator = accumulator

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in ("num_steps", "sync_with_dataloader"):
            raise OptionError(
                f"plugin_kwargs[{name!r}] cannot be written. Pass Accelerator(gradient_accumulation_plugin="
                f"GradientAccumulationPlugin({name}={value!r}))."
            )
        setattr(self._accumulator, name, value)
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write several."""
        for name, value in dict(*args, **kwargs).items():
            if name not in self or self[name] != value:
                self[name] = value


class GradientState:
    """Where the gradient accumulation of an `Accelerator` stands."""

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accumulator: Accumulator | None = None,
        ledger: ActiveLoaders | None = None,
    ) -> None:
        if accumulator is None or ledger is None:
            newest = _newest_alive()
            if newest is None:
                raise StateError(
                    "GradientState() returns the gradient state of the newest Accelerator, and there is none. Create "
                    "`Accelerator()` first."
                )
            self.__dict__.update(newest.gradient_state.__dict__)
            return
        assert gradient_accumulation_plugin is not None
        self._accumulator = accumulator
        self._ledger = ledger
        ledger.gradient_state = self
        self._plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """Always true: the object exists with its `Accelerator`."""
        return True

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation options that differ from their defaults, as they are now.

        ``num_steps`` and ``sync_with_dataloader`` may be written; the others are options of the plugin.
        """
        current = self._plugin.to_kwargs()
        for name, default in (("num_steps", 1), ("sync_with_dataloader", True)):
            value = getattr(self._accumulator, name)
            if value != (getattr(self._plugin, name) or default):
                current[name] = value
        return _PluginKwargs(self._accumulator, current)

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step, as planned."""
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
        """Whether gradients are complete: False inside an accumulation window, True at its last micro-batch."""
        return self._accumulator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulator.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set `sync_gradients`; the name under which loops that accumulate by themselves do so, such as transformers'.

        It decides whether clipping, the step of a prepared optimizer and that of a prepared scheduler take effect. It
        scales no loss, and it does not hold back the reduction of gradients, which `Accelerator.no_sync` does.

        Args:
            sync_gradients: whether gradients are complete after the next backward.

        Raises:
            ArgumentTypeError: it is neither True nor False.
        """
        if not isinstance(cast(object, sync_gradients), bool):
            raise ArgumentTypeError(
                f"_set_sync_gradients() takes True or False, got {type(sync_gradients).__name__}: "
                f"{sync_gradients!r:.80}."
            )
        self._accumulator.sync_gradients = sync_gradients

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
        """The loaders being iterated, oldest first."""
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
