"""The questions of each engine: FSDP, DeepSpeed, the device mesh, installed strategies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from accel_cli.wizard.answers import Answers, Condition, equals, more_than, negated, offered, only_if
from accel_cli.wizard.place_questions import SEVERAL
from accel_cli.wizard.question import Choice, Question
from accel_state.config.launch import LaunchConfig
from accel_state.config.option import Option
from accel_state.config.parallel_degrees import experts_misfit
from accel_state.config.roots import complete_root
from accel_state.config.schema import schema_of
from accel_state.config.strategies import LaunchableStrategy, StrategyQuestion, installed_strategies
from accel_state.errors import ConfigError

__all__ = ["ENGINE_QUESTIONS", "MESH_DEGREES", "process_count"]

_FSDP = equals("distributed_type", "FSDP")
_DEEPSPEED = equals("distributed_type", "DEEPSPEED")

_YES_NO = (Choice(True, "yes", "y"), Choice(False, "no", "n"))

_WRAP = (
    Choice("TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP: layers of certain classes"),
    Choice("SIZE_BASED_WRAP", "SIZE_BASED_WRAP: modules above a number of parameters"),
    Choice("NO_WRAP", "NO_WRAP: the model as a whole"),
)
_STATE_DICTS = (
    Choice("SHARDED_STATE_DICT", "SHARDED_STATE_DICT: a part per rank"),
    Choice("FULL_STATE_DICT", "FULL_STATE_DICT: whole tensors on rank 0"),
)

_FSDP_QUESTIONS = (
    Question(
        path="fsdp.auto_wrap_policy",
        when=(_FSDP,),
        choices=lambda answers: _WRAP,
    ),
    Question(
        path="fsdp.transformer_cls_names_to_wrap",
        when=(equals("fsdp.auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),),
    ),
    Question(
        path="fsdp.min_num_params",
        when=(equals("fsdp.auto_wrap_policy", "SIZE_BASED_WRAP"),),
        required=True,
    ),
    Question(
        path="fsdp.reshard_after_forward",
        when=(_FSDP,),
        choices=lambda answers: _YES_NO,
        default=lambda answers: answers.before("fsdp.reshard_after_forward", True) in (True, "FULL_SHARD"),
    ),
    Question(path="fsdp.cpu_offload", when=(_FSDP,)),
    Question(path="fsdp.state_dict_type", when=(_FSDP,), choices=lambda answers: _STATE_DICTS),
    Question(path="fsdp.cpu_ram_efficient_loading", when=(_FSDP,)),
    Question(path="fsdp.activation_checkpointing", when=(_FSDP,)),
    Question(
        path="fsdp.activation_checkpointing_offload",
        when=(equals("fsdp.activation_checkpointing", True),),
    ),
)


def process_count(answers: Answers) -> int:
    """Processes over all machines."""
    return int(answers.get("num_processes", 1)) * int(answers.get("num_machines", 1))


MESH_DEGREES = (
    "parallelism.pp_size",
    "parallelism.tp_size",
    "parallelism.cp_size",
    "parallelism.sp_size",
    "parallelism.dp_replicate_size",
    "parallelism.dp_shard_size",
)
"""The degrees of the mesh, in the order of their questions; the last one takes the remaining ranks."""


def _rest(answers: Answers) -> int:
    """Ranks that the degrees so far leave for the next ones."""
    return process_count(answers) // math.prod(int(answers.get(name, 1)) for name in MESH_DEGREES)


def _check_degree(answers: Answers, degree: int) -> None:
    rest = _rest(answers)
    if rest % degree:
        raise ConfigError(
            f"the answer is {degree}, which does not divide the {rest} ranks that the {process_count(answers)} "
            "processes leave for this degree and the next ones"
        )


def _check_last_degree(answers: Answers, degree: int) -> None:
    if degree != _rest(answers):
        raise ConfigError(
            f"the answer is {degree}, but the degrees must multiply to the {process_count(answers)} processes: "
            f"{_rest(answers)} is left"
        )


def _check_experts(answers: Answers, experts: int) -> None:
    degrees = {
        path.rpartition(".")[2].removesuffix("_size"): int(answers.get(path, 1)) for path in MESH_DEGREES
    }
    wrong = experts_misfit(degrees, experts)
    if wrong is not None:
        raise ConfigError(wrong)


_MESH = equals("use_parallelism_config", True)


def _degree(path: str, last: bool = False, without: str | None = None) -> Question:
    """The question for a degree; it is not asked where the degree `without` is above 1."""
    return Question(
        path=path,
        when=(_MESH, *([] if without is None else [equals(without, 1)])),
        default=_rest if last else lambda answers: answers.before(path, 1),
        check=_check_last_degree if last else _check_degree,
        required=True,
    )


_MESH_QUESTIONS = (
    Question(path="use_parallelism_config", when=(_FSDP, offered("use_parallelism_config"))),
    _degree("parallelism.pp_size"),
    Question(path="parallelism.pp_schedule", when=(more_than("parallelism.pp_size", 1),)),
    _degree("parallelism.tp_size"),
    _degree("parallelism.cp_size", without="parallelism.pp_size"),
    Question(path="parallelism.cp_comm_strategy", when=(more_than("parallelism.cp_size", 1),)),
    Question(path="parallelism.cp_load_balance", when=(more_than("parallelism.cp_size", 1),)),
    _degree("parallelism.sp_size", without="parallelism.pp_size"),
    _degree("parallelism.dp_replicate_size"),
    _degree("parallelism.dp_shard_size", last=True),
    Question(
        path="parallelism.ep_size",
        when=(_MESH, equals("parallelism.tp_size", 1), equals("parallelism.pp_size", 1)),
        default=lambda answers: answers.before("parallelism.ep_size", 1),
        check=_check_experts,
    ),
)

_OWN_FILE = Option(
    help="Such a file sets stage, offloading, clipping and accumulation; otherwise questions follow.",
    prompt="Do you have a JSON file with DeepSpeed's own configuration?",
)
_STAGES = (
    Choice(0, "0: nothing is sharded"),
    Choice(1, "1: optimizer states"),
    Choice(2, "2: gradients too"),
    Choice(3, "3: parameters too"),
)


def _check_json(answers: Answers, path: str) -> None:
    """Refuse an existing file that is not JSON; a missing one is only mentioned at the end."""
    file = Path(path).expanduser()
    if not file.is_file():
        return
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


_ANSWERED = only_if(_DEEPSPEED, equals("deepspeed_file", False))
_STAGE_3: tuple[Condition, ...] = (_ANSWERED, equals("deepspeed.zero_stage", 3))


def _launchers(answers: Answers) -> Sequence[Choice]:
    labels = {
        "standard": "standard: accel launch runs on every machine",
        "pdsh": "pdsh: one command, which reaches the others over SSH",
        "nossh": "nossh: one command per machine, with a hostfile and without SSH",
    }
    path = "deepspeed.deepspeed_multinode_launcher"
    names = schema_of(LaunchConfig).by_path[path].about.choices
    found = [Choice(name, labels.get(name, name)) for name in names if answers.situation.offers(path, name)]
    return sorted(found, key=lambda choice: choice.value != "standard")


_FILTERS = equals("deepspeed.deepspeed_multinode_launcher", "pdsh", "nossh", "slurm")
"""Launchers that can leave out a part of the hostfile; those of MPI use all of it."""
_OWN_LAUNCHER: tuple[Condition, ...] = (
    negated(equals("deepspeed.deepspeed_multinode_launcher", None, "standard")),
)

_DEEPSPEED_QUESTIONS = (
    Question(
        path="deepspeed_file",
        own=_OWN_FILE,
        when=(_DEEPSPEED,),
        choices=lambda answers: _YES_NO,
        default=lambda answers: answers.before("deepspeed.hf_ds_config") is not None,
    ),
    Question(
        path="deepspeed.hf_ds_config",
        when=(_DEEPSPEED, equals("deepspeed_file", True)),
        required=True,
        file=True,
        check=_check_json,
    ),
    Question(
        path="deepspeed.zero_stage",
        when=(_ANSWERED,),
        choices=lambda answers: _STAGES,
        default=lambda answers: answers.before("deepspeed.zero_stage", 2),
    ),
    Question(
        path="deepspeed.offload_optimizer_device",
        when=(_ANSWERED, more_than("deepspeed.zero_stage", 1)),
    ),
    Question(
        path="deepspeed.offload_optimizer_nvme_path",
        when=(equals("deepspeed.offload_optimizer_device", "nvme"),),
        required=True,
        file=True,
    ),
    Question(path="deepspeed.offload_param_device", when=_STAGE_3),
    Question(
        path="deepspeed.offload_param_nvme_path",
        when=(equals("deepspeed.offload_param_device", "nvme"),),
        required=True,
        file=True,
    ),
    Question(path="deepspeed.gradient_clipping", when=(_ANSWERED,)),
    Question(
        path="deepspeed.zero3_init_flag", when=(_DEEPSPEED, negated(equals("deepspeed.zero_stage", 0, 1, 2)))
    ),
    Question(path="deepspeed.zero3_save_16bit_model", when=_STAGE_3),
    Question(path="deepspeed.transformer_moe_cls_names", when=(_DEEPSPEED,)),
    Question(
        path="deepspeed.deepspeed_multinode_launcher",
        when=(
            _DEEPSPEED,
            equals("place", SEVERAL),
            offered("deepspeed.deepspeed_multinode_launcher", "pdsh"),
        ),
        choices=_launchers,
    ),
    Question(path="deepspeed.deepspeed_hostfile", when=_OWN_LAUNCHER, required=True, file=True),
    Question(path="deepspeed.deepspeed_exclusion_filter", when=(_FILTERS,)),
    Question(
        path="deepspeed.deepspeed_inclusion_filter",
        when=(_FILTERS, equals("deepspeed.deepspeed_exclusion_filter", None)),
    ),
)


def _of_strategy(strategy: LaunchableStrategy, question: StrategyQuestion) -> Question:
    """The row of a question that an installed strategy declares."""
    path = f"{strategy.section_name}.{question.option}"

    def asked(answers: Answers) -> bool:
        before = {
            name.partition(".")[2]: value
            for name, value in answers.given.items()
            if name.startswith(f"{strategy.section_name}.")
        }
        return question.when(before)

    return Question(
        path=path,
        when=(equals("distributed_type", strategy.distributed_type), asked),
        root=complete_root(),
        default=None if question.default is None else lambda answers: answers.before(path, question.default),
        required=question.required,
    )


ENGINE_QUESTIONS = (
    *_FSDP_QUESTIONS,
    *_MESH_QUESTIONS,
    *_DEEPSPEED_QUESTIONS,
    *(_of_strategy(each, question) for each in installed_strategies() for question in each.questions),
)
"""The questions of all engines."""
