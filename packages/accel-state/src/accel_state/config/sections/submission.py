"""Jobs of a scheduler: the resources that ``accel launch --submit`` requests."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["SubmitSection"]


@dataclass(frozen=True, repr=False, eq=False)
class SubmitSection(Section):
    """Resources and rules of the job. Numbers of machines and processes are those of the run."""

    file_key = "submit_config"
    prefix = "submit_"
    title = "Submission"

    job_name: str | None = option(help="Name of the job; by default that of the script.", ours=True)
    partition: str | None = option(help="Partition (queue).", ours=True)
    account: str | None = option(help="Account that the job is charged to.", ours=True)
    time: str | None = option(
        help="Time limit, as the scheduler writes it: 4:00:00, 2-12 or minutes.", ours=True
    )
    gpus_per_machine: str | None = option(
        help="Accelerators of each machine, a number or type:number; by default one per process, none with --cpu.",
        ours=True,
    )
    cpus_per_task: int | None = option(help="CPU cores that the job gets on each machine.", low=1, ours=True)
    signal_time: int = option(
        300,
        help="Seconds before the time limit at which the ranks get SIGUSR1, to save; 0: no signal.",
        low=0,
        ours=True,
    )
    output: str | None = option(
        help="Log file of the job; by default job_name-%j.log in log_dir, else in the current folder.",
        ours=True,
    )
    setup: tuple[str, ...] | None = option(
        help="A shell line that runs before the launch (modules, environments); repeatable.", ours=True
    )
    args: tuple[str, ...] | None = option(
        help="A further line for the scheduler, such as --constraint=a100; repeatable.", ours=True
    )
