"""Options of fully sharded data parallelism."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accel_state.config.sections.fsdp import (
    FSDP_HYBRID_STRATEGIES,
    FSDP_RESHARDS,
    FSDP_SHARDING_STRATEGIES,
    FsdpSection,
)
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError
from accel_train.plugins.base import SectionPlugin, StrategyPlugin, positional, writable

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["FullyShardedDataParallelPlugin"]

# Names of version 1 in configuration files to those of torch's enumeration.
_TORCH_SHARDING = MappingProxyType({"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"})
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "no": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_TRUTHS = (
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "cpu_ram_efficient_loading",
    "activation_checkpointing_offload",
)
_POLICY_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


@writable
@positional(
    "fsdp_version",
    "sharding_strategy",
    "reshard_after_forward",
    "backward_prefetch",
    "mixed_precision_policy",
    "auto_wrap_policy",
    "cpu_offload",
    "ignored_modules",
    "state_dict_type",
    "state_dict_config",
    "optim_state_dict_config",
    "limit_all_gathers",
    "use_orig_params",
    "param_init_fn",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
    "transformer_cls_names_to_wrap",
    "min_num_params",
    "dp_replicate_size",
    "checkpoint",
)
@dataclass(frozen=True, repr=False, eq=False)
class FullyShardedDataParallelPlugin(StrategyPlugin, SectionPlugin, FsdpSection):
    """Shard parameters, gradients and optimizer states over ranks with `torch.distributed.fsdp.fully_shard` (FSDP2).

    Passing one selects the strategy "fsdp2"; unset fields come from the launcher's environment. Options of FSDP
    version 1 (`FullyShardedDataParallel`) are translated; `translations` says how. "Version 1 only" below marks options
    that only that version needs.

    Attributes:
        fsdp_version: 2; 1 is accepted, and trains with version 2.
        sharding_strategy: version 1 only. FULL_SHARD and HYBRID_SHARD free gathered parameters after forward,
            SHARD_GRAD_OP and HYBRID_SHARD_ZERO2 keep them until backward; the hybrid ones keep a replica of the model
            on each machine.
        reshard_after_forward: free gathered parameters after forward; a number of at least 2 reshards them over groups
            of that many ranks. A version 1 name is read as `sharding_strategy`.
        backward_prefetch: version 1 only; version 2 always gathers the next parameters before they are needed
            (BACKWARD_PRE).
        mixed_precision_policy: `MixedPrecisionPolicy`, a mapping with its fields, a dtype or its name for all of them,
            or version 1's `MixedPrecision`; None: follows `mixed_precision` of the `Accelerator`.
        auto_wrap_policy: which modules are sharded as one unit: "transformer_based_wrap" (classes by name),
            "size_based_wrap", "no_wrap" (the model is one unit), a function from a module to whether it is a unit, or a
            policy of `torch.distributed.fsdp.wrap`. None: the classes of `transformer_cls_names_to_wrap`, else the
            model's `_no_split_modules`, else the repeated blocks of its `ModuleList`s.
        cpu_offload: keep parameters, gradients and optimizer states in host memory between uses. True, False or a
            policy of `fully_shard`; reads as a policy, `CPUOffloadPolicy` or `OffloadPolicy`.
        ignored_modules: modules whose parameters stay whole on every rank: modules, or a regular expression that
            matches their whole name.
        state_dict_type: SHARDED_STATE_DICT or FULL_STATE_DICT; checkpoints are the same for both, and any number of
            ranks loads them.
        state_dict_config, optim_state_dict_config: version 1 only; refused, because state dicts are always on the CPU.
        limit_all_gathers: version 1 only; version 2 always limits them.
        use_orig_params: version 1 only; version 2 always has the original parameters.
        param_init_fn: called with each module that has parameters on the meta device, after memory is allocated for
            them; None: the module's `reset_parameters`.
        sync_module_states: ranks start with rank 0's weights; False: the script makes them equal.
        forward_prefetch: in forward, gather the next unit's parameters while the current unit computes.
        activation_checkpointing: recompute the activations of every unit in backward instead of storing them. True: all
            of them; "selective": all except the outputs of matrix products, convolutions and attention; a function: it
            chooses, as `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        cpu_ram_efficient_loading: only rank 0 needs the weights, and sends each rank its part; the other ranks may have
            their model on the meta device.
        transformer_cls_names_to_wrap: names of the classes whose instances are units.
        min_num_params: smallest number of parameters of a unit under "size_based_wrap".
        activation_checkpointing_offload: keep the inputs of checkpointed units in host memory.
        dp_replicate_size: number of replicas of the model, each sharded over a part of the ranks (HSDP).
        checkpoint: weights of a model that is on the meta device, as `load_checkpoint_in_model` takes them; each rank
            reads the parts that it keeps.

    Raises:
        OptionError: a value cannot be used.
        IncompatibleOptionsError: two options exclude each other.
        ConfigError: an option is unset, and its environment variable holds a value that cannot be used.
    """

    strategy: ClassVar[str] = "fsdp2"
    section: ClassVar[str] = "fsdp"
    argument: ClassVar[str] = "fsdp_plugin"
    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "fsdp_version": 2,
            "cpu_offload": False,
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": True,
            "forward_prefetch": False,
            "activation_checkpointing": False,
            "activation_checkpointing_offload": False,
            "cpu_ram_efficient_loading": False,
            "min_num_params": 100_000_000,
        }
    )

    activation_checkpointing: Any = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: str | Iterable[nn.Module] | None = None  # type: ignore[assignment]
    state_dict_type: Any = None
    transformer_cls_names_to_wrap: Any = None
    mixed_precision_policy: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    param_init_fn: Callable[[nn.Module], None] | None = None
    dp_replicate_size: int | None = None
    checkpoint: str | Path | None = None

    def check(self) -> Mapping[str, Any]:
        """Refuse values that cannot be used; normalise names, sharding and policies."""
        if str(self.fsdp_version) not in ("1", "2"):
            raise OptionError(
                f"fsdp_version is {self.fsdp_version!r}; expected 2, or 1, which is translated."
            )
        for name in ("state_dict_config", "optim_state_dict_config"):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name}={type(getattr(self, name)).__name__}(…) is an option of FSDP version 1. Leave it out: "
                    "get_state_dict() gives whole tensors in host memory, and checkpoints can be loaded by any number "
                    "of ranks."
                )
        for name in _TRUTHS:
            self._check_truth(name)
        sharding, reshard = self._read_sharding()
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise IncompatibleOptionsError(
                "cpu_ram_efficient_loading=True sends rank 0's weights to the others, and sync_module_states=False "
                "keeps each rank's own. Leave sync_module_states out."
            )
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise IncompatibleOptionsError(
                "activation_checkpointing_offload=True needs activation_checkpointing=True: it says where the inputs "
                "of checkpointed modules are kept."
            )
        return {
            "fsdp_version": 2,
            "sharding_strategy": _sharding_member(sharding),
            "reshard_after_forward": reshard,
            "backward_prefetch": self._read_prefetch(),
            "auto_wrap_policy": self._read_wrap_policy(),
            "cpu_offload": _read_offload(self.cpu_offload),
            "ignored_modules": _read_ignored(self.ignored_modules),
            "state_dict_type": _state_dict_type(self.state_dict_type),
            "transformer_cls_names_to_wrap": _read_names(self.transformer_cls_names_to_wrap),
            "min_num_params": _read_count("min_num_params", self.min_num_params, 0),
            "mixed_precision_policy": _read_precision(self.mixed_precision_policy),
            "dp_replicate_size": self._read_replicas(sharding),
            "activation_checkpointing": self._read_checkpointing(),
        }

    # Methods by which clients of Accelerate finish a plugin

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, at any time, because checkpoints are the same for all types."""
        if state_dict_type is not None:
            self._write("state_dict_type", _state_dict_type(state_dict_type))

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set `mixed_precision_policy` unless it is set already.

        Args:
            mixed_precision: a dtype, or its name.
            buffer_autocast: version 1 only; buffers keep their dtype.
            override: set it even if it is set already.
        """
        if self.mixed_precision_policy is None or override:
            self.rewrite({"mixed_precision_policy": mixed_precision})

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Make `auto_wrap_policy` the policy of `torch.distributed.fsdp.wrap` for this model, where it is a name.

        Without a policy and without names of classes it stays None: `prepare` finds the units of each model.

        Raises:
            OptionError: the model has no module of a class in `transformer_cls_names_to_wrap`.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        present = {type(module).__name__: type(module) for module in model.modules()}
        names = self.transformer_cls_names_to_wrap or ()
        for name in names:
            if name not in present:
                raise OptionError(
                    f"transformer_cls_names_to_wrap names {name!r}, and {type(model).__name__} has no module of that "
                    f"class. It has: {', '.join(sorted(present))}."
                )
        policy = self.auto_wrap_policy
        if policy == "SIZE_BASED_WRAP":
            least = max(1, self.min_num_params or 0)
            self._write(
                "auto_wrap_policy", functools.partial(size_based_auto_wrap_policy, min_num_params=least)
            )
        elif policy == "TRANSFORMER_BASED_WRAP" or (policy is None and names):
            names = names or [
                name for name in getattr(model, "_no_split_modules", ()) or () if name in present
            ]
            if names:
                classes = {present[name] for name in names}
                self._write(
                    "auto_wrap_policy",
                    functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
                )

    def _write(self, name: str, value: Any) -> None:
        """Set a field in its normal form, also after a model was prepared."""
        object.__setattr__(self, name, value)
        self._given[name] = value

    def validate_mixed_precision_policy(self) -> None:
        """Check `mixed_precision_policy`, as the constructor does."""
        _read_precision(self.mixed_precision_policy)

    def set_cpu_offload(self) -> None:
        """Do nothing: `cpu_offload` is a policy as soon as it is set."""

    def validate_cpu_offload(self) -> None:
        """Check `cpu_offload`, as the constructor does."""
        _read_offload(self.cpu_offload)

    @property
    def is_hybrid(self) -> bool:
        """Whether each machine keeps a replica of the model (HYBRID_SHARD of version 1)."""
        return self._sharding in FSDP_HYBRID_STRATEGIES

    @property
    def _sharding(self) -> str | None:
        """The name of the sharding strategy in configuration files."""
        return None if self.sharding_strategy is None else self.sharding_strategy.name.lstrip("_")

    @property
    def translations(self) -> list[str]:
        """How FSDP version 1 options were translated, one sentence each, without those that change nothing."""
        found = []
        if self._sharding not in (None, "FULL_SHARD"):
            where = ", with a replica of the model on each machine" if self.is_hybrid else ""
            now = f"reshard_after_forward={self.reshard_after_forward}{where}"
            found.append(f"sharding_strategy={self._sharding} is {now}")
        prefetch = _name_of("backward_prefetch", self._given.get("backward_prefetch"), _PREFETCHES)
        if prefetch in ("BACKWARD_POST", "NO_PREFETCH"):
            found.append(f"backward_prefetch={prefetch} has no effect; the next parameters are prefetched")
        if self.use_orig_params is False:
            found.append("use_orig_params=False has no effect; parameters are always the original ones")
        if not self.limit_all_gathers:
            found.append("limit_all_gathers=False has no effect; all-gathers are always limited")
        return found

    @property
    def offload_policy(self) -> OffloadPolicy:
        """The value of `fully_shard`'s argument `offload_policy`."""
        policy: OffloadPolicy = self.cpu_offload
        return policy

    def _check_truth(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{name} takes True or False, got {type(value).__name__}: {value!r:.80}.")

    def _read_checkpointing(self) -> Any:
        given = self.activation_checkpointing
        if isinstance(given, str) and given.lower() == "selective":
            return "selective"
        if not isinstance(given, bool) and not callable(given):
            raise ArgumentTypeError(
                "activation_checkpointing takes True, False, 'selective' or a function of a context and an operation, "
                f"got {type(given).__name__}: {given!r:.80}."
            )
        return given

    def _read_sharding(self) -> tuple[str | None, bool | int]:
        """The sharding strategy of version 1, if one was given, and `reshard_after_forward`."""
        given = self.reshard_after_forward
        if isinstance(given, str) and given.lower() in ("true", "false"):
            given = given.lower() == "true"
        sharding = _name_of("sharding_strategy", self.sharding_strategy, FSDP_SHARDING_STRATEGIES)
        if given is not None and not isinstance(given, bool | int):
            sharding = _name_of("reshard_after_forward", given, FSDP_SHARDING_STRATEGIES)
            given = None
        if sharding == "NO_SHARD":
            raise OptionError(
                "sharding_strategy=NO_SHARD keeps all parameters on every rank, which is data parallelism without "
                "sharding. Leave the FSDP plugin (or --use_fsdp) out: several processes then train with ddp."
            )
        if given is None:
            return sharding, FSDP_RESHARDS[sharding or "FULL_SHARD"]
        if not isinstance(given, bool) and given < 2:
            raise OptionError(
                f"reshard_after_forward={given} is the size of the groups over which parameters are resharded after "
                "forward; give at least 2, or True or False."
            )
        return sharding if sharding in FSDP_HYBRID_STRATEGIES else None, given

    def _read_prefetch(self) -> Any:
        from torch.distributed.fsdp import BackwardPrefetch

        name = _name_of("backward_prefetch", self.backward_prefetch, _PREFETCHES)
        return None if name in (None, "NO_PREFETCH") else BackwardPrefetch[name]

    def _read_wrap_policy(self) -> Any:
        policy = self.auto_wrap_policy
        if policy is None or callable(policy):
            return policy
        return _name_of("auto_wrap_policy", policy, _POLICIES)

    def _read_replicas(self, sharding: str | None) -> int | None:
        if self.dp_replicate_size is None:
            return None
        count = _read_count("dp_replicate_size", self.dp_replicate_size, 1)
        if sharding in ("FULL_SHARD", "SHARD_GRAD_OP") and count > 1:
            raise IncompatibleOptionsError(
                f"dp_replicate_size={count} asks for replicas, and sharding_strategy={sharding} shards over all ranks. "
                "Leave sharding_strategy out."
            )
        return count


def _sharding_member(name: str | None) -> Any:
    """The member of torch's `ShardingStrategy`."""
    from torch.distributed.fsdp import ShardingStrategy

    return None if name is None else ShardingStrategy[_TORCH_SHARDING.get(name, name)]


def _state_dict_type(value: object) -> Any:
    """The member of torch's `StateDictType`."""
    from torch.distributed.fsdp import StateDictType

    name = _name_of("state_dict_type", value, ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"))
    if name == "LOCAL_STATE_DICT":
        raise OptionError(
            "state_dict_type=LOCAL_STATE_DICT is of FSDP version 1; use SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    assert name is not None, "it has a default"
    return StateDictType[name]


def _name_of(option: str, value: object, known: tuple[str, ...]) -> str | None:
    """The name of a choice that is given as a name, a member of torch's enumeration, or a number from 1."""
    if value is None:
        return None
    name = (getattr(value, "name", None) or str(value).upper()).lstrip("_")
    if (isinstance(value, int) and not isinstance(value, bool)) or name.isdigit():
        number = int(name)
        name = known[number - 1] if 0 < number <= len(known) else name
    if name not in known:
        raise OptionError(f"{option} is {value!r}; known: {', '.join(known)}.")
    return str(name)


def _read_offload(value: object) -> Any:
    """The policy of `fully_shard`, which its callers compare by class."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, OffloadPolicy):
        return value
    wanted = getattr(value, "offload_params", value)  # CPUOffload of version 1
    if isinstance(wanted, bool):
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if wanted else OffloadPolicy()
    raise ArgumentTypeError(
        f"cpu_offload takes True, False or a CPUOffloadPolicy, got {type(value).__name__}: {value!r:.80}."
    )


def _read_ignored(value: str | Iterable[nn.Module] | None) -> str | tuple[nn.Module, ...] | None:
    if value is None or isinstance(value, str):
        try:
            re.compile(value or "")
        except re.error as error:
            raise OptionError(f"ignored_modules={value!r} is no regular expression: {error}.") from error
        return value or None
    modules = tuple(value)
    wrong = [item for item in modules if not isinstance(item, nn.Module)]
    if wrong:
        raise ArgumentTypeError(
            f"ignored_modules takes modules, or a regular expression for their names, got {wrong[0]!r:.80}."
        )
    return modules


def _read_names(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    found = tuple(name.strip() for name in names if name.strip())
    return found or None


def _read_count(option: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OptionError(f"{option} is {value!r}; expected a whole number of at least {low}.")
    return value


def _read_dtype(option: str, value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = _DTYPES.get(str(value).removeprefix("torch."))
    if found is None:
        raise OptionError(f"{option} is {value!r}; expected a dtype, or one of {', '.join(_DTYPES)}.")
    return found


def _read_precision(value: Any) -> MixedPrecisionPolicy | None:
    if value is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, str | torch.dtype):
        dtype = _read_dtype("mixed_precision_policy", value)
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    if not isinstance(value, Mapping):  # MixedPrecision of version 1
        if not hasattr(value, "param_dtype"):
            raise ArgumentTypeError(
                "mixed_precision_policy takes a MixedPrecisionPolicy, a mapping with its fields or a dtype, got "
                f"{type(value).__name__}: {value!r:.80}."
            )
        value = {
            "param_dtype": value.param_dtype,
            "reduce_dtype": value.reduce_dtype,
            "cast_forward_inputs": value.cast_forward_inputs or value.cast_root_forward_inputs,
        }
    unknown = value.keys() - set(_POLICY_FIELDS)
    if unknown:
        raise OptionError(
            f"mixed_precision_policy has {', '.join(sorted(unknown))}; it takes {', '.join(_POLICY_FIELDS)}."
        )
    dtypes = {name: _read_dtype(name, value[name]) for name in _POLICY_FIELDS[:3] if name in value}
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=value.get("cast_forward_inputs", True))
