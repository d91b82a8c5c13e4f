"""Kubernetes: an indexed Job, a JobSet, a TrainJob of Kubeflow or a Job of Volcano, with one launcher per pod.

What follows from a launcher's exit code is written in the objects (``kubernetes_objects.py``): no program of ours runs
beside the job.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.submission.base import COMMON, CONTAINER, Job, JobState, JobStatus, Submission
from accel_state.launching.submission.kubernetes_api import Api, RefusedError, connect
from accel_state.launching.submission.kubernetes_objects import (
    KINDS,
    LABEL,
    MANAGER,
    JobKind,
    objects,
    to_yaml,
)
from accel_state.launching.submission.tools import printable

__all__ = ["KUBERNETES", "KubernetesSubmission"]

_LOOK = 1.0
"""Seconds between two looks at the pods of a job whose output is followed."""
_ENDED = ("done", "failed", "cancelled")
_CONDITIONS: Mapping[str, JobState] = {
    "Complete": "done", "Completed": "done", "Failed": "failed", "FailureTarget": "failed", "Suspended": "waiting",
}  # fmt: skip
"""Conditions of a Job, a JobSet and a TrainJob."""
_PHASES: Mapping[str, JobState] = {
    "Pending": "waiting", "Running": "running", "Restarting": "preempted", "Completing": "done", "Completed": "done",
    "Terminating": "failed", "Terminated": "failed", "Failed": "failed", "Aborting": "cancelled",
    "Aborted": "cancelled",
}  # fmt: skip
"""Phases of a Job of Volcano."""


class KubernetesSubmission(Submission):
    """Creates the objects of a job through the API server."""

    title = "Kubernetes"
    has_own_files = True
    uses = (
        COMMON
        | CONTAINER
        | {"time", "signal_time", "shared_memory", "kind", "namespace", "queue", "address"}
        | {"node_selector", "tolerations", "service_account"}
    )

    def check(self, job: Job) -> None:
        """See the base class.

        Raises:
            ConfigError: an option does not fit the kind of the job.
        """
        super().check(job)
        config, kind = job.config, job.config.submission.kind
        if config.main_process_ip is not None:
            raise ConfigError(
                f"--main_process_ip {config.main_process_ip} is of no use on Kubernetes, where the first pod has an "
                "address that the job knows; leave it out"
            )
        if config.spares:
            raise ConfigError(
                f"--spares {config.spares} would keep pods idle, and Kubernetes replaces one that is lost by itself; "
                "leave it out"
            )
        if kind != "Job" and config.min_machines not in (None, config.num_machines):
            raise ConfigError(
                f"--min_machines {config.min_machines} needs --submit_kind Job, whose pods start and end one by one; a "
                f"{kind} starts all of them again"
            )
        if kind == "VolcanoJob" and config.submission.retries:
            raise ConfigError(
                f"--submit_retries {config.submission.retries} cannot be kept by Volcano, which counts preemptions as "
                "retries; leave it out and set --max_restarts, or pass --submit_kind JobSet"
            )
        if kind == "VolcanoJob" and config.submission.time is not None:
            raise ConfigError(
                f"--submit_time {config.submission.time} is no option of a Job of Volcano; leave it out, or pass "
                "--submit_kind Job"
            )

    def script(self, job: Job) -> str:
        """See the base class. YAML, as ``kubectl create -f -`` takes it."""
        self.check(job)
        return to_yaml(objects(job))

    def submit(self, job: Job, environ: Mapping[str, str]) -> str:
        """See the base class. If one of the objects is refused, those before it are deleted again."""
        self.check(job)
        made, kind = objects(job), job.config.submission.kind
        form, api = KINDS[kind], connect(job.config.submission, environ)
        places = [*form.companions, (form.api, form.plural)]
        for number, ((group, plural), one) in enumerate(zip(places, made, strict=True)):
            try:
                api.call("POST", group, plural, one)
            except LaunchError as error:
                left = [
                    f"{name}/{job.label}"
                    for at, name in reversed(places[:number])
                    if not _deleted(api, at, f"{name}/{job.label}")
                ]
                raise LaunchError(
                    f"the cluster refused the {one['kind']} {job.label} in namespace {api.namespace}: {error}"
                    + (f"; delete {' and '.join(left)} by hand, because it refused that, too" if left else "")
                ) from error
        return (
            f"submitted {kind.lower()}/{job.label} to namespace {api.namespace}; accel jobs logs --engine kubernetes "
            f"--namespace {api.namespace} {kind.lower()}/{job.label} shows its output"
        )

    def jobs(self, about: SubmitSection, environ: Mapping[str, str]) -> list[JobStatus]:
        """See the base class. Kinds that the cluster does not have are left out."""
        api = connect(about, environ)
        found: list[tuple[str, JobStatus]] = []
        refusals: list[RefusedError] = []
        for kind, form in KINDS.items():
            try:
                answer = api.call("GET", form.api, form.plural, labelSelector=f"{MANAGER}=accel-launch")
            except RefusedError as error:
                if error.status not in (403, 404):
                    raise
                refusals.append(error)
                continue
            found += [
                (str(_at(one, "metadata", "creationTimestamp")), _status(kind, one))
                for one in _listed(answer)
            ]
        if len(refusals) == len(KINDS):
            raise refusals[0]
        return [status for _, status in sorted(found, key=lambda pair: pair[0])]

    def logs(
        self, job: str, about: SubmitSection, environ: Mapping[str, str], *, follow: bool = False
    ) -> Iterator[str]:
        """See the base class. Each line begins with the number of its pod."""
        kind, form, name = _parsed(job)
        api = connect(about, environ)
        status = _status(kind, api.call("GET", form.api, f"{form.plural}/{name}"))
        if not follow:
            pods = _started(api, name)
            if not pods:
                raise LaunchError(
                    f"{job} has written no output yet; it is {status.state} {printable(status.why)}".rstrip()
                )
            for pod in pods:
                yield from _lines(api, form, pod, follow=False)
            return
        reader = _Reader(api, form)
        while True:
            ended = status.state in _ENDED
            reader.start(_started(api, name))
            yield from reader.read()
            if ended and not reader.reading():
                yield from reader.read()
                return
            try:
                status = _status(kind, api.call("GET", form.api, f"{form.plural}/{name}"))
            except RefusedError as error:
                if error.status != 404:
                    raise
                status = JobStatus(job, name, "cancelled")  # meanwhile: its pods end

    def cancel(self, job: str, about: SubmitSection, environ: Mapping[str, str]) -> str:
        """See the base class."""
        _, form, name = _parsed(job)
        api = connect(about, environ)
        one = api.call("GET", form.api, f"{form.plural}/{name}")
        if _at(one, "metadata", "labels", MANAGER) != "accel-launch":
            raise LaunchError(f"{job} was not submitted by accel launch; delete it with kubectl delete")
        api.call("DELETE", form.api, f"{form.plural}/{name}", propagationPolicy="Background")
        left = [plural for group, plural in form.companions if not _deleted(api, group, f"{plural}/{name}")]
        told = f"; the cluster keeps its {' and '.join(left)}" if left else ""
        return f"cancelled {job}; its pods have the grace period of the job to save{told}"


KUBERNETES = KubernetesSubmission()


class _Reader:
    """Reads the logs of several pods at once."""

    def __init__(self, api: Api, form: JobKind) -> None:
        self._api, self._form = api, form
        self._threads: dict[str, threading.Thread] = {}
        self._lines: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def start(self, pods: list[dict[str, Any]]) -> None:
        """Read the logs of pods that were not there at the last call."""
        for pod in pods:
            key = str(_at(pod, "metadata", "uid") or _at(pod, "metadata", "name"))
            if key not in self._threads:
                self._threads[key] = threading.Thread(target=self._read, args=(pod,), daemon=True)
                self._threads[key].start()

    def reading(self) -> bool:
        """Whether a log goes on."""
        return any(thread.is_alive() for thread in self._threads.values())

    def read(self) -> Iterator[str]:
        """The lines until none has come for a while."""
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get(timeout=_LOOK)
                if isinstance(line, Exception):
                    raise line
                yield line

    def _read(self, pod: dict[str, Any]) -> None:
        try:
            for line in _lines(self._api, self._form, pod, follow=True):
                self._lines.put(line)
        except RefusedError as error:
            if error.status != 404:  # it is gone
                self._lines.put(error)
        except LaunchError as error:
            self._lines.put(error)


def _parsed(job: str) -> tuple[str, JobKind, str]:
    kind, slash, name = job.rpartition("/")
    found = next((known for known in KINDS if known.lower() == (kind if slash else "job")), None)
    if found is None or not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(
            f"{job!r} is not a job of Kubernetes; expected kind/name, as accel jobs ls lists it, with one of the kinds "
            f"{', '.join(known.lower() for known in KINDS)}"
        )
    return found, KINDS[found], name


def _started(api: Api, name: str) -> list[dict[str, Any]]:
    """The pods of a job that have output, the newest last."""
    found = _listed(api.call("GET", "v1", "pods", labelSelector=f"{LABEL}={name},{MANAGER}=accel-launch"))
    begun = [pod for pod in found if _at(pod, "status", "phase") in ("Running", "Succeeded", "Failed")]
    return sorted(begun, key=lambda pod: str(_at(pod, "metadata", "creationTimestamp")))


def _lines(api: Api, form: JobKind, pod: dict[str, Any], *, follow: bool) -> Iterator[str]:
    number = _at(pod, "metadata", "annotations", form.index)
    place = f"pods/{_at(pod, 'metadata', 'name')}/log"
    query = {"container": "node", **({"follow": "true"} if follow else {})}
    for line in api.lines(place, **query):
        yield f"[machine {number}] {line}"


def _deleted(api: Api, group: str, place: str) -> bool:
    """Delete an object; whether it is gone."""
    try:
        api.call("DELETE", group, place)
    except LaunchError as error:
        return isinstance(error, RefusedError) and error.status == 404
    return True


def _at(found: Any, *names: str | int) -> Any:
    """What an answer has at a place; None if it has something else on the way there."""
    for name in names:
        if isinstance(name, int):
            found = found[name] if isinstance(found, list) and len(found) > name else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _each(found: Any, name: str) -> list[Any]:
    value = _at(found, name)
    return value if isinstance(value, list) else []


def _listed(answer: dict[str, Any]) -> list[dict[str, Any]]:
    items = answer.get("items")
    if not isinstance(items, list) or not all(isinstance(_at(one, "metadata", "name"), str) for one in items):
        raise LaunchError(
            f"the API server answered with {printable(answer, 100)!r}; expected a list of objects with names"
        )
    return items


def _status(kind: str, one: dict[str, Any]) -> JobStatus:
    """The state of an object. A Job that is suspended waits for its queue."""
    spec, status = _at(one, "spec"), _at(one, "status")
    machines = {
        "Job": _at(spec, "completions"),
        "JobSet": _at(spec, "replicatedJobs", 0, "template", "spec", "completions"),
        "TrainJob": _at(spec, "trainer", "numNodes"),
        "VolcanoJob": _at(spec, "tasks", 0, "replicas"),
    }[kind]
    why: object = ""
    if kind == "VolcanoJob":
        state = _PHASES.get(str(_at(status, "state", "phase")), "waiting" if not status else "unknown")
        why = _at(status, "state", "message")
    else:
        parts = [status, *_each(status, "replicatedJobsStatus"), *_each(status, "jobsStatus")]
        state = "running" if any(_at(part, "ready") for part in parts) else "waiting"
        for condition in _each(status, "conditions"):
            known = _CONDITIONS.get(str(_at(condition, "type")))
            if known is not None and _at(condition, "status") == "True":
                state, why = known, _at(condition, "message") or _at(condition, "reason")
    name = str(_at(one, "metadata", "name"))
    count = machines if isinstance(machines, int) else None
    return JobStatus(f"{kind.lower()}/{name}", name, state, count, str(why or ""))
