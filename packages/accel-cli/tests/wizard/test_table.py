"""The table of questions: which of them come after which answers, without a terminal."""

import random

import pytest
import yaml

from accel_cli.app import main
from accel_cli.machine import Machine
from accel_cli.wizard import outcome
from accel_cli.wizard.answers import Answers, Situation
from accel_cli.wizard.interview import Interview
from accel_cli.wizard.table import QUESTIONS
from accel_state.config.files import load, save
from accel_state.config.merge import resolve
from accel_state.launching.hardware import Accelerators
from testkit.wizard_branches import BRANCHES


def situation(devices=0, offers=lambda path, value: True, existing=None):
    kind = Accelerators("cuda", devices, devices, "CUDA_VISIBLE_DEVICES") if devices else Accelerators()
    return Situation(Machine(cores=8, accelerators=kind), existing or {}, offers)


def interview(branch, known, asked):
    def ask(question):
        asked.append(question.name)
        answer = branch.answers.get(question.name, question.default)
        assert answer is not None or question.hint == "none" or question.choices, (
            f"{question.name} needs an answer"
        )
        if question.choices and not question.multiple:
            assert answer in [choice.value for choice in question.choices]
        return answer

    return Interview(QUESTIONS, known, ask).run()


def launched_here(branch):
    """Whether this machine can plan the run: no devices, no job, no files or tools that it may not have."""
    here = not branch.devices and branch.answers.get("place", "here") in ("here", "several")
    files = ("mpirun.hostfile", "deepspeed.deepspeed_hostfile", "deepspeed.hf_ds_config")
    return here and not branch.needs and not any(name in branch.answers for name in files)


def entry(data, key):
    for part in key.split("."):
        data = data[part]
    return data


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.name)
def test_a_branch_asks_its_questions_and_writes_its_file(branch, tmp_path):
    asked = []
    others = {need for other in BRANCHES for need in other.needs} - set(branch.needs)
    known = situation(branch.devices, lambda path, value: (path, value) not in others)
    answers = interview(branch, known, asked)
    assert asked == branch.asked
    file = save(outcome.configuration(answers), tmp_path / "config.yaml")
    assert load(file) == outcome.configuration(answers)
    data = yaml.safe_load(file.read_text())
    assert {key: entry(data, key) for key in branch.file} == branch.file
    assert resolve(file, environ={}).config.compute_environment == data["compute_environment"]


@pytest.mark.parametrize(
    "branch", [branch for branch in BRANCHES if launched_here(branch)], ids=lambda branch: branch.name
)
def test_accel_launch_takes_the_file(branch, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    answers = interview(branch, situation(0, outcome.offers), [])
    file = save(outcome.configuration(answers), tmp_path / "config.yaml")
    assert main(["launch", "--config_file", str(file), "--dry-run", str(tmp_path / "train.py")]) == 0
    assert "train.py" in capsys.readouterr().out


def test_every_question_is_in_a_branch():
    names = [question.name for question in QUESTIONS]
    assert len(set(names)) == len(names)
    assert {name for branch in BRANCHES for name in branch.asked} == set(names)


@pytest.mark.parametrize(
    ("place", "strategy", "offered"),
    [("here", "FSDP", True), ("here", "DEEPSPEED", False), ("tpu", None, False), ("here", "MULTI_GPU", True)],
)
def test_fp8_is_offered_where_an_engine_computes_in_it(place, strategy, offered):
    def ask(question):
        found[question.name] = [choice.value for choice in question.choices]
        return chosen.get(question.name, 1 if question.default is None else question.default)

    found, chosen = {}, {"devices": "accelerators", "place": place, "distributed_type": strategy}
    Interview(QUESTIONS, situation(4, lambda path, value: True), ask).run()
    assert ("fp8" in found["mixed_precision"]) is offered
    assert "bf16" in found["mixed_precision"]


def test_what_cannot_run_is_not_offered():
    def nothing(path, value):
        return not any((path, value) in branch.needs for branch in BRANCHES)

    def ask(question):
        asked.append(question.name)
        offered.setdefault(question.name, []).extend(choice.value for choice in question.choices)
        return chosen.get(question.name, 1 if question.default is None else question.default)

    offered, asked = {}, []
    for place, strategy in (("here", "FSDP"), ("several", "DEEPSPEED"), ("tpu", None)):
        chosen = {"devices": "accelerators", "place": place, "distributed_type": strategy}
        Interview(QUESTIONS, situation(4, nothing), ask).run()
    assert "MEGATRON_LM" not in offered["distributed_type"]
    for name in ("deepspeed.deepspeed_multinode_launcher", "tpu.tpu_use_cluster"):
        assert name not in asked


TYPED = {
    "main_process_ip": "10.0.0.1",
    "deepspeed.gradient_clipping": "1.0",
    "sagemaker.iam_role_name": "role",
    "sagemaker.ec2_instance_type": "ml.p3",
    "gpu_ids": "0,1",
    "tpu.tpu_env": "A=1, B=2",
}


class Watched(Answers):
    """Answers that record which of them were looked at."""

    looked = None

    def get(self, name, otherwise=None):
        if self.looked is not None:
            self.looked.add(name)
        return super().get(name, otherwise)


@pytest.mark.parametrize("seed", range(150))
def test_random_answers_lead_to_a_valid_file(seed, tmp_path):
    chance = random.Random(seed)

    def ask(question):
        if question.multiple:
            return tuple(choice.value for choice in question.choices if chance.random() < 0.5)
        if question.choices:
            return chance.choice(question.choices).value
        if question.default is not None and chance.random() < 0.7:
            return question.parse("")
        if question.name.startswith("parallelism."):
            return question.default
        if question.hint in ("", "none"):
            return question.parse(TYPED.get(question.name, "x"))
        return question.parse(TYPED.get(question.name, question.hint))

    answers = Interview(QUESTIONS, situation(chance.choice((0, 1, 2, 8))), ask).run()
    config = outcome.configuration(answers)
    file = save(config, tmp_path / "config.json")
    assert load(file) == config
    resolve(file, environ={})
    # A condition that looked at a later question would change its mind after going back.
    order = {question.name: at for at, question in enumerate(QUESTIONS)}
    for question in QUESTIONS:
        watched = Watched(answers.situation, answers.given)
        watched.looked = set()
        question.applies(watched)
        assert all(order[name] < order[question.name] for name in watched.looked), question.name


def test_the_launcher_decides_what_is_offered():
    assert outcome.offers("mixed_precision", "bf16")
    assert outcome.offers("distributed_type", "FSDP")
    assert outcome.offers("fp8.backend", "AO")
    assert not outcome.offers("fp8.backend", "MSAMP")
