"""`ParallelismConfig`: how many ranks each kind of parallelism has, and their options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from accel_state.config.launched import launched_config
from accel_state.config.parallel_degrees import DIMENSIONS, degrees_of, experts_misfit, misfit, stages_misfit
from accel_state.config.sections.parallelism import PIPELINE_SCHEDULES, ParallelismSection
from accel_state.messages import warn
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError, OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "PipelineParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
]

_COMMUNICATION = ("allgather", "alltoall")
_ATTENTION = ("sdpa",)
_REFUSED_ATTENTION = ("flash_attention_2", "flash_attention_3", "eager")


def _launched() -> ParallelismSection:
    return launched_config().parallelism


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: overlap communication and computation; torch does so in compiled models only, so this warns
            and changes nothing.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warn(
                "enable_async_tp=True has no effect: torch overlaps tensor parallelism in compiled models only.",
                UserWarning,
            )


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism.

    Attributes:
        cp_comm_strategy: "allgather": each rank gathers all keys and values of a layer; "alltoall": keys and values
            pass from rank to rank, and a rank holds those of one other rank at a time. None: the launcher's setting,
            else "allgather".
        cp_load_balance: give each rank a piece from each end of a sequence, so that all compute the same share of
            causal attention; lengths must be multiples of twice `cp_size`. False: one piece, in the order of the ranks.
            None: the launcher's setting, else True.

    Raises:
        OptionError: any other value.
    """

    cp_comm_strategy: str | None = None
    cp_load_balance: bool | None = None

    def __post_init__(self) -> None:
        if self.cp_load_balance is None:
            launched = _launched().cp_load_balance
            self.cp_load_balance = True if launched is None else launched
        if not isinstance(self.cp_load_balance, bool):
            raise OptionError(f"cp_load_balance is {self.cp_load_balance!r}; expected True, False or None.")
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = _launched().cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in _COMMUNICATION:
            raise OptionError(
                f"cp_comm_strategy is {self.cp_comm_strategy!r}; expected {' or '.join(_COMMUNICATION)}."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism.

    Attributes:
        sp_seq_length: length of every sequence, before it is divided; needed if it does not vary.
        sp_seq_length_is_variable: sequences may differ in length from batch to batch. False: a sequence of another
            length than `sp_seq_length` is an error.
        sp_attn_implementation: attention implementation on each rank, by its name in transformers; "sdpa".

    Raises:
        OptionError: a value cannot be used.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if None in (self.sp_seq_length, self.sp_seq_length_is_variable, self.sp_attn_implementation):
            launched = _launched()
            for field in fields(self):
                if getattr(self, field.name) is None:
                    setattr(self, field.name, getattr(launched, field.name))
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        length = self.sp_seq_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise OptionError(f"sp_seq_length is {length!r}; expected a whole number of at least 1, or None.")
        if not self.sp_seq_length_is_variable and length is None:
            raise OptionError(
                "sp_seq_length_is_variable=False needs the length: pass sp_seq_length=…, or leave it variable."
            )
        self.sp_attn_implementation = self.sp_attn_implementation or "sdpa"
        if self.sp_attn_implementation not in _ATTENTION:
            known = self.sp_attn_implementation in _REFUSED_ATTENTION
            raise OptionError(
                f"sp_attn_implementation is {self.sp_attn_implementation!r}; expected 'sdpa'"
                + (", which takes the kernels of flash attention by itself where they fit." if known else ".")
            )


@dataclass
class PipelineParallelConfig:
    """Options of pipeline parallelism.

    Attributes:
        schedule: order in which stages compute micro-batches: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs",
            "interleaved_zero_bubble" or "zbv_zero_bubble", as PyTorch's classes of these names. With "gpipe" the script
            may compute the loss; with the others the last stage computes it, because the call of the model runs
            backward too. None: the launcher's setting, else "1f1b" where the last stage computes the
            loss, and "gpipe" where the script does.
        num_micro_batches: micro-batches that each batch of a rank is cut into. None: the launcher's setting, else two
            for each stage, or the next smaller number that divides the batch.
        stages_per_rank: stages that each rank holds. None: the launcher's setting, else 1, or 2 for schedules that
            interleave stages.
        modules: names of the modules that hold the model's parameters, in the order in which its forward calls them;
            a `ModuleList` stands for its items. A model that is not of transformers must be their chain: each is called
            with what the one before returned. None: the children of an `nn.Sequential`, or what a model of
            transformers declares.
        cuts: names of the modules with which the second and all later stages begin. None: stages of about equal bytes
            of parameters.
        loss_function: called by the last stage as ``loss_function(output, target)``, where the script calls
            ``model(…, target=target)``, which then returns the loss. It must return a mean over rows, or over integer
            labels other than its `ignore_index` (-100); the first call checks it.
        checkpoint: weights of a model that is on the meta device, as `load_checkpoint_in_model` takes them; each rank
            reads those of its stages.
        param_init_fn: initialises the parameters of one module of a model that is on the meta device, and of no module
            inside it. None: its `reset_parameters`.

    Raises:
        OptionError: a value cannot be used.
    """

    schedule: str | None = None
    num_micro_batches: int | None = None
    stages_per_rank: int | None = None
    modules: Sequence[str] | None = None
    cuts: Sequence[str] | None = None
    loss_function: Callable[..., Any] | None = None
    checkpoint: str | Path | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        launched = _launched()
        for name in ("schedule", "num_micro_batches", "stages_per_rank"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(launched, f"pp_{name}"))
        if self.schedule is not None and self.schedule not in PIPELINE_SCHEDULES:
            raise OptionError(
                f"schedule is {self.schedule!r}; expected one of {', '.join(PIPELINE_SCHEDULES)}."
            )
        for name in ("num_micro_batches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} is {value!r}; expected a whole number of at least 1, or None.")
        for name in ("modules", "cuts"):
            value = getattr(self, name)
            if isinstance(value, str) or (
                value is not None and not all(isinstance(item, str) for item in value)
            ):
                raise OptionError(f"{name} is {value!r:.80}; expected names of modules in a list.")


@dataclass(eq=False)
class ParallelismConfig:
    """The degree of each kind of parallelism, which is its number of ranks; their product is the number of all ranks.

    Ranks that differ in `dp_replicate` and `dp_shard` read different samples. Ranks of `cp` and `sp` hold different
    parts of the same sequences, ranks of `tp` compute different parts of the same tensors, and ranks of `pp` compute
    different layers. All degrees can be combined, except `pp` with `cp` and `sp`.

    Attributes:
        pp_size: ranks among which the layers of the model are divided (pipeline parallelism).
        dp_replicate_size: number of replicas of the model (data parallelism).
        dp_shard_size: ranks over which parameters, gradients and optimizer states are sharded (FSDP).
        tp_size: ranks among which the script or a `tp_plan` divides tensors (tensor parallelism).
        ep_size: ranks among which the experts of mixture-of-experts layers are divided (expert parallelism). They are
            part of the ranks of `dp_shard`, `cp`, `sp` and `tp`, so this is no dimension of its own.
        cp_size: ranks among which sequences are divided, which exchange keys and values (context parallelism).
        cp_backend: "torch", as in configuration files.
        sp_size: ranks among which sequences are divided, which exchange heads (sequence parallelism, Ulysses).
        sp_backend: "deepspeed", as in configuration files; DeepSpeed need not be installed.
        tp_handler, cp_handler, sp_handler, pp_handler: options of `tp`, `cp`, `sp` and `pp`; None: the launcher's
            settings.

    Unset degrees come from the launcher's environment, and are 1 otherwise.

    Raises:
        OptionError: a degree is below 1, or a backend is unknown.
        IncompatibleOptionsError: `ep_size` does not divide the ranks of a replica, or is combined with `pp_size`; or
            `pp_size` is combined with `cp_size` or `sp_size`.
        ArgumentTypeError: a handler has another class.
    """

    argument: ClassVar[str] = "parallelism_config"

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineParallelConfig | None = None
    ep_size: int | None = None

    def __post_init__(self) -> None:
        self._device_mesh: DeviceMesh | None = None
        plain = (*(f"{name}_size" for name in DIMENSIONS), "ep_size", *_WHEN_UNSET)
        unset = [name for name in plain if getattr(self, name) is None]
        if unset:
            launched = _launched()
            for name in unset:
                value = getattr(launched, name)
                setattr(self, name, _WHEN_UNSET.get(name, 1) if value is None else value)
        for name, size in (*self.degrees.items(), ("ep", self.ep_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise OptionError(f"{name}_size is {size!r}; expected a whole number of at least 1.")
        assert self.ep_size is not None
        experts = experts_misfit(self.degrees, self.ep_size) if self.total_size > 1 else None
        wrong = stages_misfit(self.degrees) or experts
        if wrong is not None:
            raise IncompatibleOptionsError(f"ParallelismConfig: {wrong}.")
        for name, only in _WHEN_UNSET.items():
            if getattr(self, name) != only:
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected {only!r}.")
        self._complete_handlers()

    @classmethod
    def from_section(cls, section: ParallelismSection) -> Self:
        """Build the configuration from a decoded section of the launch configuration."""
        given: dict[str, Any] = {f"{name}_size": size for name, size in degrees_of(section).items()}
        given |= {
            "ep_size": section.ep_size or 1,
            "cp_backend": section.cp_backend or "torch",
            "sp_backend": section.sp_backend or "deepspeed",
        }
        if (section.cp_size or 1) > 1:
            given["cp_handler"] = TorchContextParallelConfig(
                section.cp_comm_strategy, section.cp_load_balance
            )
        if (section.pp_size or 1) > 1:
            given["pp_handler"] = PipelineParallelConfig(
                section.pp_schedule, section.pp_num_micro_batches, section.pp_stages_per_rank
            )
        if (section.sp_size or 1) > 1:
            given["sp_handler"] = DeepSpeedSequenceParallelConfig(
                section.sp_seq_length, section.sp_seq_length_is_variable, section.sp_attn_implementation
            )
        return cls(**given)

    # Degrees

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks of each dimension, those with one rank included, in the order of the mesh."""
        return {name: getattr(self, f"{name}_size") for name in DIMENSIONS}

    @property
    def total_size(self) -> int:
        """Ranks of all dimensions together."""
        return math.prod(self.degrees.values())

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self._product("dp_replicate", "dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that read the same samples."""
        return self._product("pp", "tp", "cp", "sp")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas."""
        return self._product("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over several ranks."""
        return self._product("dp_shard") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the layers are divided among several ranks."""
        return self._product("pp") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensors are divided among several ranks."""
        return self._product("tp") > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are divided among several ranks."""
        return self.ep_size != 1

    @property
    def cp_enabled(self) -> bool:
        """Whether context parallelism has several ranks."""
        return self._product("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequence parallelism has several ranks."""
        return self._product("sp") > 1

    # Names of mesh dimensions

    @property
    def dp_dim_names(self) -> list[str]:
        """Dimensions with several ranks along which samples differ."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions with several ranks along which samples are the same."""
        return self._enabled("pp", "tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions with several ranks that are flattened into ``dp_shard_cp`` of the mesh."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions with several ranks that are flattened into ``dp_cp`` of the mesh."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions of the mesh for `fully_shard`: replicas if there are several, and those it shards over."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp_sp" if self.sp_enabled else "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions with several ranks."""
        return self.dp_dim_names + self.non_dp_dim_names

    # Mesh

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build PyTorch's mesh of the dimensions with several ranks; None if there is none. All ranks must call this.

        If no process group exists yet, PyTorch starts one from the environment variables.

        Args:
            device_type: such as "cpu" or "cuda".

        Raises:
            IncompatibleOptionsError: the product of the degrees is not the number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        described = self._get_mesh()
        running = dist.is_available() and dist.is_initialized()
        wrong = misfit(self.degrees, dist.get_world_size() if running else 1)
        if running and wrong is not None:
            raise IncompatibleOptionsError(f"ParallelismConfig: {wrong}.")
        if not described:
            return None
        names, shape = described
        try:
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        except ValueError as error:
            if running:
                raise
            raise IncompatibleOptionsError(f"ParallelismConfig: {wrong}.") from error  # no world is described
        unions = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for name, members in unions.items():
            if members:
                mesh[members]._flatten(name)  # type: ignore[index]  # lists are taken as well
        return mesh

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """Names and ranks of the dimensions with several ranks, in the order of the mesh; empty without one.

        Nothing is started or asked: clients call this, under this name, to describe a mesh that they build.
        """
        used = self._enabled(*DIMENSIONS)
        return (tuple(used), tuple(self.degrees[name] for name in used)) if used else ()

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh of the `Accelerator` with this configuration, or else one that is built at the first call.

        Raises:
            OptionError: there is no mesh yet and no device type is given, or the mesh is on another type of device.
        """
        if self._device_mesh is None:
            if device_type is None:
                raise OptionError("There is no mesh yet. Pass the device type: get_device_mesh('cuda').")
            self._device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self._device_mesh.device_type != device_type:
            raise OptionError(
                f"The mesh is on {self._device_mesh.device_type!r} devices, and get_device_mesh({device_type!r}) asks "
                "for another. Leave the device type out."
            )
        return self._device_mesh

    def on(self, degrees: Mapping[str, int], device_mesh: DeviceMesh | None) -> ParallelismConfig:
        """Return the configuration with the degrees and the mesh of a run; if all degrees are 1, others follow.

        `get_device_mesh()` of this object returns that mesh too.
        """
        self._device_mesh = device_mesh
        sizes = {f"{name}_size": degrees[name] for name in DIMENSIONS}
        complete = ParallelismConfig(**self._values() | sizes)
        complete._device_mesh = device_mesh
        return complete

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def sequences(self) -> tuple[str, int | None, bool]:
        """How keys and values are exchanged, the required length of every sequence (None: any), and load balance."""
        cp, sp = self.cp_handler, self.sp_handler
        communication = (cp and cp.cp_comm_strategy) or "allgather"
        fixed = sp is not None and not sp.sp_seq_length_is_variable
        length = sp.sp_seq_length if sp is not None and fixed else None
        return communication, length, cp is None or cp.cp_load_balance is not False

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {
            field.name: {inner.name: getattr(value, inner.name) for inner in fields(value)}
            if is_dataclass(value := getattr(self, field.name))
            else value
            for field in fields(self)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParallelismConfig) and self.to_json() == other.to_json()

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelismConfig:
        copied = ParallelismConfig(**self._values())
        copied._device_mesh = self._device_mesh  # process groups cannot be copied
        return copied

    def _product(self, *names: str) -> int:
        return math.prod(self.degrees[name] for name in names)

    def _enabled(self, *names: str) -> list[str]:
        return [name for name in names if self.degrees[name] > 1]

    def _complete_handlers(self) -> None:
        for name, kind in _HANDLERS.items():
            handler, size = getattr(self, f"{name}_handler"), self.degrees[name]
            if handler is None and size > 1:
                setattr(self, f"{name}_handler", kind())
            elif handler is not None and not isinstance(handler, kind):
                raise ArgumentTypeError(
                    f"{name}_handler takes {kind.__name__}(…), got {type(handler).__name__}: {handler!r:.80}."
                )
            elif handler is not None and size == 1:
                warn(
                    f"{name}_handler is given and {name}_size is 1, so its options have no effect.",
                    UserWarning,
                )


_WHEN_UNSET: Mapping[str, str] = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_HANDLERS: Mapping[str, type] = {
    "pp": PipelineParallelConfig,
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}
