"""The objects of a job on Kubernetes: one pod template, in four forms.

Sources: the API reference of Kubernetes (batch/v1), of JobSet (jobset.x-k8s.io/v1alpha2), of Kubeflow Trainer
(trainer.kubeflow.org/v1alpha1) and of Volcano (batch.volcano.sh/v1alpha1).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from accel_state.clusters.base import DEFAULT_PORT
from accel_state.constants import PEER_FAILED, PREEMPTED
from accel_state.errors import ConfigError
from accel_state.launching.submission.base import Job

__all__ = ["KINDS", "LABEL", "MANAGER", "JobKind", "objects", "to_yaml"]

Object = dict[str, Any]

MANAGER = "app.kubernetes.io/managed-by"
"""Label of the objects that `accel launch` has made; its value is ``accel-launch``."""
LABEL = "app.kubernetes.io/name"
"""Label of a job's pods; its value is the job's name."""

_QUEUE = "kueue.x-k8s.io/queue-name"
_INDEX = "batch.kubernetes.io/job-completion-index"
_CONTAINER = "node"
"""Name of the container and of the group of pods; Kubeflow's trainer looks for it."""
_SHM = "/dev/shm"
_AFTERWARDS = 30
"""Seconds between the end of the launcher's grace period and SIGKILL: the launcher kills ranks, and exits with 75."""
_UNLIMITED = 2**31 - 1

_SUBDOMAIN = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_LABEL_KEY = rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_EFFECT = r"NoSchedule|PreferNoSchedule|NoExecute"
_WORLD = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX")

# PyYAML leaves some strings without quotes that other readers of YAML take for numbers (1e5) or booleans (y).
_PLAIN = re.compile(r"[A-Za-z/][\w./-]+(?<![-.])")


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of object as which a job can be submitted.

    Attributes:
        api: its group and version.
        kind: its kind, as Kubernetes writes it.
        plural: its name in addresses.
        build: makes the objects of a job in the order in which they are created; the last one is the job.
        companions: API and plural of the other objects, which have the job's name.
        index: annotation of its pods with their number.
        first: host name of the first pod, with ``{0}`` for the job's name; empty: the cluster sets all variables.
    """

    api: str
    kind: str
    plural: str
    build: Callable[[Job], list[Object]]
    companions: tuple[tuple[str, str], ...] = ()
    index: str = _INDEX
    first: str = "{0}-node-0-0.{0}"


def objects(job: Job) -> list[Object]:
    """The objects of a job, in the order in which they are created.

    Raises:
        ConfigError: an option has a value that Kubernetes would refuse.
    """
    return KINDS[job.config.submission.kind].build(job)


def to_yaml(found: list[Object]) -> str:
    """Objects as YAML; strings that any reader could take for something else have quotes."""
    return yaml.dump_all(found, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def _job(job: Job) -> list[Object]:
    name, about = job.label, job.config.submission
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: name}}
    # A pod that ends only because a sibling failed is not counted: one crash costs one try.
    rules = [_disrupted("Ignore"), _exits("Ignore", PREEMPTED, PEER_FAILED)]
    spec = {**_suspended(job), **_indexed(job, about.retries, rules)}
    spec["template"]["spec"]["subdomain"] = name
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": service},
        _object("Job", job, spec),
    ]


def _job_set(job: Job) -> list[Object]:
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return [_object("JobSet", job, {**_suspended(job), "network": network, **_set(job)})]


def _train_job(job: Job) -> list[Object]:
    machines = job.config.num_machines
    runtime = {
        "apiVersion": _TRAINER,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {"mlPolicy": {"numNodes": machines, "torch": {}}, "template": {"spec": _set(job)}},
    }
    # Without numProcPerNode the trainer tells every pod as many processes as it has CPU cores. And it sets its
    # variables only for a TrainJob that has a trainer.
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.label},
        **_suspended(job),
        "trainer": {"numNodes": machines, "numProcPerNode": job.processes or 1},
    }
    return [runtime, _object("TrainJob", job, spec)]


def _volcano_job(job: Job) -> list[Object]:
    about, machines = job.config.submission, job.config.num_machines
    restarts: list[Object] = [{"exitCode": PREEMPTED}, {"event": "PodEvicted"}]
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": machines,
        # The job ends when a pod fails otherwise, so the count is that of preemptions.
        "maxRetry": _UNLIMITED,
        "policies": [{**what, "action": "RestartJob"} for what in restarts],
        "plugins": {"svc": ["--publish-not-ready-addresses=true"]},
        "tasks": [{"name": _CONTAINER, "replicas": machines, "template": _template(job)}],
    }
    if about.queue is not None:
        spec["queue"] = _matching("--submit_queue", about.queue, _SUBDOMAIN, "the name of a queue")
    return [_object("VolcanoJob", job, spec)]


_TRAINER = "trainer.kubeflow.org/v1alpha1"
KINDS: Mapping[str, JobKind] = {
    "Job": JobKind("batch/v1", "Job", "jobs", _job, (("v1", "services"),), first="{0}-0.{0}"),
    "JobSet": JobKind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", _job_set),
    "TrainJob": JobKind(_TRAINER, "TrainJob", "trainjobs", _train_job, ((_TRAINER, "trainingruntimes"),), first=""),
    "VolcanoJob": JobKind("batch.volcano.sh/v1alpha1", "Job", "jobs", _volcano_job, index="volcano.sh/task-index",
                          first="{0}-node-0.{0}"),
}  # fmt: skip
"""The value of ``--submit_kind`` to the form."""


def _object(form: str, job: Job, spec: Object) -> Object:
    about = job.config.submission
    queue = {}
    if about.queue is not None and form != "VolcanoJob":
        queue[_QUEUE] = _matching("--submit_queue", about.queue, _SUBDOMAIN, "the name of a local queue")
    found = KINDS[form]
    return {"apiVersion": found.api, "kind": found.kind, "metadata": _metadata(job, queue), "spec": spec}


def _metadata(job: Job, labels: Mapping[str, str] | None = None) -> Object:
    found: Object = {"name": job.label}
    namespace = job.config.submission.namespace
    if namespace is not None:
        found["namespace"] = _matching("--submit_namespace", namespace, r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
                                       "the name of a namespace")  # fmt: skip
    return {**found, "labels": {**_labels(job), **(labels or {})}}


def _labels(job: Job) -> dict[str, str]:
    return {LABEL: job.label, MANAGER: "accel-launch"}


def _suspended(job: Job) -> Object:
    """Kueue starts a job that waits: it is created suspended."""
    return {} if job.config.submission.queue is None else {"suspend": True}


def _disrupted(action: str) -> Object:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exits(action: str, *codes: int) -> Object:
    codes_of = {"containerName": _CONTAINER, "operator": "In", "values": sorted(codes)}
    return {"action": action, "onExitCodes": codes_of}


def _indexed(job: Job, retries: int, rules: list[Object]) -> Object:
    seconds, machines = job.seconds, job.config.num_machines
    return {
        "completionMode": "Indexed",
        "completions": machines,
        "parallelism": machines,
        "backoffLimit": retries,
        **({} if seconds is None else {"activeDeadlineSeconds": seconds}),
        "podFailurePolicy": {"rules": rules},
        "template": _template(job),
    }


def _set(job: Job) -> Object:
    """A JobSet of one Job, which is made again when it fails.

    A Job that fails by its pod failure policy was preempted, because no other rule of it ends it; any other end is a
    failure that counts.
    """
    rules = [_exits("Ignore", PEER_FAILED), _disrupted("FailJob"), _exits("FailJob", PREEMPTED)]
    actions = {"RestartJobSetAndIgnoreMaxRestarts": "PodFailurePolicy", "FailJobSet": "DeadlineExceeded"}
    restarts = [
        {"name": f"on{reason}", "action": action, "onJobFailureReasons": [reason]}
        for action, reason in actions.items()
    ]
    template: Object = {"spec": _indexed(job, 0, rules)}
    if not KINDS[job.config.submission.kind].first:
        template = {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            **template,
        }
    return {
        "failurePolicy": {"maxRestarts": job.config.submission.retries, "rules": restarts},
        "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": template}],
    }


def _template(job: Job) -> Object:
    about = job.config.submission
    mounts, volumes = _volumes(job)
    container: Object = {
        "name": _CONTAINER,
        "image": _matching("--submit_image", about.image or "", r"[^\s\x00-\x1f]+", "a container image"),
        "command": _command(job),
    }
    if about.workdir is not None:
        container["workingDir"] = _matching("--submit_workdir", about.workdir, r"/[^\x00-\x1f]*",
                                            "a folder of the image, such as /work")  # fmt: skip
    variables, secrets = _variables(job)
    container |= {"env": variables} if variables else {}
    container |= {"envFrom": secrets} if secrets else {}
    container |= {"resources": found} if (found := _resources(job)) else {}
    container["volumeMounts"] = mounts
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": about.signal_time + _AFTERWARDS,
        "containers": [container],
        "volumes": volumes,
    }
    if about.service_account is not None:
        spec["serviceAccountName"] = _matching("--submit_service_account", about.service_account, _SUBDOMAIN,
                                               "the name of a service account")  # fmt: skip
    if about.node_selector:
        form = rf"({_LABEL_KEY})=({_LABEL_VALUE})"
        for label in about.node_selector:
            _matching("--submit_node_selector", label, form, "label=value")
        spec["nodeSelector"] = dict(label.split("=", 1) for label in about.node_selector)
    if about.tolerations:
        spec["tolerations"] = [_toleration(text) for text in about.tolerations]
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _command(job: Job) -> list[str]:
    about, grace = job.config.submission, job.config.grace_period
    if grace is not None and grace > about.signal_time:
        raise ConfigError(
            f"--grace_period {grace:g} is longer than --submit_signal_time {about.signal_time}, the seconds that a pod "
            "has before it is killed; lower the first, or raise the second"
        )
    config = dataclasses.replace(job.config, grace_period=about.signal_time if grace is None else grace)
    words = dataclasses.replace(job, config=config).container_command()
    if about.setup:
        words = ("sh", "-c", "\n".join(("set -e", *about.setup, 'exec "$@"')), "accel-launch", *words)
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Text of a command or of a variable, in which Kubernetes would replace ``$(NAME)`` and ``$$``."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _variables(job: Job) -> tuple[list[Object], list[Object]]:
    """Variables of the container, and the secrets that it gets as a whole."""
    about, form = job.config.submission, KINDS[job.config.submission.kind]
    wholes: list[Object] = []
    found: list[Object] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    for secret in about.secrets or ():
        form_of_one = rf"({_VARIABLE})=({_SUBDOMAIN})/([-._A-Za-z0-9]+)|{_SUBDOMAIN}"
        _matching("--submit_secrets", secret, form_of_one, "NAME=secret/key, or the name of a secret")
        name, equals, place = secret.partition("=")
        if equals:
            owner, _, key = place.partition("/")
            found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": owner, "key": key}}})
        else:
            wholes.append({"secretRef": {"name": name}})
    names = [variable["name"] for variable in found]
    for number, name in enumerate(names):
        if name in names[:number] or name in _WORLD or name.startswith("PET_"):
            raise ConfigError(
                f"the variable {name} is set twice: by --submit_env or --submit_secrets, and by another one of them or "
                "by the job itself, which describes its machines; leave it out"
            )
    if form.first:
        rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{form.index}']"}}
        found = [
            {"name": "NNODES", "value": str(job.config.num_machines)},
            {"name": "NODE_RANK", "valueFrom": rank},
            {"name": "MASTER_ADDR", "value": form.first.format(job.label)},
            {"name": "MASTER_PORT", "value": str(job.config.main_process_port or DEFAULT_PORT)},
            *found,
        ]
    return found, wholes


def _resources(job: Job) -> Object:
    about = job.config.submission
    kind, number = job.accelerators
    if kind and "/" not in kind:
        raise ConfigError(
            f"--submit_gpus_per_machine {about.gpus_per_machine} names a type of accelerator, which Kubernetes finds "
            f"by labels of nodes; pass --submit_gpus_per_machine {number} and --submit_node_selector label=value, or "
            f"the name of a resource such as amd.com/gpu:{number}"
        )
    requests: Object = {}
    limits: Object = {}
    if about.cpus_per_task is not None:
        requests["cpu"] = str(about.cpus_per_task)
    if about.memory is not None:
        size = _matching("--submit_memory", about.memory, _QUANTITY, "a size such as 64Gi")
        requests["memory"] = limits["memory"] = size
    if number:
        name = _matching(
            "--submit_gpus_per_machine", kind or "nvidia.com/gpu", _LABEL_KEY, "the name of a resource"
        )
        limits[name] = number
    parts = {"requests": requests, "limits": limits}
    return {name: part for name, part in parts.items() if part}


def _volumes(job: Job) -> tuple[list[Object], list[Object]]:
    about = job.config.submission
    memory: Object = {"medium": "Memory"}
    if about.shared_memory is not None:
        size = _matching("--submit_shared_memory", about.shared_memory, _QUANTITY, "a size such as 16Gi")
        memory["sizeLimit"] = size
    # Always: /dev/shm of a container has 64 MB, of which the workers of a data loader die.
    mounts: list[Object] = [{"name": "shm", "mountPath": _SHM}]
    volumes: list[Object] = [{"name": "shm", "emptyDir": memory}]
    for number, text in enumerate(about.volumes or ()):
        form = rf"{_SUBDOMAIN}:/[^:\x00-\x1f]*(:ro)?"
        _matching("--submit_volumes", text, form, "claim:/folder or claim:/folder:ro")
        claim, folder, *only = text.split(":")
        if any(folder.rstrip("/") == mount["mountPath"].rstrip("/") for mount in mounts):
            raise ConfigError(
                f"--submit_volumes {text} mounts a second volume at {folder}; choose another folder"
            )
        name = f"volume-{number}"
        mounts.append({"name": name, "mountPath": folder, **({"readOnly": True} if only else {})})
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
    return mounts, volumes


def _toleration(text: str) -> Object:
    form = rf"{_LABEL_KEY}(={_LABEL_VALUE})?:({_EFFECT})"
    expected = "key:effect or key=value:effect, with NoSchedule, PreferNoSchedule or NoExecute"
    taint, _, effect = _matching("--submit_tolerations", text, form, expected).rpartition(":")
    key, equals, value = taint.partition("=")
    found = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **found, "effect": effect}


def _matching(flag: str, text: str, form: str, expected: str) -> str:
    if not re.fullmatch(form, text):
        shown = f"is {text[:200]!r}" if text else "is not set"
        raise ConfigError(f"{flag} {shown}; a job of Kubernetes needs {expected}")
    return text
