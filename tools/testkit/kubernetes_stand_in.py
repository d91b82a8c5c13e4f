"""What a cluster does with the objects of a job: the rules of the controllers of Job, JobSet, TrainJob and Volcano.

Sources: the comments of batch/v1 and the controller of Job (kubernetes/pkg/controller/job), JobSet's failure_policy.go
and jobset_webhook.go, Trainer's plugins torch.go and jobset.go, Volcano's states and job_controller_util.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from testkit.job_stand_in import Container, Decision, Ended, Engine

__all__ = ["expand", "kubernetes_engine"]

Object = Mapping[str, Any]
_INDEX = "batch.kubernetes.io/job-completion-index"
_ALL = "all of them start again"


def kubernetes_engine(
    objects: Sequence[Object], secrets: Mapping[str, Mapping[str, str]] | None = None
) -> Engine:
    """The engine that runs a job.

    Args:
        objects: the objects that `accel launch --submit kubernetes --dry_run` prints.
        secrets: name of a secret to its keys.
    """
    job, others = objects[-1], objects[:-1]
    kinds = {
        ("batch/v1", "Job"): _Job,
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): _JobSet,
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _TrainJob,
        ("batch.volcano.sh/v1alpha1", "Job"): _VolcanoJob,
    }
    return kinds[job["apiVersion"], job["kind"]](job, others, secrets or {})


def expand(text: str, values: Mapping[str, str]) -> str:
    """``$(NAME)`` and ``$$`` in a command or a variable, as Kubernetes replaces them.

    A name that is not defined stays as it is (kubernetes/third_party/forked/golang/expansion).
    """
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))", lambda one: "$" if one[1] is None else values.get(one[1], one[0]), text
    )


def _environ(
    container: Object, annotations: Mapping[str, str], more: Mapping[str, str], secrets: Any
) -> dict[str, str]:
    found = {
        key: value
        for one in container.get("envFrom", ())
        for key, value in secrets[one["secretRef"]["name"]].items()
    }
    for one in container.get("env", ()):
        if "value" in one:
            found[one["name"]] = expand(one["value"], found)
        elif "fieldRef" in one["valueFrom"]:
            path = re.fullmatch(r"metadata\.annotations\['(.*)'\]", one["valueFrom"]["fieldRef"]["fieldPath"])
            assert path is not None, one
            found[one["name"]] = annotations[path[1]]
        else:
            where = one["valueFrom"]["secretKeyRef"]
            found[one["name"]] = secrets[where["name"]][where["key"]]
    return {**found, **more}


def _container(
    template: Object,
    annotations: Mapping[str, str],
    more: Mapping[str, str],
    hostname: str,
    subdomain: str | None,
    secrets: Any,
) -> Container:
    spec = template["spec"]
    (container,) = spec["containers"]
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    mounts, memory = [], "64m"
    for one in container.get("volumeMounts", ()):
        volume = volumes[one["name"]]
        if one["mountPath"] == "/dev/shm":
            assert volume["emptyDir"]["medium"] == "Memory"
            memory = re.sub("i$", "", volume["emptyDir"].get("sizeLimit", "50%"))
        else:
            source = "{claims}/" + volume["persistentVolumeClaim"]["claimName"]
            mounts += [["mkdir", "-p", source], ["mount", "--bind", source, one["mountPath"]]]
            if one.get("readOnly"):
                mounts.append(["mount", "-o", "remount,ro,bind", one["mountPath"]])
    environ = _environ(container, annotations, more, secrets)
    return Container(
        argv=[expand(word, environ) for word in container["command"]],
        environ=environ,
        hostname=hostname,
        names=() if subdomain is None else (f"{hostname}.{subdomain}",),
        grace=spec["terminationGracePeriodSeconds"],
        folder=container.get("workingDir"),
        mounts=mounts,
        shared_memory=memory,
    )


class _Pods:
    """The pods of an indexed Job, and the rules of its controller."""

    def __init__(self, spec: Object) -> None:
        assert spec["completionMode"] == "Indexed"
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        self.spec = spec
        self.failed = 0
        self.succeeded: set[int] = set()

    def containers(self, name: str, subdomain: str | None, secrets: Any, more: Any = ()) -> list[Container]:
        found = []
        for number in range(self.spec["parallelism"]):
            own = {
                "JOB_COMPLETION_INDEX": str(number),
                **{key: value.format(number) for key, value in dict(more).items()},
            }
            at = {_INDEX: str(number)}
            found.append(_container(self.spec["template"], at, own, f"{name}-{number}", subdomain, secrets))
        return found

    def after_exit(self, ended: Ended) -> tuple[str, str, str]:
        """``complete``, ``wait``, ``replace`` or ``failed``, with the reason and message of the Job's condition."""
        if ended.code == 0:
            self.succeeded.add(ended.number)
            return ("complete" if len(self.succeeded) == self.spec["completions"] else "wait"), "", ""
        for index, rule in enumerate(self.spec.get("podFailurePolicy", {}).get("rules", ())):
            if not _matches(rule, ended):
                continue
            if rule["action"] == "Ignore":
                return "replace", "", ""
            if rule["action"] == "FailJob":
                what = f"pod {ended.number} failed with exit code {ended.code}"
                return "failed", "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
            break
        self.failed += 1
        if self.failed > self.spec.get("backoffLimit", 6):
            return "failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return "replace", "", ""


def _matches(rule: Object, ended: Ended) -> bool:
    if "onPodConditions" in rule:
        return ended.disrupted and any(one["type"] == "DisruptionTarget" for one in rule["onPodConditions"])
    codes = rule["onExitCodes"]
    return bool((ended.code in codes["values"]) == (codes["operator"] == "In"))


class _Job:
    def __init__(self, job: Object, others: Sequence[Object], secrets: Any) -> None:
        assert not job["spec"].get("suspend"), "the job waits for Kueue"
        self.name = job["metadata"]["name"]
        self.pods = _Pods(job["spec"])
        self.deadline: float | None = job["spec"].get("activeDeadlineSeconds")
        template = job["spec"]["template"]
        subdomain = template["spec"].get("subdomain")
        # Names of pods that are not ready, as those of a training that begins are, have an address only like this.
        known = [
            one["metadata"]["name"]
            for one in others
            if one["kind"] == "Service"
            and one["spec"]["clusterIP"] == "None"
            and one["spec"]["publishNotReadyAddresses"]
            and one["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        self.found = self.pods.containers(self.name, subdomain if subdomain in known else None, secrets)

    @property
    def counted(self) -> int:
        return self.pods.failed

    def containers(self) -> Sequence[Container]:
        return self.found

    def after_exit(self, ended: Ended) -> Decision:
        verdict, reason, _ = self.pods.after_exit(ended)
        if verdict == "replace":
            return Decision(again=frozenset({ended.number}))
        return Decision(end={"complete": "done", "failed": "failed", "wait": ""}[verdict], why=reason)  # type: ignore[arg-type]

    def after_deadline(self) -> Decision:
        return Decision(end="failed", why="DeadlineExceeded")


class _JobSet:
    def __init__(self, job: Object, others: Sequence[Object], secrets: Any) -> None:
        self._read(job, job["spec"], secrets, {})

    def _read(self, job: Object, spec: Object, secrets: Any, more: Mapping[str, str]) -> None:
        assert not job["spec"].get("suspend"), "the job waits for Kueue"
        (group,) = spec["replicatedJobs"]
        assert group["replicas"] == 1
        name = job["metadata"]["name"]
        network = {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": name,
        } | spec.get("network", {})
        visible = network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
        self.policy = spec["failurePolicy"]
        self.counted = 0
        self.template = group["template"]["spec"]
        self.pods = _Pods(self.template)
        self.deadline: float | None = self.template.get("activeDeadlineSeconds")
        subdomain = network["subdomain"] if visible else None
        self.found = self.pods.containers(f"{name}-{group['name']}-0", subdomain, secrets, more)

    def containers(self) -> Sequence[Container]:
        return self.found

    def after_exit(self, ended: Ended) -> Decision:
        verdict, reason, message = self.pods.after_exit(ended)
        if verdict == "replace":
            return Decision(again=frozenset({ended.number}))
        if verdict == "failed":
            return self._failed(reason, message)
        return Decision(end="done" if verdict == "complete" else "")

    def after_deadline(self) -> Decision:
        return self._failed("DeadlineExceeded", "Job was active longer than specified deadline")

    def _failed(self, reason: str, message: str) -> Decision:
        action = "RestartJobSet"
        for rule in self.policy.get("rules", ()):
            reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
            if (not reasons or reason in reasons) and (
                not patterns or any(re.search(pattern, message) for pattern in patterns)
            ):
                action = rule["action"]
                break
        if action == "FailJobSet" or (
            action == "RestartJobSet" and self.counted >= self.policy["maxRestarts"]
        ):
            return Decision(end="failed", why=reason)
        self.counted += action == "RestartJobSet"
        self.pods = _Pods(self.template)
        return Decision(again=frozenset(range(len(self.found))), why=_ALL)


class _TrainJob(_JobSet):
    def __init__(self, job: Object, others: Sequence[Object], secrets: Any) -> None:
        reference, spec = job["spec"]["runtimeRef"], job["spec"]
        (runtime,) = (
            one
            for one in others
            if (one["kind"], one["metadata"]["name"]) == (reference["kind"], reference["name"])
        )
        inner, policy = runtime["spec"]["template"]["spec"], runtime["spec"]["mlPolicy"]
        (group,) = inner["replicatedJobs"]
        labels = group["template"].get("metadata", {}).get("labels", {})
        assert labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer"
        trainer = spec.get("trainer", {})
        machines = trainer.get("numNodes", policy["numNodes"])
        group["template"]["spec"] |= {"parallelism": machines, "completions": machines}
        more = {}
        if "trainer" in spec and "torch" in policy:
            name = job["metadata"]["name"]
            more = {
                "PET_NNODES": str(machines),
                "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
                "PET_NODE_RANK": "{}",
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29500",
            }
        self._read(job, inner, secrets, more)


class _VolcanoJob:
    def __init__(self, job: Object, others: Sequence[Object], secrets: Any) -> None:
        name, self.spec = job["metadata"]["name"], job["spec"]
        (task,) = self.spec["tasks"]
        self.size = task["replicas"]
        self.counted = 0
        self.deadline = None
        self.ended: dict[int, int] = {}
        visible = "--publish-not-ready-addresses=true" in self.spec["plugins"].get("svc", ())
        self.found = [
            _container(
                task["template"],
                {"volcano.sh/task-index": str(number)},
                {},
                f"{name}-{task['name']}-{number}",
                name if visible else None,
                secrets,
            )
            for number in range(self.size)
        ]

    def containers(self) -> Sequence[Container]:
        return self.found

    def after_exit(self, ended: Ended) -> Decision:
        self.ended[ended.number] = ended.code
        # The pod's failure with its code comes first, then the deletion of the pod.
        events = [("PodFailed", ended.code)] if ended.code else []
        events += [("PodEvicted", 0)] if ended.disrupted else []
        for event, code in events:
            for policy in self.spec["policies"]:
                if policy.get("event") not in (event, "*") and (not code or policy.get("exitCode") != code):
                    continue
                assert policy["action"] == "RestartJob"
                self.counted += 1
                self.ended = {}
                if self.counted >= self.spec["maxRetry"]:
                    return Decision(end="failed", why="maxRetry")
                return Decision(again=frozenset(range(self.size)), why=_ALL)
        if len(self.ended) < self.size:
            return Decision()
        good = sum(code == 0 for code in self.ended.values())
        return Decision(end="done" if good >= self.spec["minAvailable"] else "failed")

    def after_deadline(self) -> Decision:
        raise NotImplementedError
