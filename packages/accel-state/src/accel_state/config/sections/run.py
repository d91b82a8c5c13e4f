"""Options of one launch: target, supervision, output."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option
from accel_state.config.sections.submission import ENGINES

__all__ = ["RunOptions"]


@dataclass(frozen=True, repr=False, eq=False)
class RunOptions(Section):
    """How a program is launched and supervised."""

    module: bool = option(
        False,
        help="The script is a module name (python -m).",
        flags=("-m",),
        toggle=True,
        in_file=False,
    )
    no_python: bool = option(
        False, help="The script is an executable, not Python.", toggle=True, in_file=False
    )
    quiet: bool = option(
        False,
        help="On failure exit with the code of the failed process, without the launcher's traceback.",
        flags=("-q",),
        toggle=True,
        in_file=False,
    )
    dry_run: bool = option(
        False,
        help="Print the commands and environment variables; start nothing.",
        toggle=True,
        in_file=False,
    )
    resume: bool = option(
        False,
        help="Make the program resume from its newest complete checkpoint, and restart it after a preemption.",
        env=("ACCELERATE_RESUME",),
        toggle=True,
        in_file=False,
    )
    tee: str | None = option(
        help="Output that goes to log files: 0 none, 1 stdout, 2 stderr, 3 both; or per rank, such as 0:3,1:1.",
        flags=("-t",),
        ours=True,
    )
    log_dir: str | None = option(help="Folder for one log file per rank.", ours=True)
    role: str = option("default", help="Role of the processes in PyTorch's elastic launcher.", ours=True)
    max_restarts: int = option(0, help="Number of restarts of a failed run.", low=0, ours=True)
    monitor_interval: float = option(
        0.1, help="Seconds between two checks of the processes.", low=0, ours=True
    )
    grace_period: float | None = option(
        help="Seconds that ranks have to exit after a signal; by default 30, after Ctrl-C 5 or, on several "
        "machines, 10.",
        flags=("--shutdown_timeout",),
        low=0,
        ours=True,
    )
    start_timeout: float | None = option(
        help="Seconds within which all ranks must join; else the launcher shows their stacks and ends them.",
        low=0,
        ours=True,
    )
    step_timeout: float | None = option(
        help="Seconds without progress of any rank (batch, backward, step), after which the launcher shows "
        "their stacks and ends them.",
        low=0,
        ours=True,
    )
    checkpoint_timeout: float | None = option(
        help="Seconds that a save may take; then the launcher shows the stacks of the ranks and ends them. "
        "Meanwhile step_timeout does not count.",
        low=0,
        ours=True,
    )
    straggler_report: bool = option(
        False,
        help="At the end print the time of each rank in each phase of a step, and name the slowest rank.",
        toggle=True,
        ours=True,
    )
    signals_to_handle: tuple[str, ...] | None = option(
        help="Signals that are passed on to the ranks; by default SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1.",
        comma_list=True,
        ours=True,
    )
    numa_binding: str | None = option(
        help="CPU cores of each rank: its device's NUMA node or socket, an exclusive share, or one L3 cache.",
        choices=("node", "socket", "exclusive", "core-complex"),
        ours=True,
    )
    virtual_local_rank: bool = option(
        False,
        help="Each rank sees only its own device, as device 0, and LOCAL_RANK is 0.",
        toggle=True,
        ours=True,
    )
    submit: str | None = option(
        help="Engine to which the run is submitted as a job; --dry_run prints the script or manifest.",
        choices=ENGINES,
        group="accel_state.launchers",
        in_file=False,
    )
