"""Run a function in a world of N gloo processes, quickly.

The processes are forked from a server that has imported torch but never computed, so no thread pool exists at
the fork and a world costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
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


def _rank_main(pipe: Connection) -> None:
    """Run functions that come through a pipe, one after another; the caller ends this process."""
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    # A process of the fork server would start the workers of its loaders by another one, which imports torch for each
    # of them; they start as those of a script do.
    multiprocessing.set_start_method("fork" if sys.version_info < (3, 14) else None, force=True)
    generators = _generators()
    # Rank 0 hosts the store, so it must not leave while others use it, and a failed rank must not wait for its peers in
    # destructors of the process group. The caller ends all at once.
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has ended
        while True:
            environ, path, blob = pipe.recv()
            pipe.send(_answer(environ, path, blob))
            pipe.recv()  # all ranks have answered
            _forget(generators)
            pipe.send(None)
    os._exit(0)


def _answer(environ: dict[str, str], path: list[str], blob: bytes) -> tuple[bool, Any]:
    """Whether a function succeeds, with its result or why it fails."""
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    if "huggingface_hub.constants" in sys.modules:  # read from the environment of the server
        importlib.reload(sys.modules["huggingface_hub.constants"])
    try:
        function, args, kwargs = cloudpickle.loads(blob)
        result = _in_host_memory(function(*args, **kwargs))
        simulated_device.check()
        return True, result
    except BaseException as error:
        rank = environ.get("RANK", "0")
        return False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _generators() -> list[tuple[Callable[[Any], None], Any]]:
    """The generators of random numbers: what restores each, and its state."""
    import numpy
    import torch

    return [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]


def _forget(generators: list[tuple[Callable[[Any], None], Any]]) -> None:
    """Leave a world, so that the next function finds a process without one."""
    import torch
    from torch.distributed.tensor import _redistribute, debug

    from accel_train.loop.state import AcceleratorState

    # These caches would give a mesh of this world for an equal one of the next.
    debug._clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # older versions of torch have none
        _redistribute.clear_redistribute_planner_cache()

    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.compiler.reset()
    for restore, state in generators:
        restore(state)
    gc.collect()


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
    fresh_ranks: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank; its results in rank order, with tensors in host memory.

    Ranks find each other through torchrun's environment variables, as a launched script would; the function
    itself creates ``PartialState``, ``Accelerator`` or a process group. A world of one gets none of them.
    ``fresh_ranks`` are processes of their own also inside `kept`, as engines need, which start once in a process.

    Raises:
        RankError: with the traceback of the first rank that failed, or naming the ranks that did not answer
            within ``timeout`` seconds.
    """
    module = sys.modules[function.__module__]
    with contextlib.suppress(ValueError):
        cloudpickle.register_pickle_by_value(module)
    blob = pickled((function, args, kwargs))
    port = free_port()
    cpu = os.environ.get("ACCELERATE_USE_CPU", "true")  # --device says otherwise
    base = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": cpu, **(environ or {})}
    keeps = _kept is not None and not environ and not fresh_ranks
    ranks = _ranks(world_size, keeps)
    try:
        for number, rank in enumerate(ranks):
            env = dict(base)
            if world_size > 1:
                env |= {
                    "RANK": str(number), "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    STORE_SECRET: "of this world",  # as the launcher
                }  # fmt: skip
            rank.pipe.send((env, sys.path, blob))
        results = _collect([rank.pipe for rank in ranks], time.monotonic() + timeout, timeout)
    except BaseException:
        keeps = False
        raise
    finally:
        if not keeps:
            _end(ranks)
    for rank in ranks if keeps else ():
        rank.pipe.send(None)
        rank.worlds += 1
    return results


class _Rank:
    """A process that runs functions.

    Attributes:
        worlds: how many it has been in. It says when it has left one.
    """

    def __init__(self, forkserver: Any) -> None:
        self.pipe, theirs = forkserver.Pipe()
        # Not daemonic, since those may not have children and a rank's data loader may want workers.
        self.process: BaseProcess = forkserver.Process(target=_rank_main, args=(theirs,))
        self.process.start()
        theirs.close()
        self.worlds = 0

    def is_ready(self) -> bool:
        """Whether it can run a function."""
        if self.worlds in (0, _WORLDS):
            return self.worlds == 0
        with contextlib.suppress(EOFError, ConnectionError):
            if self.pipe.poll(10):
                return self.pipe.recv() is None
        return False


_kept: list[_Rank] | None = None
_WORLDS = 40  # of a kept rank: threads of gloo stay where a model that is not yet freed holds a group


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside, ranks run the functions of one world after another; after an error, others are forked.

    A rank computes the most when it does something for the first time. What a function leaves in its process, beside
    the world and the generators of random numbers, the next one finds: for functions that train and compare. Those
    that get variables of their environment run in processes of their own, since modules read them once. One world at a
    time.
    """
    global _kept
    _kept = []
    try:
        yield
    finally:
        _end(_kept)
        _kept = None


def _ranks(count: int, kept: bool) -> list[_Rank]:
    forkserver = context()
    if _kept is None or not kept:
        return [_Rank(forkserver) for _ in range(count)]
    if not all(rank.is_ready() for rank in _kept[:count]):
        _end(_kept)
    _kept.extend(_Rank(forkserver) for _ in range(count - len(_kept)))
    return _kept[:count]


def _end(ranks: list[_Rank]) -> None:
    """End processes, and with one that was kept all that were."""
    ended = list(ranks)
    if _kept and any(rank in _kept for rank in ranks):
        ended = _kept.copy()
        _kept.clear()
    for rank in ended:
        rank.process.kill()
    for rank in ended:
        rank.process.join()
        rank.pipe.close()


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
            except (EOFError, ConnectionError):
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
