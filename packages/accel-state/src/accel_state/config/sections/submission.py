"""Jobs of a scheduler: the resources that ``accel launch --submit`` requests."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["ENGINES", "SubmitSection"]

ENGINES = ("slurm", "kubernetes", "ray", "skypilot", "dstack")
"""The engines to which a run can be submitted."""


@dataclass(frozen=True, repr=False, eq=False)
class SubmitSection(Section):
    """Resources and rules of the job. Numbers of machines and processes are those of the run."""

    file_key = "submit_config"
    prefix = "submit_"
    title = "Submission"

    engine: str | None = option(
        help="Engine that accel jobs asks.",
        choices=ENGINES,
        group="accel_state.launchers",
        prompt="Which engine will run the job?",
        ours=True,
    )
    job_name: str | None = option(help="Name of the job; by default that of the script.", ours=True)
    partition: str | None = option(help="Partition (queue).", ours=True)
    account: str | None = option(help="Account that the job is charged to.", ours=True)
    time: str | None = option(
        help="Time limit, as Slurm writes it: 4:00:00, 2-12 (days-hours) or minutes.", ours=True
    )
    gpus_per_machine: str | None = option(
        help="Accelerators of each machine, a number or type:number; by default one per process, none with --cpu.",
        prompt="Which accelerators has each machine, such as H100:8?",
        ours=True,
    )
    cpus_per_task: int | None = option(help="CPU cores that the job gets on each machine.", low=1, ours=True)
    memory: str | None = option(help="Memory of each machine, such as 64Gi.", ours=True)
    retries: int = option(
        0,
        help="Times that the engine starts the job again after a failure; preemptions do not count.",
        low=0,
        ours=True,
    )
    signal_time: int = option(
        300,
        help="Seconds that the ranks have to save before the job is ended, at its time limit or when its machine is "
        "needed; 0: no signal.",
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
    image: str | None = option(
        help="Container image of the job, with accel-train and accel-cli in it.",
        prompt="Which container image has the script, accel-train and accel-cli?",
        ours=True,
    )
    workdir: str | None = option(
        help="Folder in which the job runs: one of the image (Kubernetes), or one here that is uploaded (the others).",
        ours=True,
    )
    env: tuple[str, ...] | None = option(
        help="A variable of the job, as NAME=value; repeatable. Secrets are given by --submit_secrets.",
        ours=True,
    )
    secrets: tuple[str, ...] | None = option(
        help="A secret that the engine knows, as a variable of the job: NAME=secret/key, or NAME; repeatable.",
        ours=True,
    )
    volumes: tuple[str, ...] | None = option(
        help="A volume that the engine knows, and its folder in the job: claim:/folder; repeatable.",
        ours=True,
    )
    shared_memory: str | None = option(
        help="Size of /dev/shm, through which the workers of data loaders send batches, such as 16Gi.",
        ours=True,
    )
    kind: str = option(
        "Job",
        help="Kind of the Kubernetes object: an indexed Job, a JobSet, a TrainJob of Kubeflow, a Job of Volcano.",
        choices=("Job", "JobSet", "TrainJob", "VolcanoJob"),
        ours=True,
    )
    namespace: str | None = option(help="Kubernetes namespace; by default that of the context.", ours=True)
    queue: str | None = option(
        help="Queue of Kueue or Volcano.",
        prompt="Which queue of Kueue or Volcano does the job wait in (none: it has none)?",
        ours=True,
    )
    node_selector: tuple[str, ...] | None = option(
        help="A label that the job's nodes have, as label=value; repeatable.", ours=True
    )
    tolerations: tuple[str, ...] | None = option(
        help="A taint of nodes that the job tolerates, as key:effect or key=value:effect; repeatable.",
        ours=True,
    )
    service_account: str | None = option(help="Kubernetes service account of the job.", ours=True)
    address: str | None = option(
        help="Address of the engine: http://host:8265 of a Ray cluster, a context of kubectl.", ours=True
    )
