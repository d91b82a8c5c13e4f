"""Servers of Google Cloud Storage and Azure Blob Storage on this machine: gcp-storage-emulator and Azurite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from testkit.worlds import free_port

# What Azurite's documentation gives to everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class _Server:
    scheme: str
    environment: dict[str, str]
    port: int

    def start(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, (
                f"{command[0]} ended with {self._process.returncode}; run: {' '.join(command)}"
            )
            assert time.monotonic() < deadline, f"{command[0]} does not answer on port {self.port}"
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


class GcsServer(_Server):
    """Google Cloud Storage; for a ``with`` block. Not by gcsfs: buckets and objects by plain requests."""

    scheme = "gs"

    def __enter__(self) -> GcsServer:
        self.port = free_port()
        self.environment = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}"}
        main = "from gcp_storage_emulator.__main__ import main; main()"
        self.start(
            sys.executable, "-c", main, "start", "--host=127.0.0.1", f"--port={self.port}", "--in-memory"
        )
        return self

    def make(self, bucket: str) -> None:
        """Make an empty bucket."""
        self._ask("POST", "/storage/v1/b?project=test", {"name": bucket})

    def remove(self, bucket: str) -> None:
        """Remove a bucket with what is in it."""
        for name in self.objects(bucket):
            self._ask("DELETE", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}")
        self._ask("DELETE", f"/storage/v1/b/{bucket}")

    def objects(self, bucket: str) -> list[str]:
        """Names of all objects."""
        return sorted(one["name"] for one in self._ask("GET", f"/storage/v1/b/{bucket}/o").get("items", ()))

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")


class AzureServer(_Server):
    """Azure Blob Storage; for a ``with`` block.

    Args:
        folder: where npm has installed Azurite: ``tools/engines/azurite.sh``.
    """

    scheme = "az"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> AzureServer:
        self.port = free_port()
        self.environment = {"AZURE_STORAGE_CONNECTION_STRING": self.connection(KEY)}
        program = self._folder / "node_modules/.bin/azurite-blob"
        assert program.exists(), f"there is no {program}; run: bash tools/engines/azurite.sh {self._folder}"
        self.start(
            str(program), "--blobPort", str(self.port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent",
            "--disableTelemetry",
        )  # fmt: skip
        return self

    def connection(self, key: str) -> str:
        """How a client finds the server, with a key."""
        address = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={address};"

    def make(self, bucket: str) -> None:
        """Make an empty container."""
        self._client.create_container(bucket)

    def remove(self, bucket: str) -> None:
        """Remove a container with what is in it."""
        self._client.delete_container(bucket)

    def objects(self, bucket: str) -> list[str]:
        """Names of all blobs."""
        return sorted(self._client.get_container_client(bucket).list_blob_names())

    @property
    def _client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.connection(KEY))


def azurite_folder() -> Path:
    """Where the project's script installs Azurite."""
    return Path(os.environ.get("ACCEL_AZURITE_FOLDER", Path.home() / ".cache/accel/azurite"))
