"""What follows from exit codes in the objects of a job, without starting anything: the contract of submissions."""

from __future__ import annotations

import pytest
import yaml

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.launching.submission import SUBMISSIONS, Job
from testkit.job_stand_in import Decision, Ended
from testkit.kubernetes_stand_in import expand, kubernetes_engine

SETS = ("JobSet", "TrainJob")
KINDS = ("Job", *SETS, "VolcanoJob")
ALL = frozenset({0, 1})


def objects(kind, *flags):
    words = ("--cpu", "--num_machines", "2", "--num_processes", "2", "--submit_image", "image", *flags)
    config = resolve(
        environ={}, flags=parse_flags((*words, "--submit_kind", kind)), use_default_file=False
    ).local()
    return list(
        yaml.safe_load_all(SUBMISSIONS.get("kubernetes").script(Job(config, (), "train.py", suffix="a")))
    )


def engine(kind, *flags, retries=1):
    counted = ("--submit_retries", str(retries)) if kind != "VolcanoJob" else ()
    return kubernetes_engine(objects(kind, *counted, *flags))


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_done_when_all_machines_are(kind):
    made = engine(kind)
    assert made.after_exit(Ended(1, 0)).end == ""
    assert made.after_exit(Ended(0, 0)).end == "done"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [Ended(1, 75), Ended(1, 137, True), Ended(1, 75, True), Ended(1, 1, True)])
def test_preemptions_are_not_counted(kind, ended):
    made = engine(kind, retries=0)
    for _ in range(20):
        decision = made.after_exit(ended)
        assert decision.end == ""
        assert decision.again == ({1} if kind == "Job" else ALL)
    assert kind == "VolcanoJob" or made.counted == 0  # its counter has no limit


@pytest.mark.parametrize("code", [1, 2, 124, 137, 139])
@pytest.mark.parametrize("peer_first", [False, True])
@pytest.mark.parametrize("kind", ["Job", *SETS])
def test_a_failure_of_one_machine_costs_one_try(kind, peer_first, code):
    made = engine(kind, retries=1)
    crash = [Ended(0, 76), Ended(1, code)] if peer_first else [Ended(1, code), Ended(0, 76)]
    for ended in crash:
        decision = made.after_exit(ended)
        assert decision.end == ""
        if decision.again == ALL:
            break  # the other one is stopped
    assert made.counted == 1
    assert made.after_exit(Ended(1, code)).end == "failed"


def test_a_failure_ends_a_job_of_volcano_when_its_peers_have_ended():
    made = engine("VolcanoJob")
    assert made.after_exit(Ended(0, 76)) == Decision()
    assert made.after_exit(Ended(1, 1)).end == "failed"


def test_a_peer_of_a_preempted_pod_does_not_end_a_job_of_volcano():
    made = engine("VolcanoJob")
    assert made.after_exit(Ended(0, 76)) == Decision()
    assert made.after_exit(Ended(1, 137, True)).again == ALL


@pytest.mark.parametrize("kind", ["Job", *SETS])
def test_the_deadline_ends_a_job(kind):
    made = engine(kind, "--submit_time", "1", retries=5)
    assert made.deadline == 60
    assert made.after_deadline().end == "failed"


@pytest.mark.parametrize("kind", ["Job", *SETS])
def test_a_job_in_a_queue_waits(kind):
    with pytest.raises(AssertionError, match="waits for Kueue"):
        engine(kind, "--submit_queue", "team")


@pytest.mark.parametrize("kind", KINDS)
def test_machines_find_the_first_one_by_its_name(kind):
    first, second = engine(kind).containers()
    name = "PET_MASTER_ADDR" if kind == "TrainJob" else "MASTER_ADDR"
    assert [first.environ[name]] == list(first.names) == [second.environ[name]]
    rank = "PET_NODE_RANK" if kind == "TrainJob" else "NODE_RANK"
    assert [first.environ[rank], second.environ[rank]] == ["0", "1"]


def test_names_of_pods_need_the_service():
    service, made = objects("Job")
    service["spec"]["publishNotReadyAddresses"] = False
    assert kubernetes_engine([service, made]).containers()[0].names == ()
    assert kubernetes_engine([made]).containers()[0].names == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"), ("$$(A)", "$(A)"), ("$$$(A)", "$1"), ("$(B)", "$(B)"), ("$A $ $", "$A $ $"), ("$$", "$"),
        ("$(A", "$(A"), ("$@", "$@"), ("$()", "$()"),
    ],
)  # fmt: skip
def test_references_are_replaced_as_in_kubernetes(text, expected):
    """As the comment at `command` in the reference of Container says."""
    assert expand(text, {"A": "1"}) == expected
