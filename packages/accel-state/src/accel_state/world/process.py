"""``PartialState``: this process's rank, device and process group, and control flow across processes."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from accel_state import environment
from accel_state.clusters.alone import check_script
from accel_state.clusters.topology import Topology, detect
from accel_state.communication.channel import Channel, Channels, CheckSettings
from accel_state.communication.participation import Participation
from accel_state.communication.watchdog import REPORT_AFTER
from accel_state.config.launched import launched_config
from accel_state.config.unknown_variables import misspelt_variables
from accel_state.constants import NAMES_TOLD
from accel_state.enums import DistributedType
from accel_state.errors import ConfigError, StateError
from accel_state.host import xla
from accel_state.host.devices import (
    choose_collectives,
    choose_device,
    default_device,
    device_backend,
    set_current_device,
)
from accel_state.host.system import set_numa_affinity
from accel_state.messages import warn
from accel_state.monitoring.answers import attach, explain_by
from accel_state.world.process_group import OPTIONS, Membership, adopt, join, store_client
from accel_state.world.rehearsal import Rehearsal, rehearse
from accel_state.world.splitting import split_for_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from accel_state.config.launch import LaunchConfig

__all__ = ["PartialState", "current_state", "discard_inherited_state", "wait_for_everyone"]

P = ParamSpec("P")
R = TypeVar("R")
Decorator = Callable[[Callable[P, R]], Callable[P, R | None]]


class PartialState:
    """Rank, device and process group of this process.

    The first instance joins the world. All instances in a process share their attributes, because PyTorch has
    one default process group. A process that a launcher started as one of N stays one of N on the CPU.

    Environment variables can select the CPU (ACCELERATE_USE_CPU), a device (ACCELERATE_TORCH_DEVICE), XLA devices
    (PJRT_DEVICE), debug mode (ACCELERATE_DEBUG_MODE), and CPU affinity to the cores near the GPU
    (ACCELERATE_CPU_AFFINITY). In a job of a cluster, ACCEL_CLUSTER=none lets a process that no launcher started train
    alone.

    Args:
        cpu: compute on the CPU even if there is an accelerator (also ACCELERATE_USE_CPU).
        **process_group_options: ``backend``, ``timeout``, ``init_method`` and others of
            ``torch.distributed.init_process_group``.

    Attributes:
        device: the device of this process.
        distributed_type: the kind of distributed run; ``NO`` without a process group; ``XLA`` on XLA devices.
        backend: PyTorch's backend string, such as ``gloo``; None without a process group.
        num_processes: number of processes in the world.
        process_index: global rank of this process.
        local_process_index: rank of this process on its node.
        debug: whether ACCELERATE_DEBUG_MODE is on.
        fork_launched: whether the process was forked by a launcher that owns the process group
            (FORK_LAUNCHED).
        topology: ranks, nodes and addresses of this process, as its launcher describes them.
        store: the key-value store shared by all ranks, for control messages; None without a process group.
        channels: one communication channel per process group, used by collectives; None in a world of one.
        participation: finds out which ranks call an operation that the main process may call alone; None in a world of
            one.
        meshes: PyTorch's device meshes of this world by their form. The groups of a mesh, with their threads and
            communicators, live as long as the world, so what needs the same mesh again shares it.
        rehearsal: observes this rank in a simulated world, where it is the only process (``accel rehearse``); None in a
            real world.

    Raises:
        ConfigError: an environment variable or option is wrong, or no launcher started this process, in a job whose
            variables describe several machines.
        DeviceError: this node has fewer devices than processes.
        NotAvailableError: XLA devices are selected, and torch_xla is not installed.
        LaunchError: rendezvous failed.
        StateError: ranks disagree about device or backend, or this process was already set up differently.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[frozenset[str]] = frozenset(
        {
            "_cpu",
            "_mixed_precision",
            "_options",
            "backend",
            "channels",
            "debug",
            "device",
            "distributed_type",
            "fork_launched",
            "local_process_index",
            "meshes",
            "num_processes",
            "participation",
            "process_index",
            "rehearsal",
            "store",
            "topology",
        }
    )

    _cpu: bool
    _options: dict[str, Any]
    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool
    fork_launched: bool
    topology: Topology
    store: Store | None
    channels: Channels | None
    meshes: dict[Any, Any]
    participation: Participation | None
    rehearsal: Rehearsal | None

    def __init__(self, cpu: bool = False, **process_group_options: Any) -> None:
        self.__dict__ = self._shared_state
        options = {name: value for name, value in process_group_options.items() if value is not None}
        _check_options(cpu, options)
        if self.initialized:
            self._check_same(cpu, options)
        else:
            self._shared_state.update(_set_up(cpu, options))

    def __getattr__(self, name: str) -> Any:
        if name in self._known_attributes:
            raise AttributeError(
                f"`PartialState` object has no attribute {name!r}. This happens if `PartialState._reset_state()` was "
                "called, which is reset(), and no new PartialState or Accelerator has been created since"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __reduce__(self) -> tuple[type[PartialState], tuple[()]]:
        """Unpickling gives the state of the unpickling process: a process group and a store cannot be pickled."""
        return type(self), ()

    @staticmethod
    def reset() -> None:
        """Clear the shared state. The process group stays; the next instance adopts it."""
        channels = PartialState._shared_state.get("channels")
        if channels is not None:
            channels.close(None)
        PartialState._shared_state.clear()

    _reset_state = reset  # the name that test suites written for Accelerate call

    def _check_same(self, cpu: bool, options: dict[str, Any]) -> None:
        if cpu and self.device.type != "cpu":
            raise StateError(
                f"PartialState(cpu=True) was requested, but this process already uses {self.device}; pass cpu=True "
                "to the first PartialState or Accelerator (in a notebook, restart the kernel first)"
            )
        if self.backend is None:
            return
        for name, value in options.items():
            before = self.backend if name == "backend" else self._options.get(name)
            if before != value:
                raise StateError(
                    f"PartialState({name}={value!r}) was requested, but the process group already exists with "
                    f"{name}={before!r}; pass {name} to the first PartialState or Accelerator"
                )

    @property
    def initialized(self) -> bool:
        """Whether an instance was created and not reset since."""
        return bool(self._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Whether the world has more than one process."""
        return self.distributed_type is not DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the world."""
        return self.process_index == self.num_processes - 1

    @property
    def default_device(self) -> torch.device:
        """The device type of this machine's accelerator, or the CPU."""
        return default_device()

    def set_device(self) -> None:
        """Make ``device`` PyTorch's current device, as the constructor does."""
        set_current_device(self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this; returns at once in a world of one."""
        channel = self.channel()
        if channel is not None:
            channel.barrier()

    def main_process_alone(self, operation: str, advice: str = "") -> bool:
        """Whether the main process calls ``operation`` alone; False: every process does.

        Every process that calls the operation calls this first. It starts no collective. It returns when all processes
        have called it, or when it is certain that no other will: the others wait in a collective that the main process
        has not reached, or have ended.

        Args:
            operation: its name.
            advice: the end of the error message if some of the other processes do not call this.

        Raises:
            CollectiveMismatchError: some of the other processes call the operation and some do not; or one failed.
        """
        return self.participation is not None and self.participation.main_process_alone(operation, advice)

    def all_take_part(self, operation: str, advice: str = "") -> None:
        """Wait, without a collective, until every process has called this for ``operation``.

        Args:
            operation: its name.
            advice: the end of the error message if not all processes call this.

        The operation may mix up the messages of other collectives if some processes do not take part in it.

        Raises:
            CollectiveMismatchError: a process waits in a collective that this one has not reached, or has ended.
        """
        if self.participation is not None:
            self.participation.all_take_part(operation, advice)

    def channel(self, group: dist.ProcessGroup | None = None) -> Channel | None:
        """The communication channel of ``group`` (None: all ranks); None if the group has one rank."""
        return None if self.channels is None else self.channels.of(group)

    def connect(self, prefix: str) -> Store | None:
        """A separate connection to ``store`` under ``prefix``, so that waiting on it blocks no other user.

        None without a process group, and in a rehearsal, where no other rank would answer.

        Raises:
            LaunchError: the store does not answer, because rank 0, which hosts it, has ended.
        """
        return None if self.store is None or self.rehearsal is not None else store_client(self.store, prefix)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy ``group``, or the default process group if None.

        Does nothing if there is none, or if ``group`` is None and the launcher owns the group
        (``fork_launched``).
        """
        if self.fork_launched and group is None:
            return
        if dist.is_available() and dist.is_initialized():
            if group is None and self.channels is not None:
                self.channels.close("destroyed its process group")
            dist.destroy_process_group(group)
            if group is None:
                self.store = None

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous part of ``inputs``, in rank order; ``inputs`` itself is not changed.

        In a world of one this is ``inputs`` itself.

        Args:
            inputs: a list, a tuple, a tensor (split along its first dimension), a ``datasets.Dataset``, or a
                dict of these with equal lengths, nested to any depth. Any other object is given to every
                process unchanged.
            apply_padding: repeat the last element so that all processes get the same number. Tensors are
                then returned on ``device``.

        Raises:
            ConfigError: values of a dict differ in length, or an empty input cannot be padded.
        """
        if self.num_processes == 1:
            yield inputs
            return
        yield split_for_rank(
            inputs,
            self.process_index,
            self.num_processes,
            apply_padding=apply_padding,
            device=self.device if apply_padding else None,
        )

    @contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:  # even after an exception: the other ranks wait for this
                self.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that rank 0 completes before other ranks enter it; they also enter if rank 0 raises."""
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A block that the first process of each node completes before the node's other processes enter it."""
        return self._goes_first(self.is_local_main_process)

    def _guard(self, function: Callable[P, R], chosen: Callable[[], bool]) -> Callable[P, R | None]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            # Checked at each call, because functions are often decorated before the process group exists.
            return function(*args, **kwargs) if not self.use_distributed or chosen() else None

        return guarded

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Decorator[..., Any]: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate ``function`` to run on rank 0 only; on other ranks it returns None."""
        return self._decorate(function, lambda: self.is_main_process)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Decorator[..., Any]: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate ``function`` to run on the first process of each node only; on other ranks it returns None."""
        return self._decorate(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate ``function`` to run on the last rank only; on other ranks it returns None."""
        return self._guard(function, lambda: self.is_last_process)

    @overload
    def on_process(
        self, function: Callable[P, R], process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> Decorator[..., Any]: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate ``function`` to run on rank ``process_index`` only; in a world of one it always runs.

        Raises:
            ConfigError: ``process_index`` is missing.
        """
        _require("process_index", process_index)
        return self._decorate(function, lambda: self.process_index == process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Decorator[..., Any]: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate ``function`` to run on process ``local_process_index`` of each node only.

        Raises:
            ConfigError: ``local_process_index`` is missing.
        """
        _require("local_process_index", local_process_index)
        return self._decorate(function, lambda: self.local_process_index == local_process_index)

    def _decorate(self, function: Callable[..., Any] | None, chosen: Callable[[], bool]) -> Any:
        if function is None:
            return lambda late: self._guard(late, chosen)
        return self._guard(function, chosen)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` once per node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)


def current_state() -> PartialState | None:
    """The state of this process if one has been created; unlike ``PartialState()``, this creates none."""
    return PartialState() if PartialState._shared_state else None


def channel_of(group: dist.ProcessGroup | None) -> Channel | None:
    """As ``PartialState().channel(group)``, for calls that are made often."""
    shared = PartialState._shared_state or PartialState()._shared_state
    channels: Channels | None = shared["channels"]
    return None if channels is None else channels.of(group)


def release_completed_collectives() -> None:
    """Release the tensors of collectives that are done, whose memory is otherwise kept for some seconds."""
    channels: Channels | None = PartialState._shared_state.get("channels")
    if channels is not None:
        channels.release_completed()


def discard_inherited_state() -> None:
    """Drop the state that a forked child inherited: it describes the parent, whose channels stay open."""
    PartialState._shared_state.clear()


def wait_for_everyone() -> None:
    """Wait until every process has called this; returns at once in a world of one."""
    PartialState().wait_for_everyone()


def _require(name: str, index: int | None) -> None:
    if index is None:
        raise ConfigError(f"{name} is missing; name the process that runs the function, for example {name}=0")


def _check_options(cpu: bool, options: dict[str, Any]) -> None:
    if not isinstance(cpu, bool):
        raise ConfigError(f"cpu={cpu!r} is not a bool; pass cpu=True to compute on the CPU, or cpu=False")
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"PartialState has no option {name!r}; its options are cpu, {', '.join(OPTIONS)}"
            )


def _set_up(cpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Find this process's topology and device and join its world; returns all attributes of the state."""
    environ = environment.snapshot()
    pulse = attach(environ)
    topology = detect(environ)
    settings = launched_config()
    fork_launched = environment.parse_flag_from_env("FORK_LAUNCHED")
    cpu = cpu or settings.use_cpu
    override = settings.runtime.torch_device
    use_xla = xla.is_selected(environ, settings)
    if use_xla and settings.tpu.downcast_bf16 and settings.mixed_precision == "bf16":
        environment.provide(XLA_DOWNCAST_BF16=1)  # before torch_xla starts; a launcher has set it already

    def device_for(place: Topology) -> torch.device:
        return choose_device(place, cpu=cpu, override=override, use_xla=use_xla)

    def choose() -> tuple[torch.device, str]:
        device = device_for(topology)
        return device, choose_collectives(device, options.get("backend"))

    rehearsal = None if settings.runtime.rehearsal is None else Rehearsal(settings.runtime.rehearsal)
    member: Membership | None = None
    if dist.is_available() and dist.is_initialized():
        _check_unused(options, dist.get_backend())
        member = adopt(topology, device_for)
    elif rehearsal is not None and topology.world_size > 1:
        member = rehearse(rehearsal, topology, choose)
    elif _belongs_to_world(topology, options, fork_launched):
        member = join(topology, choose, options)
    elif topology.launcher == "single" and not (
        fork_launched or use_xla
    ):  # torch_xla finds the other hosts itself
        check_script(environ, settings.cluster)
    device = device_for(topology) if member is None else member.device
    topology = topology if member is None else member.topology
    if topology.rank == 0 and NAMES_TOLD not in environ:
        for sentence in misspelt_variables(environ):
            warn(sentence)
    if override is None:
        set_current_device(device)
    if member is not None and device.type == "cpu" and rehearsal is None:
        _share_cores(topology)
    channels = None if member is None else _channels(topology, device, member, settings, rehearsal)
    if device.type == "cuda" and settings.enable_cpu_affinity:
        set_numa_affinity(device.index or 0)
    if pulse is not None:
        pulse.joined()
        if channels is not None:
            explain_by(channels.in_progress)
    return {
        "_cpu": cpu,
        "_options": options,
        "device": device,
        "distributed_type": _distributed_type(device, alone=member is None),
        "backend": None if member is None else member.backend,
        "num_processes": topology.world_size,
        "process_index": topology.rank,
        "local_process_index": topology.local_rank,
        "debug": settings.debug,
        "fork_launched": fork_launched,
        "topology": topology,
        "store": None if member is None else member.store,
        "channels": channels,
        "meshes": {},
        "participation": None
        if member is None or channels is None
        else Participation(topology.rank, member.store, device, channels),
        "rehearsal": rehearsal,
    }


def _distributed_type(device: torch.device, *, alone: bool) -> DistributedType:
    if alone and device.type != "xla":  # scripts ask by it whether to write for XLA, in one process as well
        return DistributedType.NO
    return device_backend(device).distributed_type


def _channels(
    topology: Topology,
    device: torch.device,
    member: Membership,
    settings: LaunchConfig,
    rehearsal: Rehearsal | None,
) -> Channels | None:
    if topology.world_size == 1:
        return None
    runtime = settings.runtime
    checks = CheckSettings(
        "on" if settings.debug else runtime.collective_checks or "auto",
        REPORT_AFTER if runtime.collective_timeout_report is None else runtime.collective_timeout_report,
    )
    return Channels(
        wire=None if rehearsal is not None else member.wire,
        rank=topology.rank,
        size=topology.world_size,
        device=device,
        store=member.watch_store if rehearsal is None else None,
        settings=checks,
        compared=None if rehearsal is None else rehearsal.compared,
    )


def _belongs_to_world(topology: Topology, options: dict[str, Any], fork_launched: bool) -> bool:
    """Whether to create a group: with several ranks, or for one rank of torchrun, whose script may use the group."""
    if topology.world_size > 1:
        return True
    if fork_launched:  # by ``debug_launcher``, which gives one process no group to join
        return False
    can_meet = topology.master_addr is not None and topology.master_port is not None
    return topology.launcher == "torchrun" and (can_meet or "init_method" in options)


def _check_unused(options: dict[str, Any], backend: str) -> None:
    if options.get("backend", backend) != backend:
        raise StateError(
            f"backend={options['backend']!r} was requested, but the script has already created a process group "
            f"with {backend!r}; leave out backend=, or let PartialState create the group"
        )
    unused = sorted(set(options) - {"backend"})
    if unused:
        warn(
            f"{', '.join(unused)} have no effect, because the script has already created the process group",
        )


def _share_cores(topology: Topology) -> None:
    """Divide the physical cores of this node among its processes, unless OMP_NUM_THREADS is set."""
    if environment.get_int_from_env(["OMP_NUM_THREADS"], 0) > 0 or topology.world_size == 1:
        return
    import psutil  # a third of this package's import time, and only needed by ranks on the CPU

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    threads = max(1, cores // topology.local_world_size)
    torch.set_num_threads(threads)
    if topology.rank == 0:
        warn(
            f"OMP_NUM_THREADS is not set, so each process uses {threads} thread{'' if threads == 1 else 's'}: "
            f"{cores} physical cores for {topology.local_world_size} processes on this node. Set OMP_NUM_THREADS to "
            "choose another number",
        )
