"""Objects of Kubernetes against the schemas of Kubernetes and Kubeflow, and the real client against a mock of a server.

Run with ``hatch run engines:submissions``. ``kubernetes-validate`` accepts wrong words and knows no rule across fields,
and the models of Kubeflow drop what they do not know; what neither sees is in ``testkit/kubernetes_rules.py``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import LaunchError
from accel_state.launching.submission import SUBMISSIONS, Job
from testkit.kubernetes_rules import RULES, broken

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="hatch run engines:submissions")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="hatch run engines:submissions")
kmock = pytest.importorskip("kmock", reason="hatch run engines:submissions")
pytest.importorskip("kubernetes", reason="hatch run engines:submissions")

KUBERNETES = SUBMISSIONS.get("kubernetes")
KINDS = ("Job", "JobSet", "TrainJob", "VolcanoJob")
ALL = (
    *(
        "--num_machines",
        "2",
        "--submit_gpus_per_machine",
        "8",
        "--submit_image",
        "registry.example.com/train:1",
    ),
    *(
        "--submit_cpus_per_task",
        "16",
        "--submit_memory",
        "200Gi",
        "--submit_shared_memory",
        "32Gi",
        "--resume",
    ),
    *("--submit_volumes", "data:/data:ro", "--submit_volumes", "runs:/runs", "--submit_workdir", "/work"),
    *("--submit_env", "A=1e5", "--submit_secrets", "HF_TOKEN=hub/token", "--submit_secrets", "wandb"),
    *("--submit_node_selector", "gpu=h100", "--submit_tolerations", "nvidia.com/gpu:NoSchedule"),
    *(
        "--submit_tolerations",
        "team=a:NoExecute",
        "--submit_service_account",
        "trainer",
        "--submit_queue",
        "team",
    ),
    *("--submit_setup", 'export NOTE="$HOME"', "--submit_namespace", "research"),
)


def job(kind: str, *flags: str) -> Job:
    limited = () if kind == "VolcanoJob" else ("--submit_retries", "3", "--submit_time", "4:00:00")
    words = (*ALL, *limited, "--submit_kind", kind, *flags)
    config = resolve(environ={}, flags=parse_flags(words), use_default_file=False).local()
    return Job(config, (), "train.py", ("--lr", "1e-4", "$(HOME)"), "abc123")


def objects(kind: str) -> list[Any]:
    return list(yaml.safe_load_all(KUBERNETES.script(job(kind))))


def inside(value: Any, key: str) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    here = [value[key]] if isinstance(value, dict) and key in value else []
    return here + [one for part in parts for one in inside(part, key)]


def core_objects(kind: str) -> list[Any]:
    """What the core API knows of a job: its Services and Jobs, those in a JobSet too, and its pods."""
    made = objects(kind)
    found = [one for one in made if one["apiVersion"] in ("v1", "batch/v1")]
    metadata = {"name": "a"}
    for whole in made:
        for template in inside(whole, "template"):
            if "completionMode" in template.get("spec", {}):
                found.append(
                    {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}
                )
            if "containers" in template.get("spec", {}):
                found.append({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_schema_of_kubernetes_knows_every_field(kind: str, version: str) -> None:
    found = core_objects(kind)
    assert len(found) >= (1 if kind == "VolcanoJob" else 2)
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schema_of_kubernetes_finds_an_unknown_field() -> None:
    for one in core_objects("Job"):
        one["spec"]["replicas"] = 2
        with pytest.raises(kubernetes_validate.ValidationError, match="replicas"):
            kubernetes_validate.validate(one, "1.37", strict=True)


def kubeflow(kind: str) -> list[tuple[Any, Any]]:
    """What the models of Kubeflow know of a job, each with its model."""
    if kind == "JobSet":
        return [(models.JobsetV1alpha2JobSetSpec, objects("JobSet")[0]["spec"])]
    runtime, made = objects("TrainJob")
    return [(models.TrainerV1alpha1TrainingRuntime, runtime), (models.TrainerV1alpha1TrainJob, made)]


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_the_models_of_kubeflow_know_every_field(kind: str) -> None:
    for model, one in kubeflow(kind):
        assert json.loads(model.from_dict(one).to_json()) == one


LISTED = re.compile(r"Valid values are|Possible values are|One of \w+, |It can be `")


def strangers(model: Any) -> list[str]:
    """Words that the description of their field does not list, where it lists words."""
    found = []
    for name, about in type(model).model_fields.items():
        value = getattr(model, name)
        for one in (
            value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
        ):
            if hasattr(type(one), "model_fields"):
                found += strangers(one)
        if isinstance(value, str) and LISTED.search(about.description or ""):
            found += (
                [f"{name}={value}"] if not re.search(rf"\b{re.escape(value)}\b", about.description) else []
            )
    return found


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_words_are_those_that_the_descriptions_list(kind: str) -> None:
    for model, one in kubeflow(kind):
        assert strangers(model.from_dict(one)) == []


def test_a_word_that_no_description_lists_is_found() -> None:
    ((model, one),) = kubeflow("JobSet")
    one["failurePolicy"]["rules"][0]["action"] = "RestartSet"
    assert strangers(model.from_dict(one)) == ["action=RestartSet"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_is_broken(kind: str) -> None:
    assert broken(objects(kind)) == []


JOB = (1, "spec")
POD = (*JOB, "template", "spec")
BOX = (*POD, "containers", 0)
CODES = (*JOB, "podFailurePolicy", "rules", 1, "onExitCodes")
SET = (0, "spec", "failurePolicy", "rules")
VOLCANO = (0, "spec")
PLANTED: dict[str, tuple[str, tuple[str | int, ...], Any]] = {
    "object: a name is a label of DNS": ("Job", (1, "metadata", "name"), "Train_1"),
    "object: names of pods have 63 characters": ("JobSet", (0, "metadata", "name"), "a" * 60),
    "object: Kueue admits what is suspended": ("Job", (*JOB, "suspend"), False),
    "labels: keys": ("Job", (1, "metadata", "labels"), {"a/b/c": "d"}),
    "labels: values have 63 characters": ("Job", (*POD, "nodeSelector", "gpu"), "a" * 64),
    "all: a headless service for the names of the pods": ("Job", (0, "spec", "publishNotReadyAddresses"), False),
    "all: a TrainJob has a runtime with a trainer": ("TrainJob", (1, "spec", "runtimeRef", "name"), "other"),
    "job: an indexed Job has completions": ("Job", (*JOB, "completionMode"), "NonIndexed"),
    "job: a policy for failures needs restartPolicy Never": ("Job", (*POD, "restartPolicy"), "OnFailure"),
    "job: every pod runs at once": ("Job", (*JOB, "parallelism"), 1),
    "job: limits are not negative": ("Job", (*JOB, "activeDeadlineSeconds"), 0),
    "job: at most 20 rules": ("Job", (*JOB, "podFailurePolicy", "rules"), [{"action": "Count", "onExitCodes": {
        "containerName": "node", "operator": "In", "values": [1]}}] * 21),
    "job: a rule has one requirement": ("Job", (*CODES[:-1], "onPodConditions"), [{"type": "A", "status": "True"}]),
    "job: actions of rules": ("Job", (*CODES[:-1], "action"), "Skip"),
    "job: a rule names a container of the pod": ("Job", (*CODES, "containerName"), "main"),
    "codes: operators": ("Job", (*CODES, "operator"), "Is"),
    "codes: from 1 to 255, ordered, once": ("Job", (*CODES, "values"), [76, 75]),
    "pod: the launcher ends before the pod is killed": ("Job", (*POD, "terminationGracePeriodSeconds"), 30),
    "pod: volumes have names of their own": ("Job", (*POD, "volumes"), lambda those: [*those, those[0]]),
    "pod: what is mounted is a volume": ("Job", (*BOX, "volumeMounts", 0, "name"), "memory"),
    "pod: sizes and media of folders in memory": ("Job", (*POD, "volumes", 0, "emptyDir", "sizeLimit"), "32GB"),
    "pod: tolerations": ("Job", (*POD, "tolerations", 0, "operator"), "Is"),
    "container: folders are mounted once": ("Job", (*BOX, "volumeMounts", 1, "mountPath"), "/dev/shm"),
    "container: variables are set once": ("Job", (*BOX, "env", 4, "name"), "NNODES"),
    "container: a variable has one source": ("Job", (*BOX, "env", 0, "valueFrom"), {}),
    "container: values of variables are text": ("Job", (*BOX, "env", 4, "value"), 1e5),
    "container: quantities": ("Job", (*BOX, "resources", "limits", "memory"), "200GB"),
    "container: devices are limits and whole": ("Job", (*BOX, "resources", "requests", "nvidia.com/gpu"), 8),
    "set: names of rules": ("JobSet", (*SET, 1, "name"), "on:"),
    "set: actions": ("JobSet", (*SET, 0, "action"), "RestartSet"),
    "set: reasons": ("JobSet", (*SET, 0, "onJobFailureReasons"), ["Preempted"]),
    "volcano: a policy has one event or one code": ("VolcanoJob", (*VOLCANO, "policies", 0, "event"), "PodFailed"),
    "volcano: actions": ("VolcanoJob", (*VOLCANO, "policies", 0, "action"), "Restart"),
    "volcano: no more pods are needed than there are": ("VolcanoJob", (*VOLCANO, "minAvailable"), 3),
    "volcano: tasks have names of their own": ("VolcanoJob", (*VOLCANO, "tasks"), [{"name": "a", "replicas": 1}] * 2),
}  # fmt: skip
"""Rule to the kind of a job, a place in its objects, and what breaks the rule there."""


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_the_error_that_breaks_it(rule: str) -> None:
    kind, (*way, last), value = PLANTED[rule]
    made = objects(kind)
    place = functools.reduce(lambda found, key: found[key], way, made)
    place[last] = value(place[last]) if callable(value) else value
    assert broken(made) == [rule]


class Server:
    """kmock's emulation of an API server, in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.mock = kmock.KubernetesEmulator()
        for resource in (
            *("v1/services", "v1/pods", "batch/v1/jobs", "jobset.x-k8s.io/v1alpha2/jobsets"),
            *("trainer.kubeflow.org/v1alpha1/trainjobs", "trainer.kubeflow.org/v1alpha1/trainingruntimes"),
            "batch.volcano.sh/v1alpha1/jobs",
        ):
            self.mock.resources[resource] = {}
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = kmock.Server(self.mock)
        self.wait(self.mock.__aenter__())
        self.wait(self.server.__aenter__())

    def wait(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self.loop).result(30)

    def close(self) -> None:
        self.wait(self.server.__aexit__(None, None, None))
        self.wait(self.mock.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    def config(self, folder: Path) -> str:
        path = folder / "config"
        named = [
            {"name": "mock", "cluster": {"server": str(self.server.url).rstrip("/")}},
            {"name": "me", "user": {"token": "secret-token"}},
            {"name": "mock", "context": {"cluster": "mock", "user": "me", "namespace": "research"}},
        ]
        text = {"clusters": named[:1], "users": named[1:2], "contexts": named[2:], "current-context": "mock"}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **text}))
        return str(path)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(params=["client", "kubectl"])
def environ(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    if request.param == "kubectl":
        monkeypatch.setitem(sys.modules, "kubernetes", None)
    return {
        "KUBECONFIG": server.config(tmp_path),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_created_listed_and_cancelled(kind: str, server: Server, environ: dict[str, str]) -> None:
    about = SubmitSection(namespace="research")
    name = f"{kind.lower()}/train-abc123"
    told = KUBERNETES.submit(job(kind), environ)
    assert told.startswith(f"submitted {name} to namespace research")
    bodies = [request.data for request in server.mock if request.method == "POST"]
    assert bodies == objects(kind)
    (found,) = KUBERNETES.jobs(about, environ)
    assert (found.id, found.state, found.machines) == (name, "waiting", 2)
    KUBERNETES.cancel(name, about, environ)
    assert KUBERNETES.jobs(about, environ) == []


def test_a_job_of_the_same_name_is_refused(server: Server, environ: dict[str, str]) -> None:
    exists = {"kind": "Status", "status": "Failure", "reason": "AlreadyExists", "code": 409,
              "message": 'jobs.batch "train-abc123" already exists\x1b[2J'}  # fmt: skip
    server.mock["post /apis/batch/v1/namespaces/research/jobs"] << kmock.Response(payload=exists, status=409)
    with pytest.raises(LaunchError, match=r"refused the Job train-abc123.*already exists") as told:
        KUBERNETES.submit(job("Job"), environ)
    assert "\x1b" not in str(told.value)
    # kubectl asks for the kinds that there are first.
    assert [one.method for one in server.mock if one.method != "GET"] == ["POST", "POST", "DELETE"]


def test_logs_come_from_every_pod(server: Server, environ: dict[str, str]) -> None:
    KUBERNETES.submit(job("Job"), environ)
    made = {"metadata": {"name": "train-abc123", "namespace": "research"}, "status": {"conditions": [
        {"type": "Complete", "status": "True"}]}}  # fmt: skip
    server.mock["get /apis/batch/v1/namespaces/research/jobs/train-abc123"] << made
    pods = [
        {"metadata": {"name": f"p{n}", "annotations": {"batch.kubernetes.io/job-completion-index": str(n)}},
         "status": {"phase": "Succeeded"}}
        for n in range(2)
    ]  # fmt: skip
    server.mock["get /api/v1/namespaces/research/pods"] << {"items": pods}
    for number in range(2):
        server.mock[f"get /api/v1/namespaces/research/pods/p{number}/log"] << f"a{number}\nb".encode()
    about = SubmitSection(namespace="research")
    expected = ["[machine 0] a0", "[machine 0] b", "[machine 1] a1", "[machine 1] b"]
    for follow in (False, True):
        assert sorted(KUBERNETES.logs("job/train-abc123", about, environ, follow=follow)) == expected


def test_no_cluster_and_one_that_does_not_answer(environ: dict[str, str], tmp_path: Path) -> None:
    config = Path(environ["KUBECONFIG"])
    config.write_text(re.sub(r"server: .*", "server: http://127.0.0.1:1", config.read_text()))
    with pytest.raises(LaunchError, match=r"does not answer|refused"):
        KUBERNETES.jobs(SubmitSection(), environ)
    with pytest.raises(
        LaunchError, match=r"no cluster is configured|cannot locate context other.*--submit_address"
    ):
        KUBERNETES.jobs(SubmitSection(address="other"), environ)
