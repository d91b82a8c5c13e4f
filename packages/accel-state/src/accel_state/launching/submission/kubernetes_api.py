"""The API server of a Kubernetes cluster: requests by the official client, or by ``kubectl`` where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from accel_state.config.sections.submission import SubmitSection
from accel_state.errors import ConfigError, LaunchError, MissingDependencyError
from accel_state.launching.submission.tools import printable

__all__ = ["Api", "RefusedError", "connect"]

_PATIENCE = 30
"""Seconds that the API server has to answer."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_STATUS = {"NotFound": 404, "Forbidden": 403}


class RefusedError(LaunchError):
    """The API server refused a request.

    Attributes:
        status: HTTP status; 0 if ``kubectl`` does not tell it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Api(ABC):
    """The API server.

    Attributes:
        namespace: of the jobs.
    """

    namespace: str = "default"

    def call(self, method: str, api: str, rest: str, body: object = None, **query: str) -> dict[str, Any]:
        """The answer to a request, which is an object.

        Args:
            method: ``GET``, ``POST`` or ``DELETE``.
            api: group and version, such as ``batch/v1``.
            rest: the path after the namespace, such as ``jobs/name``.
            body: an object to create.
            query: parameters of the address.

        Raises:
            RefusedError: the server refused it.
            LaunchError: it cannot be reached, or answers with something else.
        """
        text = self.send(method, self._path(api, rest, query), None if body is None else json.dumps(body))
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise LaunchError(
                f"the API server answered {method} {rest} with {printable(text, 100)!r}, which is no JSON object; "
                "check that the address of the cluster is that of its API server"
            )
        return answer

    def lines(self, rest: str, **query: str) -> Iterator[str]:
        """The lines of a log as they are written."""
        for line in self.stream(self._path("v1", rest, query)):
            yield line.decode("utf-8", "replace").rstrip("\n").rpartition("\r")[2]

    def _path(self, api: str, rest: str, query: Mapping[str, str]) -> str:
        root = "/apis" if "/" in api else "/api"
        asked = f"?{urlencode(query)}" if query else ""
        return f"{root}/{api}/namespaces/{self.namespace}/{rest}{asked}"

    @abstractmethod
    def send(self, method: str, path: str, body: str | None) -> str:
        """Send a request; return the body of its answer."""

    @abstractmethod
    def stream(self, path: str) -> Iterator[bytes]:
        """The lines of an answer that may go on."""


class _Client(Api):
    """By the package ``kubernetes``."""

    def __init__(self, about: SubmitSection, environ: Mapping[str, str]) -> None:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        file = environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            if about.address is None and not environ.get("KUBECONFIG") and _ACCOUNT.is_file():
                configuration = client.Configuration()
                config.load_incluster_config(configuration)
                self.client = client.ApiClient(configuration)
                found = _ACCOUNT.read_text(encoding="utf-8").strip()
            else:
                self.client = config.new_client_from_config(file, context=about.address)
                every, active = config.list_kube_config_contexts(file)
                chosen = next((one for one in every if one["name"] == about.address), active)
                found = chosen["context"].get("namespace")
        except ConfigException as error:
            raise LaunchError(
                f"no cluster is configured ({printable(error)}); check KUBECONFIG, ~/.kube/config and the context that "
                "--submit_address names"
            ) from error
        self.namespace = about.namespace or found or "default"

    def _answer(self, method: str, path: str, body: str | None, patience: float | None) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return self.client.call_api(
                path,
                method,
                header_params={"Accept": "*/*", "Content-Type": "application/json"},
                body=None if body is None else json.loads(body),
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=patience,
            )
        except ApiException as error:
            raise RefusedError(_message(error.body or error.reason), error.status or 0) from error
        except HTTPError as error:
            raise _unreachable(error) from error

    def send(self, method: str, path: str, body: str | None) -> str:
        """See the base class."""
        return str(self._answer(method, path, body, _PATIENCE).data.decode("utf-8", "replace"))

    def stream(self, path: str) -> Iterator[bytes]:
        """See the base class."""
        from urllib3.exceptions import HTTPError

        answer = self._answer("GET", path, None, None)
        rest = b""
        try:
            for piece in answer.stream(amt=None, decode_content=False):
                *whole, rest = (rest + piece).split(b"\n")
                yield from whole
        except HTTPError as error:
            raise _unreachable(error) from error
        finally:
            answer.close()
        if rest:
            yield rest


class _Kubectl(Api):
    """By the program ``kubectl``."""

    def __init__(self, tool: str, about: SubmitSection, environ: Mapping[str, str]) -> None:
        self.words = [tool, *([] if about.address is None else [f"--context={about.address}"])]
        self.environ = dict(environ)
        shown = self._run(["config", "view", "--minify", "--output=jsonpath={..namespace}"], None)
        self.namespace = about.namespace or shown.strip() or "default"

    def _run(self, words: list[str], body: str | None) -> str:
        done = subprocess.run(
            [*self.words, *words], input=body, capture_output=True, env=self.environ, text=True, check=False
        )
        if done.returncode:
            raise _refused(done.stderr)
        return done.stdout

    def send(self, method: str, path: str, body: str | None) -> str:
        """See the base class."""
        verb = {"GET": "get", "POST": "create", "DELETE": "delete"}[method]
        words = [verb, f"--raw={path}", f"--request-timeout={_PATIENCE}s"]
        return self._run(words if body is None else [*words, "--filename=-"], body)

    def stream(self, path: str) -> Iterator[bytes]:
        """See the base class."""
        with subprocess.Popen(
            [*self.words, "get", f"--raw={path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environ,
        ) as reading:
            assert reading.stdout is not None
            assert reading.stderr is not None
            try:
                yield from reading.stdout
                told = reading.stderr.read().decode("utf-8", "replace")
            finally:
                reading.kill()
        if told:
            raise _refused(told)


def connect(about: SubmitSection, environ: Mapping[str, str]) -> Api:
    """The API server of a cluster.

    Args:
        about: its context, and the namespace.
        environ: the environment of this process.

    Raises:
        ConfigError: the namespace is not a name.
        MissingDependencyError: neither the client nor ``kubectl`` is installed.
        LaunchError: no cluster is configured.
    """
    if about.namespace is not None and not re.fullmatch(
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", about.namespace
    ):
        raise ConfigError(
            f"the namespace {about.namespace!r} is not a name of Kubernetes; expected one such as research"
        )
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        tool = shutil.which("kubectl", path=environ.get("PATH"))
        if tool is not None:
            return _Kubectl(tool, about, environ)
        raise MissingDependencyError(
            "jobs of Kubernetes need its client (pip install kubernetes) or kubectl on PATH; without them add "
            "--dry_run, and pass the objects to kubectl create -f - elsewhere"
        ) from None
    return _Client(about, environ)


def _message(body: object) -> str:
    """The message of a Status object; other text as it is."""
    try:
        found = json.loads(str(body))
    except ValueError:
        found = body
    return printable(found["message"] if isinstance(found, dict) and "message" in found else found)


def _refused(told: str) -> LaunchError:
    """The error of ``kubectl``: the server's, whose reason it gives in parentheses, or its own."""
    reason = re.match(r"Error from server \((\w+)\)", told)
    if reason is not None:
        return RefusedError(printable(told.strip()), _STATUS.get(reason[1], 0))
    return LaunchError(
        f"kubectl failed: {printable(told.strip())}; check KUBECONFIG, ~/.kube/config and the context that "
        "--submit_address names"
    )


def _unreachable(error: Exception) -> LaunchError:
    return LaunchError(
        f"the API server of the cluster does not answer ({printable(error, 200)}); check the network, and the context "
        "that --submit_address names"
    )
