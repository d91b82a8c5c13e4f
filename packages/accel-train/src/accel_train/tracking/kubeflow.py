"""Kubeflow: progress and metrics in the status of a TrainJob, where ``kubectl get trainjob`` and dashboards show them.

Kubeflow's controller sets the address, the certificate and the token for each pod (KEP-2779, "Track TrainJob progress
and expose training metrics").
"""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel_state.environment import snapshot
from accel_state.log import get_logger
from accel_state.messages import first_line
from accel_train.errors import OptionError
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.values import flat, plain

__all__ = ["KubeflowTracker"]

_URL, _CERTIFICATE, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_LEAST = 5.0
"""Seconds between two updates: each is a write of the cluster's API server."""
_TIMEOUT = 5.0
_logger = get_logger(__name__)


class KubeflowTracker(GeneralTracker):
    """Reports numbers as the metrics of the TrainJob, and the step as its progress.

    A thread sends the newest values every five seconds at most, so `log` waits for nothing. The first update that
    fails is logged as a warning, and does not end the training. There is nothing to report outside of a TrainJob.

    Args:
        run_name: unused; the TrainJob has a name.
        total_steps: the last step; without it no progress is reported, only metrics.
    """

    name = "kubeflow"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, total_steps: int | None = None) -> None:
        super().__init__()
        self.run_name = run_name
        self._total = total_steps
        self._status: dict[str, Any] | None = None
        self._waiting: dict[str, Any] | None = None  # to be sent
        self._metrics: dict[str, str] = {}
        self._began = self._first_step = 0.0
        self._wake = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def tracker(self) -> Any:
        """The status that was reported last; None before the first one."""
        return self._status

    @classmethod
    def install_line(cls) -> str | None:
        """None inside a TrainJob that can be told its progress; else where that is."""
        return None if _URL in snapshot() else "a TrainJob of Kubeflow with the feature gate TrainJobStatus"

    def check_ready(self) -> None:
        """Refuse a number of steps that is none."""
        if self._total is not None and (not isinstance(self._total, int) or self._total < 1):
            raise OptionError(
                f"total_steps of the tracker kubeflow is {self._total!r}; expected a number of steps from 1"
            )

    @on_main_process
    def start(self) -> None:
        """Begin to report."""
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="accel-kubeflow", daemon=True)
        self._thread.start()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Take over the numbers of one step.

        Args:
            values: names to numbers; others are not reported.
            step: the step they belong to.
            kwargs: unused.
        """
        numbers = {
            name: str(value)
            for name, value in flat(plain(values)).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        with self._wake:
            self._metrics |= numbers
            status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat()}
            status["metrics"] = [{"name": name, "value": value} for name, value in self._metrics.items()]
            if step is not None and self._total is not None:
                done = min(max(step, 0), self._total)
                status["progressPercentage"] = 100 * done // self._total
                self._first_step = self._first_step or done
                if done > self._first_step:  # the steps of this process: a resumed run did the others earlier
                    pace = (time.monotonic() - self._began) / (done - self._first_step + 1)
                    status["estimatedRemainingSeconds"] = int(pace * (self._total - done))
            self._status = self._waiting = status
            self._wake.notify()

    @on_main_process
    def finish(self) -> None:
        """Send what has not been sent."""
        if self._thread is None:
            return
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(2 * _TIMEOUT)

    def _run(self) -> None:
        told = False
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._waiting is not None)
                status, self._waiting, ended = self._waiting, None, self._ended
            if status is not None:
                try:
                    _send(status)
                except (OSError, ValueError) as error:
                    if not told:
                        told = True
                        _logger.warning(
                            "the progress of the TrainJob cannot be reported: %s", first_line(error)
                        )
            if ended:
                return
            with self._wake:
                self._wake.wait_for(lambda: self._ended, _LEAST)


def _send(status: dict[str, Any]) -> None:
    """Post a status.

    Raises:
        OSError: the server cannot be reached, refuses it, or the token or the certificate cannot be read.
        ValueError: the address is none.
    """
    environ = snapshot()
    token = (
        Path(environ.get(_TOKEN, "")).read_text(encoding="utf-8").strip()
    )  # read again: Kubernetes renews it
    certificate = environ.get(_CERTIFICATE)
    request = urllib.request.Request(
        environ[_URL],
        data=json.dumps({"trainerStatus": status}).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="POST",
    )
    if request.type != "https":
        raise ValueError(f"{_URL} is no address that begins with https, and the token goes to no other")
    with urllib.request.urlopen(
        request, timeout=_TIMEOUT, context=ssl.create_default_context(cafile=certificate)
    ):
        pass
