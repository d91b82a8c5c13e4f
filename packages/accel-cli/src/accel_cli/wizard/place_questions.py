"""Where the run takes place: machines, devices, strategy, number of processes, rendezvous."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from accel_cli.machine import describe_accelerators
from accel_cli.wizard.answers import Answers, equals, known, more_than, negated
from accel_cli.wizard.question import Choice, Question
from accel_state.config.default_config import DISTRIBUTED_TYPES
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Option
from accel_state.config.strategies import LaunchableStrategy, installed_strategies
from accel_state.launching.plan import plan_world

__all__ = ["MACHINE_QUESTIONS", "RENDEZVOUS_QUESTIONS", "accelerator_type"]

HERE, SEVERAL, ENGINE, TPU, SAGEMAKER = "here", "several", "engine", "tpu", "sagemaker"
CPU, ACCELERATORS = "cpu", "accelerators"
_STARTED_BY_HAND = (None, "standard", "nossh")
"""Launchers of DeepSpeed, and none, with which every machine runs the command itself."""


def accelerator_type(answers: Answers) -> str:
    """The distributed type of several accelerators of this machine's kind; GPUs if it has none."""
    return DISTRIBUTED_TYPES.get(answers.situation.machine.accelerators.kind, "MULTI_GPU")


def _place_before(answers: Answers) -> str:
    if any(name.startswith("sagemaker.") for name in answers.situation.existing):
        return SAGEMAKER
    if answers.before("distributed_type") == "XLA":
        return TPU
    if answers.before("submission.engine") is not None:
        return ENGINE
    return SEVERAL if answers.before("num_machines", 1) > 1 else HERE


def _places(answers: Answers) -> Sequence[Choice]:
    return (
        Choice(HERE, "on one machine"),
        Choice(SEVERAL, "on several machines"),
        Choice(ENGINE, "as a job of an engine: Slurm, Kubernetes, Ray, SkyPilot, dstack"),
        Choice(TPU, "on a TPU"),
        Choice(SAGEMAKER, "as a job on Amazon SageMaker"),
    )


def _devices(answers: Answers) -> Sequence[Choice]:
    machine = dataclasses.replace(answers.situation.machine, unknown="")
    found = describe_accelerators(machine) if machine.accelerators.present else "GPUs (this machine has none)"
    cpu = Choice(CPU, f"CPU ({machine.cores} core{'s' if machine.cores > 1 else ''})")
    both = (Choice(ACCELERATORS, found), cpu)
    return both if machine.accelerators.count else both[::-1]


def _device_before(answers: Answers) -> str | None:
    before = answers.before("use_cpu")
    if before is None:
        kind = answers.before("distributed_type", "NO")
        if kind == "MULTI_CPU":
            return CPU
        return ACCELERATORS if kind != "NO" or answers.situation.machine.accelerators.count else CPU
    return CPU if before else ACCELERATORS


def _strategies(answers: Answers) -> Sequence[Choice]:
    cpu = answers.get("devices") == CPU
    replicas = "MULTI_CPU" if cpu else accelerator_type(answers)
    engines = answers.situation.machine.versions
    absent = "" if "DeepSpeed" in engines else "; not installed here"
    found = [
        Choice("NO", "one process"),
        Choice(replicas, "DDP: a replica of the model on each process"),
        Choice("FSDP", "FSDP2: the training state sharded over the processes"),
        Choice("DEEPSPEED", f"DeepSpeed: ZeRO stages, offloading{absent}"),
        *(Choice(each.distributed_type, _described(each, engines)) for each in installed_strategies()),
    ]
    unfit = {"NO"} if answers.get("place") in (SEVERAL, ENGINE) else set()
    kind = answers.situation.machine.accelerators.kind
    if cpu:
        unfit |= {each.distributed_type for each in installed_strategies() if each.devices is not None}
    elif kind == "mps":  # PyTorch has no collectives between them
        unfit |= {replicas, "FSDP", "DEEPSPEED", *(each.distributed_type for each in installed_strategies())}
    return [
        choice
        for choice in found
        if choice.value not in unfit and answers.situation.offers("distributed_type", choice.value)
    ]


def _described(strategy: LaunchableStrategy, engines: Mapping[str, str]) -> str:
    absent = "; not installed here" if strategy.packages and strategy.title not in engines else ""
    return f"{strategy.title}: {strategy.summary}{absent}"


def _strategy_before(answers: Answers) -> str:
    before = answers.before("distributed_type")
    if before is not None and not before.startswith("MULTI_"):
        return str(before)
    count = answers.situation.machine.accelerators.count
    several = answers.get("place") in (SEVERAL, ENGINE) or (
        answers.get("devices") == ACCELERATORS and count > 1
    )
    if before is None and not several:
        return "NO"
    return "MULTI_CPU" if answers.get("devices") == CPU else accelerator_type(answers)


def _ids(answers: Answers) -> int:
    """Accelerators to use on this machine; 0 if they are unknown, or the CPU computes."""
    if answers.get("devices") != ACCELERATORS:
        return 0
    ids = answers.get("gpu_ids", "all")
    found = 0 if answers.get("place") == ENGINE else answers.situation.machine.accelerators.count
    return found if ids.strip().lower() == "all" else len(ids.split(","))


def _check_ids(answers: Answers, ids: str) -> None:
    config = LaunchConfig(distributed_type="NO", num_processes=1, gpu_ids=ids)
    plan_world(config, answers.situation.machine.accelerators)


def _processes(answers: Answers) -> dict[str, Any]:
    one = answers.get("place") not in (SEVERAL, ENGINE)
    replicas = answers.get("distributed_type", "").startswith("MULTI_")
    narrow: dict[str, Any] = {"low": 2 if one and replicas else 1, "high": _ids(answers) or None}
    if narrow["high"] is not None:
        narrow["high"] = max(narrow["high"], narrow["low"])
    if not one:
        narrow["prompt"] = "How many processes will run on each machine?"
    return narrow


def _processes_before(answers: Answers) -> int:
    before = answers.before("num_processes")
    if before is not None:
        return max(1, int(before) // int(answers.before("num_machines", 1)))
    return _ids(answers) or 1


def _fewest_machines(answers: Answers) -> int:
    return 2 if answers.get("place") == SEVERAL else 1


_OWN_PLACE = Option(
    help="Decides which of the other questions are asked.",
    prompt="Where will the script run?",
)
_OWN_DEVICES = Option(
    help="All machines of a run are alike. Sets use_cpu, and with the strategy distributed_type.",
    prompt="What will the processes compute on?",
)
_LOCAL = equals("place", HERE, SEVERAL, ENGINE)
_MACHINES = equals("place", SEVERAL)
_JOB = equals("place", ENGINE)

MACHINE_QUESTIONS = (
    Question(path="place", own=_OWN_PLACE, choices=_places, default=_place_before),
    Question(path="submission.engine", when=(_JOB,), required=True),
    Question(
        path="num_machines",
        when=(equals("place", SEVERAL, ENGINE),),
        narrow=lambda answers: {"low": _fewest_machines(answers)},
        default=lambda answers: max(_fewest_machines(answers), int(answers.before("num_machines", 2))),
        required=True,
    ),
    Question(path="devices", own=_OWN_DEVICES, when=(_LOCAL,), choices=_devices, default=_device_before),
    Question(path="distributed_type", when=(_LOCAL,), choices=_strategies, default=_strategy_before),
    Question(
        path="gpu_ids",
        when=(
            equals("devices", ACCELERATORS),
            negated(_JOB),
            known(lambda machine: machine.accelerators.count > 1),
        ),
        default=lambda answers: answers.before("gpu_ids", "all"),
        check=_check_ids,
        required=True,
    ),
    Question(
        path="num_processes",
        when=(equals("place", HERE, SEVERAL, ENGINE, TPU), negated(equals("distributed_type", "NO"))),
        narrow=_processes,
        default=_processes_before,
        required=True,
    ),
    Question(
        path="submission.gpus_per_machine",
        when=(equals("submission.engine", "skypilot", "dstack"), equals("devices", ACCELERATORS)),
        required=True,
    ),
    Question(path="submission.image", when=(equals("submission.engine", "kubernetes"),), required=True),
    Question(path="submission.queue", when=(equals("submission.engine", "kubernetes"),)),
)
"""Machines, devices, strategy and number of processes; the engine of a job and what it needs."""

_BY_HAND = equals("deepspeed.deepspeed_multinode_launcher", *_STARTED_BY_HAND)

RENDEZVOUS_QUESTIONS = (
    Question(
        path="machine_rank",
        when=(_MACHINES, _BY_HAND),
        narrow=lambda answers: {"high": answers.get("num_machines", 2) - 1},
        required=True,
    ),
    Question(path="main_process_ip", when=(_MACHINES,), required=True),
    Question(
        path="main_process_port",
        when=(_MACHINES,),
        narrow=lambda answers: {"low": 1},
        default=lambda answers: answers.before("main_process_port", 29500),
        required=True,
    ),
    Question(
        path="same_network",
        when=(_MACHINES, _BY_HAND),
        default=lambda answers: answers.before("same_network", True),
    ),
    Question(
        path="rdzv_backend",
        when=(more_than("num_machines", 1), _BY_HAND, equals("same_network", False)),
        required=True,
    ),
)
"""How several machines find each other."""
