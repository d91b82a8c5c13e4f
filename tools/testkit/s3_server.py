"""An S3 server on this machine (moto) whose answers can be made to fail: ``python -m testkit.s3_server``.

It prints its port. A list of faults is set by ``POST /_faults``; each is a dictionary: ``kind``; ``method`` and
``path``, regular expressions that a request must match (the query string belongs to the path); ``times``, how often it
happens at most; ``chance``, how likely it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    "error": ("500 Internal Server Error", "InternalError"),
    "slow_down": ("503 Slow Down", "SlowDown"),
    "denied": ("403 Forbidden", "AccessDenied"),
    "bad_key": ("403 Forbidden", "InvalidAccessKeyId"),
    "missing": ("404 Not Found", "NoSuchKey"),
}


class Faulty:
    """A WSGI application around another one."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.faults: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.seen: dict[str, int] = {}
        self.random = random.Random(0)

    def __call__(self, environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"] + (f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else "")
        if path == "/_faults":
            self.faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            answer = json.dumps(self.seen).encode()
            self.seen = {}
            start_response("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        kind = self._choose(environ["REQUEST_METHOD"], path)
        if kind in KINDS:
            self._drain(environ)
            status, code = KINDS[kind]
            body = f"<Error><Code>{code}</Code><Message>{code} by the test</Message></Error>".encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "slow":
            time.sleep(1.0)
        if kind == "stuck":  # neither reads, nor answers, nor closes
            time.sleep(3600.0)
        if kind == "reset":
            return self._reset(environ)
        if kind == "lost":  # carried out, and nobody knows
            for _ in self.app(environ, lambda *_: None):
                pass
            return self._reset(environ)
        if kind == "truncated":
            return self._cut_off(environ, start_response)
        return self.app(environ, start_response)

    def _choose(self, method: str, path: str) -> str | None:
        with self.lock:
            for fault in self.faults:
                if (
                    fault.get("times", 1) > 0
                    and re.search(fault.get("method", ""), method)
                    and re.search(fault.get("path", ""), path)
                    and self.random.random() < fault.get("chance", 1.0)
                ):
                    fault["times"] = fault.get("times", 1) - 1
                    self.seen[fault["kind"]] = self.seen.get(fault["kind"], 0) + 1
                    return str(fault["kind"])
        return None

    def _drain(self, environ: Any) -> None:
        with contextlib.suppress(OSError):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))

    def _reset(self, environ: Any) -> Iterator[bytes]:
        connection = environ["werkzeug.socket"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(connection.detach())  # at once: close() waits for the files that are made of it
        raise ConnectionAbortedError("by the test")

    def _cut_off(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        body = b"".join(self.app(environ, start_response))
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def serve() -> None:
    """Serve until the process is ended, or its standard input."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: Any) -> None:
            pass

    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(server.port, flush=True)
    threading.Thread(
        target=lambda: (sys.stdin.read(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True
    ).start()
    server.serve_forever()


class S3Server:
    """The server as a process of its own; for a ``with`` block."""

    def __enter__(self) -> S3Server:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testkit.s3_server"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server ended with {self._process.wait()}; run: python -m testkit.s3_server"
        self.port = int(line)
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def processor_seconds(self) -> float:
        """What the server has used of the processors, as Linux counts it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def faults(self, *faults: dict[str, Any]) -> dict[str, int]:
        """Let these happen from now on; returns how often each kind has happened since the last call."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/_faults", json.dumps(faults).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, int] = json.loads(answer.read())
        return found


if __name__ == "__main__":
    serve()
