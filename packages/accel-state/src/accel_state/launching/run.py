"""Executing a launch plan: ports, processes, supervision, and the report of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from accel_state.clusters.topology import detect
from accel_state.constants import RUN_FOLDER, STORE_SECRET
from accel_state.errors import ConfigError, LaunchError
from accel_state.host.colors import Colors
from accel_state.launching.hardware import (
    Accelerators,
    find_accelerators,
    peer_to_peer_works,
    physical_cores,
)
from accel_state.launching.machines.deepspeed import check_deepspeed, deepspeed_size, uses_deepspeed_launcher
from accel_state.launching.machines.mpi import check_mpi
from accel_state.launching.numa import cores_of_ranks, gpu_nodes, read_cpu_topology
from accel_state.launching.plan import (
    NCCL_DIRECT_OFF,
    Host,
    LaunchPlan,
    ProcessSpec,
    World,
    plan,
    plan_world,
    watches,
)
from accel_state.launching.ports import host_name_is_local, reserve_port
from accel_state.launching.ranks.command import run_command
from accel_state.launching.ranks.processes import CommandProcess, start_command
from accel_state.launching.ranks.spare_processes import SparePool
from accel_state.launching.ranks.supervisor import Outcome, Policy, SupervisedProcess, supervise
from accel_state.launching.run_record import recorded
from accel_state.launching.target import Target, check_target
from accel_state.launching.watching.monitor import CAN_WATCH, Limits, Monitor
from accel_state.launching.watching.output import Console, RankOutput, StreamName, open_log
from accel_state.launching.watching.tracebacks import fold_frames
from accel_state.messages import say, without_secrets

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig
    from accel_state.config.sources import Sources

__all__ = ["describe", "launch", "parse_tee", "render_failure", "start_members"]

_BOTH: frozenset[StreamName] = frozenset({"stdout", "stderr"})
_TEED: Mapping[str, frozenset[StreamName]] = {
    "0": frozenset(),
    "1": frozenset({"stdout"}),
    "2": frozenset({"stderr"}),
    "3": _BOTH,
}
_AGENT_PATIENCE = 5.0
_INTERRUPT_GRACE = 5.0


def launch(
    config: LaunchConfig,
    target: Target,
    environ: Mapping[str, str],
    console: Console | None = None,
    *,
    joins: bool = False,
    sources: Sources | None = None,
    returns: bool = False,
) -> int:
    """Start the ranks of this machine and wait until they have ended.

    A single process that needs no supervision replaces this one (``exec``), unless the caller has more to do.

    Args:
        config: the resolved configuration.
        target: the script, module or program that each rank runs.
        environ: the environment of this process.
        console: destination of the output; by default the standard streams.
        joins: this process is a rank of a world that a scheduler has started, so it becomes the script.
        sources: where the values of ``config`` come from, for messages.
        returns: always return, as a call from a program has to.

    Returns:
        The exit code for the shell.

    Raises:
        TargetError, PortError: the target does not exist, or a port is in use.
        LaunchError: a process cannot be started.
        ConfigError, DeviceError: see ``accel_state.launching.plan.plan``.
    """
    host, world = _prepare(config, target, environ, sources, joins=joins)
    parse_tee(config.tee, range(world.local_size))
    config = _with_log_dir(config)
    console = console or Console()
    with contextlib.closing(_Attempts(config, target, world, environ, host, console)) as attempts:
        first = attempts.plan(0)
        if config.dry_run:
            sys.stdout.write(describe(first))
            return 0
        if first.style == "direct":
            with _bound(first.processes[0].cpus):
                return _run_alone(first.processes[0], environ, returns)
        if world.cpu and world.local_size > host.physical_cores and not config.quiet:
            cores = "1 core" if host.physical_cores == 1 else f"{host.physical_cores} cores"
            console.say(f"accel: {world.local_size} processes share {cores}")
        if config.log_dir is not None and not config.quiet:
            console.say(f"accel: logs go to {config.log_dir}")
        if config.resume and first.style == "agent" and not config.quiet:
            console.say(f"accel: --resume: {_who_restarts(config)}")
        monitor = attempts.watch() if first.style == "ranks" else None
        policy = policy_of(config, agent=first.style == "agent")
        with recorded(
            config.log_dir,
            first.processes[0].argv,
            ranks=world.local_size,
            world_size=world.size,
            machine_rank=world.machine_rank,
            machines=world.machines,
        ) as recorder:
            outcome = supervise(attempts.start, policy, console, monitor=monitor)
        if recorder is not None:
            try:
                recorder.end(outcome)
            except OSError as error:
                console.say(
                    f"accel: the end of this run is not recorded in {config.log_dir} ({error.strerror})"
                )
        if monitor is not None and config.straggler_report and not outcome.stalled:
            untold = "--straggler_report: no rank has made an optimizer step through Accelerator.prepare()"
            console.say(f"accel: {monitor.phases() or untold}")
    if outcome.stalled and not config.quiet:
        console.say(f"accel: all ranks are ended, with exit code {outcome.code}: {outcome.how}")
    if outcome.failed is not None and first.style == "ranks":
        log = first.processes[outcome.failed].log_path
        colors = console.colors("stderr")
        console.say(render_failure(outcome, world.size, log, colors=colors, folded=not config.debug))
    elif outcome.failed is not None and config.mpirun.hostfile is not None and not config.quiet:
        console.say(f"accel: {outcome.label} failed ({outcome.how})")
    return outcome.code


def policy_of(config: LaunchConfig, *, agent: bool = False) -> Policy:
    """The supervisor's policy for ``config``; an agent restarts its ranks itself."""
    given = config.grace_period
    # An agent first waits for its ranks.
    interrupt_grace = _INTERRUPT_GRACE + (_AGENT_PATIENCE if agent else 0.0)
    return Policy(
        grace_period=30.0 if given is None else given,
        interrupt_grace=interrupt_grace if given is None else given,
        max_restarts=0 if agent else max(config.max_restarts, config.spares),
        restart_preempted=not agent and (config.resume or config.max_restarts > 0),
        resumable=config.resume,
        monitor_interval=config.monitor_interval,
        quiet=config.quiet,
        patience=_AGENT_PATIENCE if agent else 0.0,
        signals=_signals(config),
    )


def _signals(config: LaunchConfig) -> tuple[str, ...]:
    names = tuple(name.upper() for name in config.signals_to_handle or ())
    for name in names:
        number = getattr(signal, name if name.startswith("SIG") else "", None)
        if number is None or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise ConfigError(
                f"--signals_to_handle {','.join(names)} names {name}, which cannot be passed on; expected names such "
                "as SIGTERM,SIGUSR2"
            )
    return names


def _who_restarts(config: LaunchConfig) -> str:
    if uses_deepspeed_launcher(config):
        return "DeepSpeed's launcher does not restart ranks; run this command again after a preemption or a crash"
    if config.mpirun.hostfile is not None:
        return "mpirun does not restart ranks; run this command again after a preemption or a crash"
    return (
        f"torch's agent counts preemptions as crashes: --max_restarts {config.max_restarts} for both together"
    )


def describe(prepared: LaunchPlan) -> str:
    """The plan as shell commands that can be copied: one per process, with its environment variables.

    Values of variables and flags that are named as secrets are hidden.
    """
    blocks = []
    for spec in prepared.processes:
        unset = [f"-u {name}" for name in sorted(spec.drop)]
        shown = without_secrets(dict(spec.env))
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
        command = shlex.join(without_secrets(spec.argv))
        words = ["env", *unset, *settings] if unset or settings else []
        title = f"# rank {spec.rank} of {prepared.world.size}"
        if prepared.style == "agent":
            title = f"# machine {spec.rank} of {prepared.world.machines}, {prepared.world.size} ranks in all"
        if spec.log_path is not None:
            title += f", output also in {spec.log_path}"
        blocks.append(f"{title}\n" + " \\\n    ".join([*words, command]) + "\n")
    return "\n".join(blocks)


def render_failure(
    outcome: Outcome, size: int, log: Path | None = None, *, colors: Colors | None = None, folded: bool = True
) -> str:
    """The report of a failure: which rank failed first, its traceback, and how the others ended.

    Args:
        outcome: how the launch ended.
        size: number of ranks.
        log: log file of the rank that failed first.
        colors: the colours of the destination; by default none.
        folded: show the frames of libraries around the user's as one line.
    """
    colors = colors or Colors(False)
    width = min(100, shutil.get_terminal_size().columns)
    first = " first" if size > 1 else ""
    how, _, hint = outcome.how.partition("; ")
    heading = f"=== {outcome.label} failed{first} ({how}) ===".center(width, "=")
    where = [*([hint] if hint else []), *outcome.others]
    where += [f"full output: {log}"] if log is not None else []
    error = outcome.error.rstrip()
    if not error and not outcome.by_signal:  # a signal says what happened
        error = "the rank wrote nothing to standard error"
    shown = fold_frames(error) if folded else error
    if shown != error:
        where.append("frames of libraries are folded; --debug shows all of them")
    return "\n".join(["", colors("red", heading), *where, *([shown] if shown else [])])


def start_members(
    prepared: LaunchPlan,
    environ: Mapping[str, str],
    console: Console,
    logged: Mapping[int, frozenset[StreamName]] | None = None,
    *,
    hold: bool = True,
    started: Mapping[int, CommandProcess] | None = None,
) -> list[SupervisedProcess]:
    """Start every process of a plan; if one cannot be started, kill the others.

    Args:
        prepared: the plan.
        environ: the environment of this process.
        console: destination of the output.
        logged: the streams of each rank that are written to its log file; by default both.
        hold: tracebacks are held back, because the report at the end shows them.
        started: processes that are already the ranks of the plan, by rank.

    Raises:
        LaunchError: a log file cannot be written, or a process could not be started.
    """
    agent = prepared.style == "agent"
    several = len(prepared.processes) > 1
    death = signal.SIGTERM if agent or sys.platform == "win32" else signal.SIGKILL
    members: list[SupervisedProcess] = []
    logs = [_open_log(spec) for spec in prepared.processes]  # open all of them before anything runs
    for index, (spec, log) in enumerate(zip(prepared.processes, logs, strict=True)):
        try:
            with _bound(spec.cpus):
                process = (started or {}).get(spec.rank) or start_command(
                    spec.rank,
                    spec.argv,
                    spec.environment(environ),
                    capture=not agent,
                    reads_input=index == 0,
                    on_parent_death=death,
                )
        except OSError as error:
            for member in members:
                member.process.kill()
            raise LaunchError(f"{spec.argv[0]} could not be started: {error}") from error
        label = f"rank {spec.rank}"
        if agent:
            label = (
                "DeepSpeed's launcher"
                if "deepspeed.launcher.runner" in spec.argv
                else "the agent of this machine"
            )
            label = "mpirun" if spec.argv[0] == "mpirun" else label
        streams = _BOTH if logged is None else logged[spec.rank]
        prefix = f"[rank {spec.rank}] " if several else ""
        output = RankOutput(prefix, console, log, streams, spec.rank, hold=hold)
        members.append(SupervisedProcess(process, output, label))
    return members


@contextlib.contextmanager
def _bound(cpus: frozenset[int]) -> Iterator[None]:
    """Restrict this thread to ``cpus`` while it starts a process, which inherits them."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _open_log(spec: ProcessSpec) -> IO[bytes] | None:
    if spec.log_path is None:
        return None
    try:
        return open_log(spec.log_path, shlex.join(spec.argv))
    except OSError as error:
        raise LaunchError(
            f"the log file {spec.log_path} cannot be written ({error.strerror}); pass another --log_dir"
        ) from error


def _prepare(
    config: LaunchConfig,
    target: Target,
    environ: Mapping[str, str],
    sources: Sources | None,
    *,
    joins: bool = False,
) -> tuple[Host, World]:
    """Check everything that can be checked before a process starts; return the host and the world."""
    check_target(target, environ)
    _signals(config)
    if joins and config.virtual_local_rank:
        raise ConfigError(
            "--virtual_local_rank: the scheduler has started this rank, so it also chooses the devices that the rank "
            "sees (Slurm: --gpus-per-task=1); leave it out"
        )
    if uses_deepspeed_launcher(config):
        check_deepspeed(config, environ)
    open_mpi = config.mpirun.hostfile is None or check_mpi(config.mpirun.hostfile, environ)
    cores = 1 if config.num_processes == 1 else physical_cores()
    # With --cpu devices are not detected: some drivers are slow to answer.
    accelerators = Accelerators() if config.use_cpu else find_accelerators(environ)
    static = config.rdzv_backend == "static" and not (config.spares or config.min_machines)
    hosts = config.num_machines > 1 and config.machine_rank == 0 and static and not joins
    if hosts and config.main_process_port and not config.dry_run:
        with reserve_port(config.main_process_port):
            pass  # otherwise a port in use would be detected only after torch has been imported
    if joins:
        world = World(1, 1, 1, 0, config.use_cpu or accelerators.count == 0, joined=True)
    elif uses_deepspeed_launcher(config):
        size, machines = deepspeed_size(config)
        world = World(size, max(1, size // machines), machines, config.machine_rank, config.use_cpu)
    else:
        world = plan_world(config, accelerators, sources)
    direct = world.local_size == 1 or peer_to_peer_works(accelerators)
    if not direct and not config.quiet:
        say(
            "accel: peer-to-peer transfers between RTX 40 series GPUs fail with this driver: "
            f"{' and '.join(NCCL_DIRECT_OFF)} are set to 1; drivers from 550.40.07 on need neither"
        )
    _check_supervision(config, target, world, joins=joins)
    cpus = _numa(config, world, accelerators, environ, joins)
    apart = world.local_size == 1 or world.machines > 1 or sys.platform != "linux"
    named = apart or host_name_is_local()
    host = Host(accelerators, cores, open_mpi=open_mpi, peer_to_peer=direct, named=named, cpus=cpus)
    return host, world


def _check_supervision(config: LaunchConfig, target: Target, world: World, *, joins: bool) -> None:
    """Check that this launcher starts the ranks itself, where options need that."""
    named = {
        "--start_timeout": config.start_timeout,
        "--step_timeout": config.step_timeout,
        "--checkpoint_timeout": config.checkpoint_timeout,
        "--straggler_report": config.straggler_report or None,
    }
    given = [name for name, value in named.items() if value is not None]
    elsewhere = joins or config.mpirun.hostfile is not None or uses_deepspeed_launcher(config)
    if given and elsewhere:
        raise ConfigError(
            f"{', '.join(given)}: another program starts the ranks of this run (a scheduler, mpirun or DeepSpeed), so "
            "accel launch cannot watch them; leave it out. ACCELERATE_COLLECTIVE_TIMEOUT_REPORT makes ranks report "
            "collectives that wait"
        )
    if given and world.machines > 1 and config.rdzv_backend not in ("static", "c10d"):
        raise ConfigError(
            f"{', '.join(given)}: the machines exchange what their ranks do through torch's store, which "
            f"--rdzv_backend {config.rdzv_backend} does not have; pass --rdzv_backend c10d, or leave it out"
        )
    if given and not CAN_WATCH:
        raise ConfigError(f"{', '.join(given)} needs Linux; leave it out on {sys.platform}")
    if config.spares and target.kind == "program" and not elsewhere and world.machines == 1:
        raise ConfigError(
            f"--spares {config.spares}: spare processes are Python interpreters, but --no_python runs {target.name!r}; "
            "leave --spares out, or launch a Python script"
        )


def _numa(
    config: LaunchConfig, world: World, accelerators: Accelerators, environ: Mapping[str, str], joins: bool
) -> tuple[frozenset[int], ...]:
    """The CPU cores of each rank; where an agent starts the ranks, it also binds them."""
    if config.numa_binding is None or world.machines > 1:
        return ()
    near: tuple[int, ...] = ()
    if not world.cpu:
        ids = None if config.gpu_ids in (None, "all") else config.gpu_ids
        near = gpu_nodes(accelerators.count, ids or environ.get("CUDA_VISIBLE_DEVICES"))
    if joins:
        topology = detect(environ)
        ranks = cores_of_ranks(config.numa_binding, topology.local_world_size, read_cpu_topology(), near)
        return ranks[topology.local_rank : topology.local_rank + 1]
    return cores_of_ranks(config.numa_binding, world.local_size, read_cpu_topology(), near)


def _port(config: LaunchConfig, world: World) -> contextlib.AbstractContextManager[int | None]:
    if config.mpirun.hostfile is not None or uses_deepspeed_launcher(config):
        needed = not config.main_process_port
    else:
        needed = (world.size > 1 and world.machines == 1) or world.names_one_rank(config)
    return (
        reserve_port(config.main_process_port) if needed else contextlib.nullcontext(config.main_process_port)
    )


def _with_log_dir(config: LaunchConfig) -> LaunchConfig:
    """``--tee`` without ``--log_dir`` also writes log files, in a new temporary folder."""
    if config.log_dir is not None or config.tee in (None, "", "0") or config.dry_run:
        return config
    return dataclasses.replace(config, log_dir=tempfile.mkdtemp(prefix="accel-logs-"))


def parse_tee(text: str | None, ranks: Sequence[int]) -> dict[int, frozenset[StreamName]]:
    """Parse ``--tee``: which streams of each rank are written to log files.

    Args:
        text: ``0`` none, ``1`` standard output, ``2`` standard error, ``3`` both, for all ranks; or per
            rank: ``0:3,1:1`` (other ranks: none). None: both.
        ranks: all ranks of this machine.

    Raises:
        ConfigError: the text has none of these forms, or names an unknown rank.
    """
    if not text:
        return dict.fromkeys(ranks, _BOTH)
    if text in _TEED:
        return dict.fromkeys(ranks, _TEED[text])
    found = dict.fromkeys(ranks, _TEED["0"])
    for part in text.split(","):
        rank, _, streams = part.strip().partition(":")
        if not rank.isdecimal() or streams not in _TEED:
            raise ConfigError(f"--tee is {text!r}; expected 0, 1, 2 or 3, or one of these per rank (0:3,1:1)")
        if int(rank) not in found:
            raise ConfigError(f"--tee {text!r} names rank {rank}, but ranks are {min(ranks)} to {max(ranks)}")
        found[int(rank)] = _TEED[streams]
    return found


def _run_alone(spec: ProcessSpec, environ: Mapping[str, str], returns: bool) -> int:
    """Replace this process with the single rank; or run it and wait, where the caller or the system requires that."""
    sys.stdout.flush()
    sys.stderr.flush()
    full = spec.environment(environ)
    try:
        if returns or os.name != "posix":
            code = run_command(spec.argv, full)
            return code if code >= 0 else 128 - code
        os.execvpe(spec.argv[0], spec.argv, full)
    except OSError as error:
        raise LaunchError(f"{spec.argv[0]} could not be started: {error}") from error


@dataclasses.dataclass
class _Attempts:
    """Plans and starts each attempt, on a port that stays reserved until the next attempt.

    The first plan is made before the start, because the launcher uses it to decide how to proceed.
    """

    config: LaunchConfig
    target: Target
    world: World
    environ: Mapping[str, str]
    host: Host
    console: Console
    _held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _secret: str = dataclasses.field(default_factory=lambda: secrets.token_hex(32), repr=False)
    _monitor: Monitor | None = None
    _pool: SparePool | None = None
    _planned: dict[int, LaunchPlan] = dataclasses.field(default_factory=dict)

    def plan(self, attempt: int) -> LaunchPlan:
        """The plan of an attempt, made once; its port is reserved from here on.

        Args:
            attempt: number of restarts so far.
        """
        if attempt not in self._planned:
            self._held.close()
            port = self._held.enter_context(_port(self.config, self.world))
            made = plan(
                self.config, self.target, self.world, self.environ, self.host, port=port, attempt=attempt
            )
            self._planned = {attempt: made}
        return self._planned[attempt]

    def start(self, attempt: int) -> list[SupervisedProcess]:
        """Start the processes of an attempt."""
        planned = self.plan(attempt)
        logged = parse_tee(self.config.tee, [spec.rank for spec in planned.processes])
        specs = [self._sharing(self._watched(spec), planned.style) for spec in planned.processes]
        spares: dict[int, CommandProcess] = {}
        if self._pool is not None and attempt:
            spares = self._pool.take(specs, [spec.environment(self.environ) for spec in specs])
            self._tell_of_spares(spares)
        planned = dataclasses.replace(planned, processes=tuple(specs))
        members = start_members(
            planned, self.environ, self.console, logged, hold=not self.config.debug, started=spares
        )
        if self.config.spares and planned.style == "ranks":
            self._fill_pool(specs[0])
        return members

    def watch(self) -> Monitor | None:
        """The monitor of the ranks, created once; None on systems that do not support one."""
        if self._monitor is None and CAN_WATCH:
            config = self.config
            limits = Limits(config.start_timeout, config.step_timeout, config.checkpoint_timeout)
            ranks = range(self.world.local_size)
            self._monitor = Monitor(ranks, limits, timed=watches(config), folded=not config.debug)
        return self._monitor

    def close(self) -> None:
        """Release the port, end the spares, and remove the folder."""
        self._held.close()
        if self._pool is not None:
            self._pool.close()
        if self._monitor is not None:
            self._monitor.close()

    def _watched(self, spec: ProcessSpec) -> ProcessSpec:
        if self._monitor is None:
            return spec
        return dataclasses.replace(spec, env={**spec.env, RUN_FOLDER: str(self._monitor.folder)})

    def _sharing(self, spec: ProcessSpec, style: str) -> ProcessSpec:
        """Add the secret that signs messages between ranks; it is not in the plan, because the plan is shown.

        Ranks of several machines have one only if the user gives it to all of them.
        """
        if style != "ranks" or self.world.machines > 1 or STORE_SECRET in self.environ:
            return spec
        return dataclasses.replace(spec, env={**spec.env, STORE_SECRET: self._secret})

    def _fill_pool(self, spec: ProcessSpec) -> None:
        if self._pool is None:
            self._pool = SparePool(self.config.spares, self.host.python, self.target, cpu=self.world.cpu)
        self._pool.fill(spec.environment(self.environ))

    def _tell_of_spares(self, spares: Mapping[int, object]) -> None:
        assert self._pool is not None
        if self.config.quiet:
            return
        for fault in self._pool.faults:
            self.console.say(f"accel: a spare is not used: {fault}")
        self._pool.faults.clear()
        count = f"{len(spares)} of {self.world.local_size} ranks"
        self.console.say(f"accel: spare processes take the places of {count}")
