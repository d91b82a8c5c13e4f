"""Options of one start of a program: what is started, how it is watched, where its output goes."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["RunOptions"]


@dataclass(frozen=True, repr=False, eq=False)
class RunOptions(Section):
    """How a program is started and watched."""

    module: bool = option(
        False,
        help="The script is the name of a module (python -m).",
        flags=("-m",),
        toggle=True,
        in_file=False,
    )
    no_python: bool = option(
        False, help="The script is a program of its own, not Python.", toggle=True, in_file=False
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
        help="Print the commands and the variables that would be set; start nothing.",
        toggle=True,
        in_file=False,
    )
    resume: bool = option(
        False,
        help="Ask the program to continue from its newest complete checkpoint, and start it again when preempted.",
        env=("ACCELERATE_RESUME",),
        toggle=True,
        in_file=False,
    )
    tee: str | None = option(
        help="Output that is both shown and logged: 0 none, 1 stdout, 2 stderr, 3 both; per rank 0:3,1:1.",
        flags=("-t",),
        ours=True,
    )
    log_dir: str | None = option(help="Folder that gets one output file per rank.", ours=True)
    role: str = option("default", help="Role of the processes in PyTorch's elastic launcher.", ours=True)
    max_restarts: int = option(0, help="How often a failed run is started again.", low=0, ours=True)
    monitor_interval: float = option(
        0.1, help="Seconds between two looks at the state of the processes.", low=0, ours=True
    )
    grace_period: float | None = option(
        help="Seconds that processes get to end after a signal; by default 30, after Ctrl-C 5.",
        low=0,
        ours=True,
    )
