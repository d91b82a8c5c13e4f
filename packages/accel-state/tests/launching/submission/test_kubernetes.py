"""Objects of Kubernetes, and what an API server answers; `tests-integration/engines/test_submissions.py` runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import ConfigError, LaunchError, MissingDependencyError
from accel_state.launching.submission import SUBMISSIONS, Job

KUBERNETES = SUBMISSIONS.get("kubernetes")
KINDS = ("Job", "JobSet", "TrainJob", "VolcanoJob")
TWO = ("--cpu", "--num_machines", "2", "--num_processes", "4", "--submit_image", "image")


def job(*flags, script="folder/train.py", arguments=(), suffix="abc123"):
    config = resolve(environ={}, flags=parse_flags((*TWO, *flags)), use_default_file=False).local()
    return Job(config, ("accel", "launch"), script, tuple(arguments), suffix)


def objects(*flags, **kept):
    return list(yaml.safe_load_all(KUBERNETES.script(job(*flags, **kept))))


def found(value, key):
    """All values of a key, wherever they are."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    here = [value[key]] if isinstance(value, dict) and key in value else []
    return here + [one for part in inside for one in found(part, key)]


def pod(*flags, **kept):
    """The pod of the job, and its container."""
    (template,) = (
        one for one in found(objects(*flags, **kept), "template") if "containers" in one.get("spec", {})
    )
    (container,) = template["spec"]["containers"]
    return template["spec"], container


def variables(container):
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", ())}


def expanded(text, values):
    """What Kubernetes makes of a word of a command (the comment at ``command`` in the reference of Container)."""
    form = r"\$\$|\$\((\w+)\)"
    return re.sub(form, lambda one: "$" if one[0] == "$$" else values.get(one[1], one[0]), text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_knows_the_world(kind):
    made = objects("--submit_kind", kind)
    assert [one["kind"] for one in made] == {
        "Job": ["Service", "Job"],
        "JobSet": ["JobSet"],
        "TrainJob": ["TrainingRuntime", "TrainJob"],
        "VolcanoJob": ["Job"],
    }[kind]
    assert {one["metadata"]["name"] for one in made} == {"train-abc123"}
    _, container = pod("--submit_kind", kind)
    words = container["command"]
    assert words[:2] == ["accel", "launch"]
    assert words[-1] == "folder/train.py"
    assert {"--num_machines=2", "--num_processes=4", "--cpu"} <= set(words)
    assert not any("submit" in word for word in words)
    told = variables(container)
    if kind == "TrainJob":  # the trainer sets PET_*, and only if the TrainJob has a trainer
        assert told == {}
        assert made[-1]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 2}
        assert made[-1]["spec"]["runtimeRef"]["name"] == "train-abc123"
        assert made[-1]["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
        return
    assert told["NNODES"] == "2"
    annotation = (
        "volcano.sh/task-index" if kind == "VolcanoJob" else "batch.kubernetes.io/job-completion-index"
    )
    assert told["NODE_RANK"] == {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
    assert told["MASTER_PORT"] == "29500"
    assert (
        told["MASTER_ADDR"]
        == {
            "Job": "train-abc123-0.train-abc123",
            "JobSet": "train-abc123-node-0-0.train-abc123",
            "VolcanoJob": "train-abc123-node-0.train-abc123",
        }[kind]
    )


def test_the_service_of_an_indexed_job_selects_its_pods_before_they_are_ready():
    service, made = objects()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = made["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert (made["spec"]["completionMode"], made["spec"]["completions"], made["spec"]["parallelism"]) == (
        "Indexed",
        2,
        2,
    )


def test_an_indexed_job_counts_a_crash_of_the_world_once():
    spec = objects("--submit_retries", "3", "--submit_time", "4:00:00")[1]["spec"]
    assert spec["backoffLimit"] == 3
    assert spec["activeDeadlineSeconds"] == 4 * 3600
    disrupted, codes = spec["podFailurePolicy"]["rules"]
    assert (disrupted["action"], codes["action"]) == ("Ignore", "Ignore")
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert codes["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [75, 76]}


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_set_starts_again_without_counting_preemptions(kind):
    made = objects("--submit_kind", kind, "--submit_retries", "3", "--submit_time", "60")
    (policy,) = found(made, "failurePolicy")
    assert policy["maxRestarts"] == 3
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"]),
        ("FailJobSet", ["DeadlineExceeded"]),
    ]
    (rules,) = found(found(made, "podFailurePolicy"), "rules")
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob", "FailJob"]
    assert [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule] == [[76], [75]]
    assert found(made, "backoffLimit") == [0]
    assert found(made, "activeDeadlineSeconds") == [3600]


def test_a_job_of_volcano_starts_again_after_preemptions_alone():
    (made,) = objects("--submit_kind", "VolcanoJob", "--submit_queue", "research")
    spec = made["spec"]
    assert spec["policies"] == [
        {"exitCode": 75, "action": "RestartJob"},
        {"event": "PodEvicted", "action": "RestartJob"},
    ]
    assert (spec["minAvailable"], spec["queue"], spec["schedulerName"]) == (2, "research", "volcano")
    assert "svc" in spec["plugins"]
    assert found(made, "suspend") == []


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_a_job_with_a_queue_waits_for_kueue(kind):
    made = objects("--submit_kind", kind, "--submit_queue", "user-queue")
    assert made[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "user-queue"
    assert made[-1]["spec"]["suspend"] is True
    assert found(objects("--submit_kind", kind), "suspend") == []


def test_resources_reach_the_pod():
    flags = (
        *("--submit_gpus_per_machine", "8", "--submit_cpus_per_task", "16", "--submit_memory", "200Gi"),
        *(
            "--submit_shared_memory",
            "32Gi",
            "--submit_volumes",
            "data:/data:ro",
            "--submit_volumes",
            "runs:/runs",
        ),
        *("--submit_env", "A=b=c", "--submit_secrets", "HF_TOKEN=hub/token", "--submit_secrets", "wandb"),
        *("--submit_node_selector", "gpu=h100", "--submit_tolerations", "nvidia.com/gpu:NoSchedule"),
        *(
            "--submit_tolerations",
            "team=a:NoExecute",
            "--submit_service_account",
            "trainer",
            "--submit_workdir",
            "/w",
        ),
    )
    spec, container = pod(*flags)
    assert container["resources"] == {
        "requests": {"cpu": "16", "memory": "200Gi"},
        "limits": {"memory": "200Gi", "nvidia.com/gpu": 8},
    }
    assert {one["name"]: one for one in spec["volumes"]} == {
        "shm": {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
        "volume-0": {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}},
        "volume-1": {"name": "volume-1", "persistentVolumeClaim": {"claimName": "runs"}},
    }
    assert container["volumeMounts"] == [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "volume-0", "mountPath": "/data", "readOnly": True},
        {"name": "volume-1", "mountPath": "/runs"},
    ]
    told = variables(container)
    assert told["A"] == "b=c"
    assert told["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
    ]
    assert (spec["serviceAccountName"], container["workingDir"], spec["restartPolicy"]) == (
        "trainer",
        "/w",
        "Never",
    )


def test_accelerators_of_another_maker_are_a_resource_of_another_name():
    assert pod("--submit_gpus_per_machine", "amd.com/gpu:4")[1]["resources"] == {"limits": {"amd.com/gpu": 4}}
    assert "resources" not in pod()[1]


def test_shared_memory_is_there_without_an_option():
    spec, _ = pod()
    assert spec["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]


def test_a_pod_lives_longer_than_the_save():
    spec, container = pod("--submit_signal_time", "600")
    assert "--grace_period=600.0" in container["command"]
    assert spec["terminationGracePeriodSeconds"] > 600
    _, container = pod("--submit_signal_time", "600", "--grace_period", "20")
    assert "--grace_period=20.0" in container["command"]


NASTY = ("$(HOME)", "$$(HOME)", "a $$ b", "$", "$HOME", "`id`", "'; id; '", "a\nb", "1e5", "y", "é ☃", "")


@pytest.mark.parametrize("setup", [(), ("--submit_setup", 'export NOTE="$HOME"')])
def test_no_word_of_the_command_is_changed_on_its_way(setup, tmp_path):
    """Neither YAML, nor Kubernetes, nor the shell of the setup lines."""
    _, container = pod(*setup, arguments=NASTY)
    words = [expanded(word, {"HOME": "/stolen"}) for word in container["command"]]
    tool = tmp_path / "accel"
    tool.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import json,sys; print(json.dumps(sys.argv[1:]))" "$@"\n'
    )
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": "/home"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert tuple(json.loads(done.stdout)[-len(NASTY) :]) == NASTY


def test_a_failing_setup_line_ends_the_pod():
    _, container = pod("--submit_setup", "false", "--submit_setup", "echo on")
    done = subprocess.run(container["command"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("value", ["1", "1e5", "0x1f", "0o17", "1_000", "y", "n", "on", "no", "null", "~", "2026-01-01",
                                   "1:30", ".5", "true", "", " ", "=", "<<", "*a", "&a", "!a", "a: b"])  # fmt: skip
def test_a_variable_is_text_for_every_reader_of_yaml(value):
    """YAML 1.1, YAML 1.2 and Go's reader take different words for numbers and booleans."""
    text = KUBERNETES.script(job("--submit_env", f"A={value}"))
    (line,) = re.findall(r'- name: "A"\n\s+value: (.*)\n', text)
    assert line in (f'"{value}"', f"'{value}'")
    assert {"name": "A", "value": value} in pod("--submit_env", f"A={value}")[1]["env"]


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--submit_image", "a b"), r"--submit_image is 'a b'.*container image"),
        (("--submit_gpus_per_machine", "H100:8"), r"H100:8 names a type.*--submit_node_selector.*amd.com/gpu:8"),
        (("--submit_gpus_per_machine", "many"), r"many is not a number"),
        (("--submit_memory", "64GB"), r"--submit_memory is '64GB'.*64Gi"),
        (("--submit_shared_memory", "lots"), r"--submit_shared_memory is 'lots'"),
        (("--submit_volumes", "data"), r"--submit_volumes is 'data'.*claim:/folder"),
        (("--submit_volumes", "Data:/x"), r"--submit_volumes is 'Data:/x'"),
        (("--submit_volumes", "a:/x", "--submit_volumes", "b:/x/"), r"second volume at /x/"),
        (("--submit_volumes", "a:/dev/shm"), r"second volume at /dev/shm"),
        (("--submit_env", "A"), r"--submit_env 'A' is.*NAME=value"),
        (("--submit_env", "1A=b"), r"--submit_env '1A=b'"),
        (("--submit_env", "NNODES=3"), r"NNODES is set twice"),
        (("--submit_env", "PET_NNODES=3"), r"PET_NNODES is set twice"),
        (("--submit_env", "NNODES=3", "--submit_kind", "TrainJob"), r"NNODES is set twice"),
        (("--submit_env", "A=1", "--submit_secrets", "A=b/c"), r"variable A is set twice"),
        (("--submit_env", "HF_TOKEN=hf_1"), r"HF_TOKEN looks like a secret.*--submit_secrets"),
        (("--submit_secrets", "A=b"), r"--submit_secrets is 'A=b'.*NAME=secret/key"),
        (("--submit_node_selector", "gpu"), r"--submit_node_selector is 'gpu'.*label=value"),
        (("--submit_tolerations", "gpu"), r"--submit_tolerations is 'gpu'.*NoSchedule"),
        (("--submit_tolerations", "gpu:Never"), r"'gpu:Never'.*NoSchedule"),
        (("--submit_service_account", "A"), r"--submit_service_account is 'A'"),
        (("--submit_namespace", "a.b"), r"--submit_namespace is 'a.b'"),
        (("--submit_queue", "a b"), r"--submit_queue is 'a b'"),
        (("--submit_workdir", "work"), r"--submit_workdir is 'work'.*folder of the image"),
        (("--submit_job_name", "My_Job"), r"--submit_job_name 'My_Job'"),
        (("--grace_period", "400"), r"--grace_period 400 is longer than --submit_signal_time 300"),
        (("--main_process_ip", "10.0.0.1"), r"--main_process_ip 10.0.0.1.*leave it out"),
        (("--spares", "1"), r"--spares 1.*leave it out"),
        (("--min_machines", "1", "--submit_kind", "JobSet"), r"--min_machines 1 needs --submit_kind Job"),
        (("--submit_kind", "VolcanoJob", "--submit_retries", "1"), r"--submit_retries 1.*--submit_kind JobSet"),
        (("--submit_kind", "VolcanoJob", "--submit_time", "60"), r"--submit_time 60 is no option"),
        (
            ("--submit_kind", "TrainJob", "--num_processes", "3", "--submit_gpus_per_machine", "2"),
            r"--num_processes 3 is not divisible by --num_machines 2",
        ),
        (("--submit_partition", "gpu"), r"--submit_partition is 'gpu'.*Kubernetes have no such option"),
    ],
)  # fmt: skip
def test_what_kubernetes_would_refuse_is_named(flags, match):
    with pytest.raises(ConfigError, match=match):
        KUBERNETES.script(job(*flags))


def test_an_image_is_needed():
    config = resolve(environ={}, flags=parse_flags(("--cpu",)), use_default_file=False).local()
    with pytest.raises(
        ConfigError, match="--submit_image is not set; a job of Kubernetes needs a container image"
    ):
        KUBERNETES.script(Job(config, (), "train.py"))


def test_pods_of_an_elastic_job_start_and_end_one_by_one():
    _, container = pod("--min_machines", "1")
    assert "--min_machines=1" in container["command"]


# kubectl, imitated by a program that keeps objects in a folder and answers as the API server does.
KUBECTL = """#!{python} -IS
import json, pathlib, sys, urllib.parse
folder = pathlib.Path("{folder}")
words = [word for word in sys.argv[1:] if not word.startswith("--context=")]
if words[:2] == ["config", "view"]:
    print("team", end="")
    sys.exit()
(raw,) = (word[6:] for word in words if word.startswith("--raw="))
path, _, query = raw.partition("?")
with (folder / "calls").open("a") as log:
    log.write(f"{{words[0]}} {{raw}}\\n")
said = folder / "says" / (words[0] + path.replace("/", "_"))
if said.exists():
    text = said.read_bytes()
    if text.startswith(b"Error"):
        sys.exit(text.decode())
    sys.stdout.buffer.write(text)
elif words[0] == "create":
    made = json.load(sys.stdin)
    (folder / "objects").mkdir(exist_ok=True)
    (folder / "objects" / (path + "/" + made["metadata"]["name"]).replace("/", "_")).write_text(json.dumps(made))
    print(json.dumps(made))
else:
    there = folder / "objects" / path.replace("/", "_")
    if not there.exists():
        sys.exit("Error from server (NotFound): the server could not find the requested resource")
    print(there.read_text())
    if words[0] == "delete":
        there.unlink()
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    tool = tmp_path / "kubectl"
    tool.write_text(KUBECTL.format(python=sys.executable, folder=tmp_path))
    tool.chmod(0o755)
    (tmp_path / "says").mkdir()
    return tmp_path


def says(cluster, verb, path, text):
    (cluster / "says" / (verb + path.replace("/", "_"))).write_text(
        text if isinstance(text, str) else json.dumps(text)
    )


def environ(cluster):
    return {"PATH": str(cluster)}


def calls(cluster):
    return (cluster / "calls").read_text().splitlines()


def kept(cluster):
    folder = cluster / "objects"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_created_and_cancelled_with_what_belongs_to_it(cluster, kind):
    told = KUBERNETES.submit(job("--submit_kind", kind), environ(cluster))
    assert told.startswith(f"submitted {kind.lower()}/train-abc123 to namespace team")
    stored = [json.loads((cluster / "objects" / name).read_text()) for name in kept(cluster)]
    key = lambda one: (one["kind"], one["apiVersion"])  # noqa: E731
    assert sorted(stored, key=key) == sorted(objects("--submit_kind", kind), key=key)
    said = KUBERNETES.cancel(f"{kind.lower()}/train-abc123", SubmitSection(), environ(cluster))
    assert said.startswith(f"cancelled {kind.lower()}/train-abc123")
    assert kept(cluster) == []
    assert any("propagationPolicy=Background" in call for call in calls(cluster))  # else its pods stay


def test_nothing_is_left_of_a_job_that_the_cluster_refuses(cluster):
    quota = 'Error from server (Forbidden): jobs.batch "train" is forbidden: exceeded quota: gpus\n'
    says(cluster, "create", "/apis/batch/v1/namespaces/team/jobs", quota)
    with pytest.raises(
        LaunchError, match=r"refused the Job train-abc123 in namespace team.*exceeded quota: gpus"
    ):
        KUBERNETES.submit(job(), environ(cluster))
    assert kept(cluster) == []
    assert [call.split()[0] for call in calls(cluster)] == ["create", "create", "delete"]


def test_what_cannot_be_deleted_again_is_named(cluster):
    refusal = "Error from server (Forbidden): no\n"
    says(cluster, "create", "/apis/batch/v1/namespaces/team/jobs", refusal)
    says(cluster, "delete", "/api/v1/namespaces/team/services/train-abc123", refusal)
    with pytest.raises(
        LaunchError, match="delete services/train-abc123 by hand, because it refused that, too"
    ):
        KUBERNETES.submit(job(), environ(cluster))


def test_neither_client_nor_kubectl(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingDependencyError, match=r"pip install kubernetes.*kubectl.*--dry_run"):
        KUBERNETES.submit(job(), {"PATH": "/nowhere"})


PLACES = {
    "Job": "/apis/batch/v1/namespaces/team/jobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs",
    "VolcanoJob": "/apis/batch.volcano.sh/v1alpha1/namespaces/team/jobs",
}


def with_status(kind, status, created="2026-01-01T00:00:00Z"):
    made = objects("--submit_kind", kind)[-1]
    made["metadata"]["creationTimestamp"] = created
    return {"items": [{**made, "status": status}]}


def condition(name, **more):
    return {"conditions": [{"type": name, "status": "True", **more}]}


@pytest.mark.parametrize(
    ("kind", "status", "state", "why"),
    [
        ("Job", {}, "waiting", ""),
        ("Job", {"active": 2, "ready": 0}, "waiting", ""),
        ("Job", {"active": 2, "ready": 2}, "running", ""),
        ("Job", condition("Suspended", message="Job suspended"), "waiting", "Job suspended"),
        ("Job", condition("Complete"), "done", ""),
        ("Job", condition("Failed", reason="BackoffLimitExceeded"), "failed", "BackoffLimitExceeded"),
        ("JobSet", {"replicatedJobsStatus": [{"active": 1, "ready": 1}]}, "running", ""),
        ("JobSet", condition("Completed"), "done", ""),
        ("JobSet", condition("Failed", message="reached max restarts"), "failed", "reached max restarts"),
        ("TrainJob", {"jobsStatus": [{"ready": 1}]}, "running", ""),
        ("TrainJob", condition("Failed", message="no"), "failed", "no"),
        ("VolcanoJob", {"state": {"phase": "Restarting", "message": "evicted"}}, "preempted", "evicted"),
        ("VolcanoJob", {"state": {"phase": "Aborted"}}, "cancelled", ""),
        ("VolcanoJob", {"state": {"phase": "Thinking"}}, "unknown", ""),
        ("Job", {"conditions": 3, "ready": "x"}, "running", ""),
        ("Job", ["list"], "waiting", ""),
        ("Job", condition("Failed", message="a\x1b[2Jb\x07"), "failed", "a\x1b[2Jb\x07"),
    ],
)
def test_the_state_of_a_job(cluster, kind, status, state, why):
    says(cluster, "get", PLACES[kind], with_status(kind, status))
    (status,) = KUBERNETES.jobs(
        SubmitSection(), environ(cluster)
    )  # the other kinds are unknown to this cluster
    assert (status.id, status.state, status.machines, status.why) == (
        f"{kind.lower()}/train-abc123",
        state,
        2,
        why,
    )
    assert all(
        "labelSelector=app.kubernetes.io%2Fmanaged-by%3Daccel-launch" in call for call in calls(cluster)
    )


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ('{"items": [', "no JSON object"),
        ("[]", "no JSON object"),
        ("<html>\x1b]0;x\x07</html>", r"no JSON object"),
        ('{"items": 3}', "expected a list of objects with names"),
        ('{"items": [{"metadata": {}}]}', "expected a list of objects with names"),
        ("Error from server (InternalError): \x1b[2J", r"\\x1b\[2J"),
    ],
)
def test_an_answer_that_is_cut_or_hostile(cluster, answer, match):
    says(cluster, "get", PLACES["Job"], answer)
    with pytest.raises(LaunchError, match=match) as told:
        KUBERNETES.jobs(SubmitSection(), environ(cluster))
    assert "\x1b" not in str(told.value)


def test_a_cluster_that_refuses_every_kind_is_an_error(cluster):
    for path in PLACES.values():
        says(cluster, "get", path, "Error from server (Forbidden): you may not list this")
    with pytest.raises(LaunchError, match="you may not list this"):
        KUBERNETES.jobs(SubmitSection(), environ(cluster))


def pods(cluster, *numbers):
    items = [
        {
            "metadata": {
                "name": f"train-abc123-{number}",
                "uid": str(number),
                "annotations": {"batch.kubernetes.io/job-completion-index": str(number)},
            },
            "status": {"phase": "Running"},
        }
        for number in numbers
    ]
    says(cluster, "get", "/api/v1/namespaces/team/pods", {"items": items})


@pytest.mark.parametrize("follow", [False, True])
def test_the_output_of_all_pods_is_shown(cluster, follow):
    KUBERNETES.submit(job(), environ(cluster))
    says(
        cluster, "get", f"{PLACES['Job']}/train-abc123", with_status("Job", condition("Complete"))["items"][0]
    )
    pods(cluster, 0, 1)
    for number, text in enumerate(["10%\r100%\nstep\x1b[2J\n", "no end"]):
        says(cluster, "get", f"/api/v1/namespaces/team/pods/train-abc123-{number}/log", text)
    lines = list(KUBERNETES.logs("job/train-abc123", SubmitSection(), environ(cluster), follow=follow))
    assert sorted(lines) == ["[machine 0] 100%", "[machine 0] step\x1b[2J", "[machine 1] no end"]


def test_pods_that_wait_have_no_output(cluster):
    KUBERNETES.submit(job(), environ(cluster))
    items = [{"metadata": {"name": "a"}, "status": {"phase": "Pending"}}]
    says(cluster, "get", "/api/v1/namespaces/team/pods", {"items": items})
    with pytest.raises(LaunchError, match="job/train-abc123 has written no output yet; it is waiting"):
        list(KUBERNETES.logs("job/train-abc123", SubmitSection(), environ(cluster)))


def test_a_job_that_is_not_there_or_is_no_job(cluster):
    with pytest.raises(LaunchError, match="NotFound"):
        list(KUBERNETES.logs("job/other", SubmitSection(), environ(cluster)))
    with pytest.raises(ConfigError, match=r"namespace '../kube-system' is not a name"):
        KUBERNETES.cancel("job/a", SubmitSection(namespace="../kube-system"), environ(cluster))
    for name in ("cronjob/a", "job/../secrets/a", "job/a?b", "job/é", ""):
        with pytest.raises(ConfigError, match="is not a job of Kubernetes; expected kind/name"):
            KUBERNETES.cancel(name, SubmitSection(), environ(cluster))
    foreign = {"metadata": {"name": "a", "labels": {}}}
    says(cluster, "get", f"{PLACES['Job']}/a", foreign)
    with pytest.raises(LaunchError, match="was not submitted by accel launch"):
        KUBERNETES.cancel("job/a", SubmitSection(), environ(cluster))
