"""Saving and loading a training state of 3 GB: ours, Accelerate's, and torch's Distributed Checkpoint (dcp).

60 linear layers with AdamW, 1 GB of weights and 2 GB of states, on one process. Everything runs in turn, round after
round; the first round is not counted, and in it what each contender wrote is read again and compared, bit for bit.
Numbers are medians with the range in brackets. Give it a disk with room for a few states, and a quiet machine.

    hatch run bench:ckpt
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from measure import forget, installed, parser_of, read_all, samples_table, seconds
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from accel_ckpt.disk import Disk
from accel_train import Accelerator
from testkit.memory import growth

BATCH = 32
CHUNK = 1 << 24
Samples = dict[str, list[float]]


class Training:
    """The model and its steps."""

    def __init__(self, gigabytes: float, count: int, begun: bool = True) -> None:
        torch.manual_seed(0)
        self.count = count
        self.width = width = max(16, int((gigabytes * 1e9 / 3 / 4 / count) ** 0.5) // 16 * 16)
        layers: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(count)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(BATCH, width)
        self.before_step: Callable[[], object] | None = None
        if begun:
            self.step()

    def step(self) -> float:
        """One step; returns its seconds."""
        began = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        if self.before_step is not None:
            self.before_step()
            self.before_step = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """What dcp is given."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def digests(self) -> list[str]:
        """A hash of each tensor of the state."""
        states = self.optimizer.state_dict()["state"]
        moments = [states[index][key] for index in range(self.count) for key in ("exp_avg", "exp_avg_sq")]
        return [digest(tensor) for tensor in [*self.model.state_dict().values(), *moments]]

    def overwrite(self) -> None:
        """Put something else into the tensors, so that a load has something to do."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1)
                for value in self.optimizer.state[parameter].values():
                    value.fill_(1)


def digest(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_64_hexdigest(memoryview(tensor.detach().numpy()).cast("B")))


@dataclass
class Contender:
    """One way to save, and the way to read it."""

    name: str
    save: Callable[[Path], Any]
    """Returns an object with `done()` if it goes on in the background."""
    load: Callable[[Path], object]
    resumes: bool = False
    """Whether loading is measured."""
    samples: Samples = field(default_factory=dict)

    def note(self, figure: str, value: float) -> None:
        self.samples.setdefault(figure, []).append(value)


def contenders(training: Training) -> tuple[list[Contender], list[Contender]]:
    """Those that save while the caller waits, and those that save in the background."""
    ours = Accelerator(cpu=True)
    ours.prepare(training.model, training.optimizer)

    def dcp_load(folder: Path) -> None:
        state = training.state()
        dcp.load(state, checkpoint_id=folder)
        training.optimizer.load_state_dict(state["optimizer"])

    best = DefaultStager(StagingOptions(False, False, True, False))

    def save_staged(folder: Path) -> Any:
        answer: Any = dcp.async_save(training.state(), checkpoint_id=folder, async_stager=best)
        training.before_step = answer.staging_completion.result
        return answer.upload_completion

    blocking = [
        Contender("ours", ours.save_state, ours.load_state, True),
        Contender("dcp.save", lambda folder: dcp.save(training.state(), checkpoint_id=folder), dcp_load),
    ]
    if installed(["accelerate"]):
        import accelerate

        theirs = accelerate.Accelerator(cpu=True)
        theirs.prepare(training.model, training.optimizer)
        blocking.append(Contender("accelerate", lambda folder: theirs.save_state(str(folder)),
                                  lambda folder: theirs.load_state(str(folder)), True))  # fmt: skip
    background = [
        Contender("ours", lambda folder: ours.save_state(folder, asynchronous=True), ours.load_state),
        Contender("dcp.async_save", lambda f: dcp.async_save(training.state(), checkpoint_id=f), dcp_load),
        Contender("dcp.async_save, async stager", save_staged, dcp_load),
    ]
    return blocking, background


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system


@contextlib.contextmanager
def peak(contender: Contender, figure: str) -> Iterator[None]:
    """Note by how many MB the resident memory rose at most."""
    with growth() as grown:
        yield
    contender.note(figure, grown.peak / 1e6)


@contextlib.contextmanager
def writing(contender: Contender) -> Iterator[None]:
    """Note the seconds that our saves spend in the disk's write calls."""
    inside, call = [], Disk.write

    def write(disk: Disk, descriptor: int, data: memoryview) -> int:
        began = time.perf_counter()
        count = call(disk, descriptor, data)
        inside.append(time.perf_counter() - began)
        return count

    Disk.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Disk.write = call  # type: ignore[method-assign]
    if inside:
        contender.note("of that inside write calls, s", sum(inside))


def stall(training: Training, contender: Contender, folder: Path, threads: int) -> None:
    """The excess of all steps until the checkpoint is durable."""
    torch.set_num_threads(threads)
    training.step()
    usual = [training.step() for _ in range(3)]
    began = time.perf_counter()
    processor = processor_seconds()
    handle = contender.save(folder)
    called = time.perf_counter() - began
    steps = 0
    while not handle.done() or steps == 0:
        training.step()
        steps += 1
    spent = time.perf_counter() - began
    handle.result()
    usual += [training.step() for _ in range(3)]
    contender.note(f"stall, {threads} thread(s), s", spent - steps * statistics.median(usual))
    contender.note(f"call, {threads} thread(s), s", called)
    contender.note(f"durable, {threads} thread(s), s", spent)
    contender.note(f"step, {threads} thread(s), s", statistics.median(usual))
    contender.note(
        f"all processor seconds per step, {threads} thread(s)",
        (processor_seconds() - processor) / (steps + 6),
    )


def alone(contender: Contender, folder: Path) -> None:
    """Processor seconds of a save in the background while nothing else happens."""
    processor = processor_seconds()
    contender.save(folder).result()
    contender.note("processor s", processor_seconds() - processor)


class Bare:
    """What no save can do without: copy the bytes, write them, and put them on the disk."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.copies: list[Any] = []

    def __call__(self, contender: Contender, path: Path) -> None:
        states = self.training.optimizer.state_dict()["state"].values()
        tensors = [*self.training.model.state_dict().values()]
        tensors += [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        arrays = [tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in tensors]
        if not self.copies:
            self.copies = [array.copy() for array in arrays]
        began, processor = time.perf_counter(), processor_seconds()
        for copied, array in zip(self.copies, arrays, strict=True):
            np.copyto(copied, array)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        for copied in self.copies:
            view = memoryview(copied)
            for start in range(0, len(view), CHUNK):
                os.write(descriptor, view[start : start + CHUNK])
        os.fsync(descriptor)
        os.close(descriptor)
        contender.note("processor s", processor_seconds() - processor)
        contender.note("durable, s", time.perf_counter() - began)


def load_in_new_process(name: str, gigabytes: float, layers: int, folder: Path) -> float:
    """Seconds of the load alone in a process that has just built its model and has no optimizer states yet."""
    size = ["--gigabytes", str(gigabytes), "--layers", str(layers)]
    command = [sys.executable, __file__, *size, "--load", name, "--folder", str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(printed.splitlines()[-1])


def be_new_process(name: str, gigabytes: float, layers: int, folder: Path) -> None:
    blocking, _ = contenders(Training(gigabytes, layers, begun=False))
    [contender] = [each for each in blocking if each.name == name]
    print(seconds(lambda: contender.load(folder)))


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read_and_hash(folder: Path) -> float:
    """Processor seconds to read the files of a folder once and to hash them."""
    began = time.process_time()
    read_all(files_of(folder), xxhash.xxh3_64().update)
    return time.process_time() - began


def resumed(load: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of a load in a process that has no free memory at hand, like one that has begun."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    began = processor_seconds()
    return seconds(load), processor_seconds() - began


class Bench:
    """One run."""

    def __init__(self, gigabytes: float, layers: int, folder: Path, parts: str) -> None:
        self.folder = folder
        self.gigabytes = gigabytes
        self.training = Training(gigabytes, layers)
        blocking, background = contenders(self.training)
        self.blocking = blocking if parts != "background" else []
        self.background = background if parts != "blocking" else []
        self.bare = Contender("bare copy and write", lambda path: None, lambda path: None)
        self.copy_and_write = Bare(self.training)

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A new folder, gone afterwards, and a disk that has nothing else to do."""
        os.sync()
        path = self.folder / "state"
        yield path
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        os.sync()

    def round(self, check: bool) -> None:
        torch.set_num_threads(2)
        for contender in self.blocking:
            with self.place() as path:
                self.save_and_load(contender, path, check)
        for contender in self.background:
            # The first save in the background takes the memory that later ones use again.
            with (
                self.place() as path,
                peak(contender, "first peak memory, MB" if check else "peak memory, MB"),
            ):
                alone(contender, path)
            for threads in (1, 2):
                with self.place() as path:
                    stall(self.training, contender, path, threads)
            if check:
                self.check(contender)
        with self.place() as path:
            self.copy_and_write(self.bare, path)

    def save_and_load(self, contender: Contender, path: Path, check: bool) -> None:
        expected = self.training.digests() if check else []
        with peak(contender, "peak memory, MB"), writing(contender):
            contender.note("durable, s", seconds(lambda: contender.save(path)))
        if contender.resumes:
            read_all(files_of(path))
            contender.note("read and hash once, processor s", read_and_hash(path))
            spent, of_processor = resumed(lambda: contender.load(path))
            contender.note("load warm, s", spent)
            contender.note("load warm, processor s", of_processor)
            in_new = load_in_new_process(contender.name, self.gigabytes, self.training.count, path)
            contender.note("load warm in a new process, s", in_new)
            forget(path)
            contender.note("load cold, s", resumed(lambda: contender.load(path))[0])
            forget(path)
            contender.note("read once cold, s", seconds(lambda: read_all(files_of(path))))
        if check:
            self.training.overwrite()
            contender.load(path)
            assert self.training.digests() == expected, contender.name

    def check(self, contender: Contender) -> None:
        """A save while training goes on holds what was there when it was called."""
        with self.place() as path:
            expected = self.training.digests()
            handle = contender.save(path)
            self.training.step()
            handle.result()
            contender.load(path)
            assert self.training.digests() == expected, contender.name

    def forget_samples(self) -> None:
        for contender in (*self.blocking, *self.background, self.bare):
            contender.samples = {k: v for k, v in contender.samples.items() if k.startswith("first")}


def report(title: str, contenders: list[Contender]) -> None:
    samples_table(title, {contender.name: contender.samples for contender in contenders}, across=True)


def main() -> None:
    # Of 60 layers, each is a weight and its two moments.
    parser = parser_of(__doc__, gigabytes=3.0, layers=60, rounds=5, folder=Path.cwd())
    parser.add_argument("--parts", choices=("all", "blocking", "background"), default="all")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # in the processes that this program starts
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.load is not None:
        be_new_process(arguments.load, arguments.gigabytes, arguments.layers, arguments.folder)
        return
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder) as folder:
        bench = Bench(arguments.gigabytes, arguments.layers, Path(folder), arguments.parts)
        for number in range(arguments.rounds + 1):
            bench.round(check=number == 0)
            if number == 0:
                bench.forget_samples()
    size = f"{arguments.layers} layers, width {bench.training.width}, batch {BATCH}"
    print(f"{size}, {os.cpu_count()} cores, {arguments.rounds} rounds")
    report("While the caller waits", [*bench.blocking, bench.bare])
    report("In the background", bench.background)


if __name__ == "__main__":
    main()
