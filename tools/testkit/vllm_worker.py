"""A stand-in for the inference side of vLLM's NCCL weight transfer, written from the documentation of vLLM 0.32.

It checks what the documentation says: the order of the four calls, their fields, and that the sizes of broadcasts
follow from the names, dtypes and shapes that `update_weights` announces. Where vLLM has NCCL, it has a group of gloo.
vLLM itself is not run.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from accel_ckpt import join_group

INIT_FIELDS = {
    "master_address": str,
    "master_port": int,
    "rank_offset": int,
    "world_size": int,
    "packed": bool,
    "packed_buffer_size_bytes": int,
    "packed_num_buffers": int,
}


class Group:
    """The broadcasts of vLLM's communicator, on gloo."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self._group: Any = join_group(address, port, rank, world_size, timeout=20)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._group.broadcast(tensor, src).wait()


class Worker:
    """One inference worker: `weights` has what `load_weights` was called with."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights: dict[str, torch.Tensor] = {}
        self.broadcasts: list[int] = []
        self.updates = 0
        self.phase = "new"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._expect("new", "ready")
        assert {name: type(value) for name, value in init_info.items()} == INIT_FIELDS
        self._info = init_info
        rank = self.number + init_info["rank_offset"]
        self._group = Group(
            init_info["master_address"], init_info["master_port"], rank, init_info["world_size"]
        )

    def start_weight_update(self) -> None:
        self._expect("ready", "started")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._expect("started", "started")
        assert update_info.keys() == {"names", "dtype_names", "shapes"}
        for chunk in self._chunks(update_info):
            self._receive(chunk)

    def finish_weight_update(self) -> None:
        self._expect("started", "ready")
        self.updates += 1

    def _expect(self, phase: str, then: str) -> None:
        assert self.phase == phase, f"called in the phase {self.phase}, and this belongs to {phase}"
        self.phase = then

    def _chunks(self, update_info: dict[str, Any]) -> Iterator[list[tuple[str, torch.dtype, list[int]]]]:
        """Weights are cut where their bytes exceed the size of a buffer; without packing one by one."""
        chunk, size = [], 0
        fields = (update_info[key] for key in ("names", "dtype_names", "shapes"))
        for name, dtype_name, shape in zip(*fields, strict=True):
            dtype = getattr(torch, dtype_name)
            chunk.append((name, dtype, shape))
            size += math.prod(shape) * dtype.itemsize
            if not self._info["packed"] or size > self._info["packed_buffer_size_bytes"]:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _receive(self, chunk: list[tuple[str, torch.dtype, list[int]]]) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in chunk]
        if not self._info["packed"]:
            ((name, dtype, shape),) = chunk
            weight = torch.empty(shape, dtype=dtype)
            self._group.broadcast(weight, src=0)
            self.weights[name] = weight
        else:
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            self._group.broadcast(packed, src=0)
            for (name, dtype, shape), part in zip(chunk, packed.split(sizes), strict=True):
                self.weights[name] = part.view(dtype).view(shape).clone()
        self.broadcasts.append(sum(sizes))


class Engine:
    """Workers that take each call together, as a server's do."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    def call(self, method: str, *args: Any) -> None:
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(lambda worker: getattr(worker, method)(*args), self.workers))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self) -> None:
        self.call("finish_weight_update")


def serve(engine: Engine) -> tuple[str, Callable[[], None]]:
    """Serve the four routes over HTTP; returns the address, and what stops it."""
    bodies = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            route = self.path.lstrip("/")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                args = [json.loads(body)[bodies[route]]] if route in bodies else []
                engine.call(route, *args)
                status, text = 200, "{}"
            except Exception as error:
                status, text = 500, f"{type(error).__name__}: {error}"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return f"http://127.0.0.1:{server.server_address[1]}", stop
