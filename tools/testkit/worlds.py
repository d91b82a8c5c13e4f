"""Run a function in a world of N gloo processes, quickly.

The processes are forked from a server that has imported torch but never computed, so no thread pool exists at
the fork and a world costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import cloudpickle

from accel_state.constants import STORE_SECRET
from accel_state.launching.ports import reserve_port
from accel_state.launching.ranks.spawns import pickled
from testkit import simulated_device


class RankError(AssertionError):
    """A rank failed; the message is that rank's traceback."""


_reservations: deque[contextlib.ExitStack] = deque()
_RESERVED = 32  # more than any test asks for, and few open files


def free_port() -> int:
    """A free TCP port, which this process keeps reserved until it has asked for 32 others.

    A port that is merely found free may become the local end of a connection, of another test for example, before
    rank 0 listens on it.
    """
    reservation = contextlib.ExitStack()
    port = reservation.enter_context(reserve_port())
    _reservations.append(reservation)
    if len(_reservations) > _RESERVED:
        _reservations.popleft().close()
    return port


def context(*preload: str) -> Any:
    """Multiprocessing with processes forked from one that has imported ``testkit.preloaded``, and more modules."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["testkit.preloaded", *preload])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # it finds testkit there
        ensure_running()
    return forkserver


def _rank_main(rank: int, environ: dict[str, str], path: list[str], blob: bytes, pipe: Connection) -> None:
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    if "huggingface_hub.constants" in sys.modules:  # read from the environment of the server
        importlib.reload(sys.modules["huggingface_hub.constants"])
    import torch

    torch.set_num_threads(1)
    # A process of the fork server would start the workers of its loaders by another one, which imports torch for each
    # of them; they start as those of a script do.
    multiprocessing.set_start_method("fork" if sys.version_info < (3, 14) else None, force=True)
    try:
        function, args, kwargs = cloudpickle.loads(blob)
        result = _in_host_memory(function(*args, **kwargs))
        simulated_device.check()
        pipe.send((True, result))
    except BaseException as error:
        pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Rank 0 hosts the store, so it must not leave while others use it. The caller ends all at once.
        caller = multiprocessing.parent_process()
        if caller is not None:
            caller.join()
        # A failed rank must not wait for its peers in destructors of the process group.
        os._exit(0)


def _in_host_memory(result: Any) -> bytes:
    """A result as a rank sends it, with tensors of an accelerator in host memory, as tests compare them."""
    from torch import Tensor

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
                return value.detach().cpu().__reduce_ex__(2)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer).dump(result)
    return buffer.getvalue()


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environ: dict[str, str] | None = None,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank; its results in rank order, with tensors in host memory.

    Ranks find each other through torchrun's environment variables, as a launched script would; the function
    itself creates ``PartialState``, ``Accelerator`` or a process group. A world of one gets none of them.

    Raises:
        RankError: with the traceback of the first rank that failed, or naming the ranks that did not answer
            within ``timeout`` seconds.
    """
    module = sys.modules[function.__module__]
    with contextlib.suppress(ValueError):
        cloudpickle.register_pickle_by_value(module)
    blob = pickled((function, args, kwargs))
    forkserver = context()
    port = free_port()
    cpu = os.environ.get("ACCELERATE_USE_CPU", "true")  # --device says otherwise
    base = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": cpu, **(environ or {})}
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        env = dict(base)
        if world_size > 1:
            env |= {
                "RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), STORE_SECRET: "of this world",  # as the launcher
            }  # fmt: skip
        ours, theirs = forkserver.Pipe(duplex=False)
        # Not daemonic, since those may not have children and a rank's data loader may want workers.
        process = forkserver.Process(target=_rank_main, args=(rank, env, sys.path, blob, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(open_pipes.values())} did not answer within {timeout} s")
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
            try:
                succeeded, payload = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} exited without an answer") from None
            if not succeeded:
                raise RankError(payload)
            results[rank] = cloudpickle.loads(payload)
    return [results[rank] for rank in sorted(results)]


@contextlib.contextmanager
def scratch() -> Any:
    """A temporary directory that every rank of a world can reach."""
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        yield folder


def without_gloo_notes(output: str) -> str:
    """Output without the lines that gloo of older versions of torch prints when ranks connect."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if "[Gloo] Rank " not in line)
