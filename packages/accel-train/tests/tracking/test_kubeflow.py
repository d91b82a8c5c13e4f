"""Progress of a TrainJob, sent to a server of this machine."""

import http.server
import json
import logging
import ssl
import subprocess
import threading
import time

import pytest

from accel_train.errors import OptionError
from accel_train.tracking import kubeflow
from accel_train.tracking.kubeflow import KubeflowTracker


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, folder):
        self.received = []
        self.code = 200
        super().__init__(("127.0.0.1", 0), Handler)
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        words = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(["openssl", "req", "-x509", *words], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.certificate = certificate


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    found = Server(tmp_path)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("a token\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{found.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(found.certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield found
    found.shutdown()
    found.server_close()


def metrics(status):
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def test_the_newest_values_arrive_at_the_end(server):
    tracker = KubeflowTracker("run", total_steps=10)
    tracker.check_ready()
    tracker.start()
    for step in range(1, 9):
        tracker.log({"loss": 1.0 / step, "eval": {"accuracy": 0.5}, "note": "text", "ready": True}, step=step)
    began = time.monotonic()
    tracker.finish()
    assert time.monotonic() - began < 3
    assert len(server.received) <= 2, "at most one in five seconds, and the last"
    token, status = server.received[-1]
    assert token == "Bearer a token"
    assert metrics(status) == {"loss": "0.125", "eval/accuracy": "0.5"}
    assert status["progressPercentage"] == 80
    assert status["estimatedRemainingSeconds"] >= 0
    assert tracker.tracker == status


def test_without_a_number_of_steps_only_metrics_are_reported(server):
    tracker = KubeflowTracker()
    tracker.start()
    tracker.log({"loss": 1}, step=3)
    tracker.finish()
    assert set(server.received[-1][1]) == {"lastUpdatedTime", "metrics"}


def test_a_server_that_refuses_is_told_once_and_ends_nothing(server, caplog, monkeypatch):
    monkeypatch.setattr(kubeflow, "_LEAST", 0.01)
    server.code = 403
    tracker = KubeflowTracker(total_steps=3)
    tracker.start()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log({"loss": 1.0}, step=step)
            time.sleep(0.1)
        tracker.finish()
    told = [record for record in caplog.records if "cannot be reported" in record.message]
    assert len(told) == 1
    assert "403" in told[0].message


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("URL", "http://127.0.0.1:1/", "begins with https"),
        ("URL", "no address", "unknown url type"),
        ("TOKEN", "/nowhere", "No such file"),
        ("CA_CERT", "/nowhere", "No such file"),
        ("CA_CERT", "", "certificate verify failed"),
    ],
)
def test_what_is_wrong_with_the_variables_is_told(server, caplog, monkeypatch, name, value, why):
    monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", value)
    if not value:
        monkeypatch.delenv(f"KUBEFLOW_TRAINER_SERVER_{name}")
    tracker = KubeflowTracker()
    tracker.start()
    with caplog.at_level(logging.WARNING):
        tracker.log({"loss": 1.0})
        tracker.finish()
    assert why in caplog.text
    assert not server.received


def test_outside_of_a_trainjob_it_is_not_there(monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    assert "TrainJob" in KubeflowTracker.install_line()


@pytest.mark.parametrize("steps", [0, -1, 2.5, "many"])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(OptionError, match="total_steps of the tracker kubeflow"):
        KubeflowTracker(total_steps=steps).check_ready()
