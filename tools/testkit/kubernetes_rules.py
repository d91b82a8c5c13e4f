"""Rules that an API server, JobSet's, Trainer's and Volcano's webhooks keep, and that no schema knows.

Each rule is named after what it wants. Sources: kubernetes/pkg/apis/{batch,core}/validation, jobset_webhook.go of
JobSet, torch.go of Trainer, admit_job.go of Volcano, and the guide of Kueue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["RULES", "broken"]

Object = Mapping[str, Any]
_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_KEY = r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_QUANTITY = r"(\d+|\d+\.\d+)([KMGTPE]i|[mkMGTPE]|e\d+)?"
_RULE = r"[A-Za-z]([\w,:]*\w)?"
_CODES = range(1, 256)
_REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
_SET_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
_EVENTS = {
    "*",
    "PodFailed",
    "PodEvicted",
    "PodPending",
    "Unknown",
    "TaskCompleted",
    "TaskFailed",
    "JobUpdated",
}
_TASK_ACTIONS = {
    "AbortJob",
    "RestartJob",
    "RestartTask",
    "RestartPod",
    "TerminateJob",
    "CompleteJob",
    "ResumeJob",
}


def broken(objects: Sequence[Object]) -> list[str]:
    """The names of the rules that the objects of a job break."""
    return [name for name, keeps in RULES.items() if not all(keeps(one) for one in _views(name, objects))]


def _views(name: str, objects: Sequence[Object]) -> Iterator[Any]:
    """What a rule looks at: the word before the colon says it."""
    kind = name.partition(":")[0]
    jobs = [spec for one in objects for spec in _inside(one, "podFailurePolicy")]
    templates = [
        one for whole in objects for one in _values(whole, "template") if "containers" in one.get("spec", {})
    ]
    yield from {
        "job": jobs,
        "codes": [one for job in jobs for one in _values(job, "onExitCodes")],
        "pod": [one["spec"] for one in templates],
        "container": [box for one in templates for box in one["spec"]["containers"]],
        "labels": [*_values(list(objects), "labels"), *_values(list(objects), "nodeSelector")],
        "set": [one for whole in objects for one in _values(whole, "failurePolicy")],
        "volcano": [one["spec"] for one in objects if one["apiVersion"].startswith("batch.volcano")],
        "object": list(objects),
        "all": [objects],
    }[kind]


def _values(value: Any, key: str) -> Iterator[Any]:
    """Values of a key, wherever they are."""
    yield from (one[key] for one in _inside(value, key))


def _inside(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, Mapping) and key in value:
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _inside(part, key)


def _once(values: Sequence[Any]) -> bool:
    return len(set(values)) == len(values)


def _served(objects: Sequence[Object]) -> bool:
    job = objects[-1]
    if (job["apiVersion"], job["kind"]) != ("batch/v1", "Job"):
        return True
    template = job["spec"]["template"]
    return any(
        one["kind"] == "Service"
        and one["metadata"]["name"] == template["spec"].get("subdomain")
        and one["spec"].get("clusterIP") == "None"
        and one["spec"].get("publishNotReadyAddresses") is True
        and one["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        for one in objects
    )


def _runtime(objects: Sequence[Object]) -> bool:
    job = objects[-1]
    if job["kind"] != "TrainJob":
        return True
    wanted = job["spec"]["runtimeRef"]
    found = [
        one for one in objects if (one["kind"], one["metadata"]["name"]) == (wanted["kind"], wanted["name"])
    ]
    steps = [one.get("trainer.kubeflow.org/trainjob-ancestor-step") for one in _values(found, "labels")]
    names = [one["name"] for boxes in _values(found, "containers") for one in boxes]
    return len(found) == 1 and "trainer" in steps and names == ["node"] and "trainer" in job["spec"]


def _queued(one: Object) -> bool:
    labelled = "kueue.x-k8s.io/queue-name" in one["metadata"].get("labels", {})
    return not labelled or (
        one["spec"].get("suspend") is True and not one["apiVersion"].startswith("batch.volcano")
    )


def _grace(spec: Object) -> bool:
    flags = [
        word.partition("=")[2]
        for word in spec["containers"][0]["command"]
        if word.startswith("--grace_period=")
    ]
    return all(float(flag) < spec["terminationGracePeriodSeconds"] for flag in flags)


def _policy(one: Object) -> bool:
    by_code = "exitCode" in one
    return by_code != ("event" in one) and (one["exitCode"] != 0 if by_code else one["event"] in _EVENTS)


RULES: Mapping[str, Callable[[Any], bool]] = {
    "object: a name is a label of DNS": lambda one: bool(re.fullmatch(_NAME, one["metadata"]["name"])),
    "object: names of pods have 63 characters": lambda one: (
        len(one["metadata"]["name"]) <= 63 - len("-node-0-999-abcde")
    ),
    "object: Kueue admits what is suspended": _queued,
    "labels: keys": lambda labels: all(re.fullmatch(_KEY, key) for key in labels),
    "labels: values have 63 characters": lambda labels: all(
        re.fullmatch(_VALUE, value) for value in labels.values()
    ),
    "all: a headless service for the names of the pods": _served,
    "all: a TrainJob has a runtime with a trainer": _runtime,
    "job: an indexed Job has completions": lambda job: (
        job["completionMode"] == "Indexed" and job["completions"] > 0
    ),
    "job: a policy for failures needs restartPolicy Never": lambda job: (
        job["template"]["spec"]["restartPolicy"] == "Never"
    ),
    "job: every pod runs at once": lambda job: job["parallelism"] == job["completions"],
    "job: limits are not negative": lambda job: (
        job["backoffLimit"] >= 0 and job.get("activeDeadlineSeconds", 1) > 0
    ),
    "job: at most 20 rules": lambda job: len(job["podFailurePolicy"]["rules"]) <= 20,
    "job: a rule has one requirement": lambda job: all(
        ("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in job["podFailurePolicy"]["rules"]
    ),
    "job: actions of rules": lambda job: all(
        rule["action"] in ("Ignore", "Count", "FailJob") for rule in job["podFailurePolicy"]["rules"]
    ),
    "job: a rule names a container of the pod": lambda job: all(
        one.get("containerName", "node") in [box["name"] for box in job["template"]["spec"]["containers"]]
        for one in _values(job["podFailurePolicy"], "onExitCodes")
    ),
    "codes: operators": lambda one: one["operator"] in ("In", "NotIn"),
    "codes: from 1 to 255, ordered, once": lambda one: (
        0 < len(one["values"]) < 256
        and one["values"] == sorted(set(one["values"]))
        and all(code in _CODES for code in one["values"])
    ),
    "pod: the launcher ends before the pod is killed": _grace,
    "pod: volumes have names of their own": lambda spec: _once(
        [one["name"] for one in spec.get("volumes", ())]
    ),
    "pod: what is mounted is a volume": lambda spec: all(
        mount["name"] in [one["name"] for one in spec.get("volumes", ())]
        for box in spec["containers"]
        for mount in box.get("volumeMounts", ())
    ),
    "pod: sizes and media of folders in memory": lambda spec: all(
        one["medium"] == "Memory" and re.fullmatch(_QUANTITY, one.get("sizeLimit", "1Gi"))
        for one in _values(spec.get("volumes", []), "emptyDir")
    ),
    "pod: tolerations": lambda spec: all(
        one["effect"] in ("NoSchedule", "PreferNoSchedule", "NoExecute")
        and (one["operator"] == "Equal" or (one["operator"] == "Exists" and "value" not in one))
        for one in spec.get("tolerations", ())
    ),
    "container: folders are mounted once": lambda box: _once(
        [one["mountPath"] for one in box.get("volumeMounts", ())]
    ),
    "container: variables are set once": lambda box: _once([one["name"] for one in box.get("env", ())]),
    "container: a variable has one source": lambda box: all(
        ("value" in one) != ("valueFrom" in one) for one in box.get("env", ())
    ),
    "container: values of variables are text": lambda box: all(
        isinstance(one.get("value", ""), str) for one in box.get("env", ())
    ),
    "container: quantities": lambda box: all(
        re.fullmatch(_QUANTITY, str(size))
        for part in box.get("resources", {}).values()
        for size in part.values()
    ),
    "container: devices are limits and whole": lambda box: (
        all(
            isinstance(n, int)
            for name, n in box.get("resources", {}).get("limits", {}).items()
            if "/" in name
        )
        and not any("/" in name for name in box.get("resources", {}).get("requests", {}))
    ),
    "set: names of rules": lambda one: (
        _once([rule["name"] for rule in one["rules"]])
        and all(re.fullmatch(_RULE, rule["name"]) for rule in one["rules"])
    ),
    "set: actions": lambda one: all(rule["action"] in _SET_ACTIONS for rule in one["rules"]),
    "set: reasons": lambda one: all(set(rule["onJobFailureReasons"]) <= _REASONS for rule in one["rules"]),
    "volcano: a policy has one event or one code": lambda spec: all(_policy(one) for one in spec["policies"]),
    "volcano: actions": lambda spec: all(one["action"] in _TASK_ACTIONS for one in spec["policies"]),
    "volcano: no more pods are needed than there are": lambda spec: (
        0 < spec["minAvailable"] <= sum(task["replicas"] for task in spec["tasks"])
    ),
    "volcano: tasks have names of their own": lambda spec: _once([task["name"] for task in spec["tasks"]]),
}
"""Name of a rule to the check of one of the things that it looks at."""
