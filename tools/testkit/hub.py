"""A local stand-in for a model hub: as much of its HTTP interface as huggingface_hub calls.

It knows repositories with one branch, revisions, uploads (small files in the commit itself, large ones through
LFS), and downloads with ranges. It keeps a log of requests, and breaks when told to.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["FakeHub", "serve"]

TOKEN = "hf_test"
_LARGE = 1000  # bytes; files from here on go through LFS


@dataclass
class Repository:
    """Files by revision; the last revision is ``main``."""

    private: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.revisions)[-1]

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        sha = hashlib.sha1(f"{len(self.revisions)}{sorted(files)}".encode()).hexdigest()
        self.revisions[sha] = dict(files)
        self.messages.append(message)
        return sha

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = self.head if revision == "main" else revision
        return (sha, self.revisions[sha]) if sha in self.revisions else None


@dataclass
class FakeHub:
    """What the server holds and what it was asked."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """For each of the next downloads, the bytes after which the connection breaks."""
    stall: str | None = None
    """A file whose download stops half-way, until `resume` is set."""
    stalled: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    failures: dict[str, int] = field(default_factory=dict)
    """Status to answer with, by a part of the path."""

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> str:
        """Make or change a repository; returns the revision."""
        return self.repositories.setdefault(name, Repository(private)).commit(files)

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a repository's last revision."""
        repository = self.repositories[name]
        return repository.revisions[repository.head]

    def environ(self, home: Path, token: str = TOKEN) -> dict[str, str]:
        """The environment of a process whose hub this is, with a cache of its own."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def requests(self, method: str, part: str) -> list[dict[str, str]]:
        """Headers of the requests of a method whose path has a part."""
        return [headers for verb, path, headers in self.log if verb == method and part in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def _begin(self) -> str | None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunked()
        for part, status in self.hub.failures.items():
            if part in path:
                self._json({"error": "told to fail"}, status)
                return None
        return path

    def _chunked(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._allowed()):
            self._json(
                {"error": "Repository not found"},
                401 if not self._allowed() else 404,
                X_Error_Code="RepoNotFound",
            )
            return None
        return found

    def do_GET(self) -> None:
        path = self._begin()
        if path is None:
            return
        if path == "/api/whoami-v2":
            known = {"name": "tester", "type": "user", "orgs": [{"name": "org"}]}
            self._json(known if self._allowed() else {"error": "no"}, 200 if self._allowed() else 401)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._json({"error": f"no such address: {path}"}, 404)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _tree(self, name: str, revision: str) -> None:
        if repository := self._repository(name):
            found = repository.find(revision)
            files = found[1] if found else {}
            self._json(
                [
                    {"type": "file", "path": path, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                    for path, raw in sorted(files.items())
                ]
            )

    def _info(self, name: str, revision: str) -> None:
        if repository := self._repository(name):
            found = repository.find(revision)
            if found is None:
                self._json({"error": "Revision not found"}, 404, X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": path} for path in sorted(found[1])]
            self._json(
                {"id": name, "sha": found[0], "private": repository.private, "siblings": siblings, "tags": []}
            )

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        found = repository.find(revision)
        if found is None or path not in found[1]:
            self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        raw = found[1][path]
        start = (
            int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        )
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(raw).hexdigest()}"')
        self.send_header("X-Repo-Commit", found[0])
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(raw) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(raw) - 1}/{len(raw)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send(path, raw[start:])

    def _send(self, path: str, raw: bytes) -> None:
        if self.hub.cuts:
            self.wfile.write(raw[: self.hub.cuts.pop(0)])
            self.close_connection = True
            return
        if self.hub.stall == path:
            self.wfile.write(raw[: len(raw) // 2])
            raw = raw[len(raw) // 2 :]
            self.hub.stalled.set()
            self.hub.resume.wait()
        with contextlib.suppress(ConnectionError):  # the reader may be gone
            self.wfile.write(raw)

    def do_POST(self) -> None:
        path = self._begin()
        if path is None:
            return
        if not self._allowed():
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create()
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            asked = json.loads(self.body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= _LARGE else "regular",
                    "shouldIgnore": False,
                }
                for file in asked
            ]
            self._json({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch()
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(match[1])
        else:
            self._json({"error": f"no such address: {path}"}, 404)

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        if name in self.hub.repositories:
            self._json(
                {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{name}"}, 409
            )
            return
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(private)
        self.hub.repositories[name].commit({".gitattributes": b""}, "initial commit")
        self._json({"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def _batch(self) -> None:
        asked = json.loads(self.body)["objects"]
        self._json(
            {
                "transfer": "basic",
                "objects": [
                    {
                        "oid": each["oid"],
                        "size": each["size"],
                        "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{each['oid']}"}},
                    }
                    for each in asked
                ],
            }
        )

    def do_PUT(self) -> None:
        path = self._begin()
        if path is None:
            return
        oid = path.removeprefix("/lfs/")
        assert hashlib.sha256(self.body).hexdigest() == oid, "the upload is not what was announced"
        self.hub.blobs[oid] = self.body
        self._json({})

    def _commit(self, name: str) -> None:
        repository = self.hub.repositories[name]
        files = dict(self.hub.files(name))
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            kind, value = item["key"], item["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files, message)
        self._json(
            {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha, "success": True}
        )


@contextlib.contextmanager
def serve() -> Iterator[FakeHub]:
    """Run a hub on the loopback interface until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
