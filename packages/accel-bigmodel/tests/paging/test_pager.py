"""Mapped weights in less memory than they take: results, the budget, edits, and the thread's life."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel.paging import pager as pager_module
from accel_bigmodel.paging import reading
from accel_bigmodel.paging.pager import Pager
from accel_bigmodel.paging.pages import extents_of
from accel_bigmodel.streaming.groups import Group, plan_groups
from accel_ckpt.format import memory
from accel_ckpt.format.writer import write_safetensors
from testkit import limits
from testkit.memory import mapped_weights

MB = 1 << 20


class Model(nn.Module):
    """Layers that are used in any order."""

    def __init__(self, count=6, width=256):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.order = list(range(count))
        self.fails_at = None

    def forward(self, x):
        for position, index in enumerate(self.order):
            if position == self.fails_at:
                raise ArithmeticError("in the middle")
            x = self.layers[index](x).tanh()
        return x


def groups_of(model):
    return plan_groups(model, ["layers"])


def mapped(tmp_path, **kwargs):
    """A model in memory, and one whose weights are views of two files."""
    torch.manual_seed(0)
    plain = Model(**kwargs)
    state = plain.state_dict()
    names = list(state)
    half = len(names) // 2 + 1  # within a layer, whose weight and bias are in different files then
    for number, part in enumerate((names[:half], names[half:])):
        # Not by safetensors' own function: for a single row of inputs, some processors round otherwise if weights do
        # not begin at a multiple of 16 bytes, as those in memory do.
        write_safetensors(tmp_path / f"{number}.safetensors", {n: state[n] for n in part}, {"format": "pt"})
    return plain, load(tmp_path, **kwargs)


def load(tmp_path, **kwargs):
    with torch.device("meta"):
        model = Model(**kwargs)
    model.load_state_dict(mapped_weights(*sorted(tmp_path.glob("*.safetensors"))), assign=True)
    return model


@pytest.fixture
def no_slack(monkeypatch):
    monkeypatch.setattr(pager_module, "_KERNEL_AHEAD", 0)


class Memory:
    """Pretends to be the kernel: which pieces are in memory, by their first address."""

    def __init__(self, monkeypatch, delay=0.0):
        self.pages = {}
        self.most = 0
        self.reads = 0
        self.delay = delay
        self.lock = threading.Lock()
        monkeypatch.setattr(reading, "populate", self.populate)
        monkeypatch.setattr(pager_module, "evict", self.evict)

    def populate(self, piece):
        with self.lock:
            self.reads += 1
            self.pages[piece.data_ptr()] = piece.numel()
            self.most = max(self.most, sum(self.pages.values()))
        time.sleep(self.delay)
        return True

    def evict(self, pages):
        with self.lock:
            for address in list(self.pages):
                if pages.data_ptr() <= address < pages.data_ptr() + pages.numel():
                    del self.pages[address]
        return True


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 64 kB, so that a small model has many."""
    for module in (sys.modules["accel_bigmodel.paging.pages"], pager_module):
        monkeypatch.setattr(module, "PIECE", 1 << 16)


LAYER = 256 * 256 * 4 + 256 * 4  # bytes


@pytest.mark.parametrize(
    ("layers", "delay"), [(0, 0), (0.5, 0), (1, 0.001), (1.5, 0), (2, 0.001), (3, 0), (4.2, 0.001)]
)
def test_results_are_those_of_memory_and_the_budget_is_kept(
    tmp_path, monkeypatch, no_slack, small_pieces, layers, delay
):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch, delay)
    budget = int(layers * LAYER) + 3 * 4096  # weights do not begin at pages
    pager = Pager(model, groups_of(model), budget=budget)
    pager.attach()
    x = torch.randn(3, 256)
    chooser = random.Random(layers)
    for turn in range(8):
        if turn == 3:
            plain.order = model.order = [0, 0, 5, 1, 1, 4]
        if turn > 4:
            plain.order = model.order = [chooser.randrange(6) for _ in range(9)]
        assert torch.equal(model(x), plain(x))
    pager.detach()
    assert kernel.most <= budget
    assert kernel.reads
    stats = pager.stats()
    assert stats.peak_bytes <= budget
    assert stats.hits + stats.misses == 3 * 6 + 2 * 6 + 3 * 9
    assert stats.bytes_moved > 0
    assert stats.slot_bytes == 0  # nothing comes and goes any more


def test_what_fits_stays(tmp_path, monkeypatch, no_slack, small_pieces):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    pager = Pager(model, groups_of(model), budget=7 * LAYER)
    pager.attach()
    x = torch.randn(3, 256)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    stats = pager.stats()
    assert stats.resident_bytes == stats.bytes_moved == sum(kernel.pages.values()) >= 6 * LAYER
    assert stats.seconds_moving > 0


class Outer(nn.Module):
    """Uses a parameter of its own around layers that have theirs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.order = [5, 4, 3, 2, 1, 0]

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x * self.scale


@pytest.mark.parametrize("outer", [False, True])
def test_the_order_is_learnt_also_beside_weights_of_the_model_itself(
    tmp_path, monkeypatch, no_slack, small_pieces, outer
):
    _, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    entire = model
    groups = groups_of(model)
    if outer:
        entire = Outer()
        entire.layers = model.layers
        entire.scale = model.layers[2].bias
        groups = [Group("", entire, {"scale": entire.scale}), *groups]
    model.order = [5, 4, 3, 2, 1, 0]
    pager = Pager(entire, groups, budget=3 * LAYER)
    pager.attach()
    x = torch.randn(3, 256)
    for _ in range(2):
        entire(x)
    upcoming = []
    model.layers[3].register_forward_hook(
        lambda *_: upcoming.append(pager._paging._schedule.upcoming(3, again=True))
    )
    entire(x)
    shift = int(outer)
    assert upcoming == [[2 + shift, 1 + shift, 0 + shift]]
    assert kernel.most <= 3 * LAYER


def test_blocks_that_are_called_on_their_own(tmp_path, monkeypatch, no_slack, small_pieces):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    pager = Pager(model, groups_of(model), budget=3 * LAYER)
    pager.attach()
    x = torch.randn(3, 256)
    for _ in range(3):
        for one, other in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(one(x), other(x))
            assert len(pager._paging._schedule._seen) == 1  # nothing piles up
    assert kernel.most <= 3 * LAYER


def test_what_comes_next_is_read_while_a_group_computes(tmp_path, monkeypatch, no_slack):
    _, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    groups = groups_of(model)
    Pager(model, groups, budget=3 * LAYER).attach()
    extents = [
        max(found, key=lambda e: e.nbytes) for found in extents_of([g.tensors.values() for g in groups])
    ]
    model.order = [4, 1, 3]
    present = []

    def look(index):
        def hook(*_):
            following = extents[{4: 1, 1: 3, 3: 4}[index]].pages.data_ptr()
            end = time.monotonic() + 5
            while following not in kernel.pages and time.monotonic() < end:
                time.sleep(0.001)
            present.append(following in kernel.pages)

        return hook

    model(torch.randn(1, 256))  # learns the order
    for index in model.order:
        model.layers[index].register_forward_hook(look(index))
    model(torch.randn(1, 256))
    assert present == [True, True, True]


def test_an_exception_in_the_middle(tmp_path, monkeypatch, no_slack, small_pieces):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    Pager(model, groups_of(model), budget=3 * LAYER).attach()
    x = torch.randn(3, 256)
    for fails_at in (3, 0, None, 5, None):
        model.fails_at = fails_at
        if fails_at is None:
            assert torch.equal(model(x), plain(x))
        else:
            with pytest.raises(ArithmeticError):
                model(x)
    with pytest.raises(RuntimeError, match="shape"):  # inside a group
        model(torch.randn(3, 255))
    assert torch.equal(model(x), plain(x))
    assert kernel.most <= 3 * LAYER


def test_after_an_interrupt_everything_goes_on(tmp_path, monkeypatch, no_slack, small_pieces):
    """PyTorch calls no hooks for it."""
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    pager = Pager(model, groups_of(model), budget=3 * LAYER)
    pager.attach()

    def interrupt(*_):
        raise KeyboardInterrupt

    x = torch.randn(3, 256)
    for _ in range(3):
        handle = model.layers[4].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
    plain.order = model.order = [3, 4, 0]
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    assert pager._paging._schedule.upcoming(3, again=True) == [3, 4, 0]
    assert not pager._paging._open
    assert not +pager._paging._active
    assert kernel.most <= 3 * LAYER


def test_a_hook_that_raises_before_ours(tmp_path, monkeypatch, no_slack):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)

    def refuse(*_):
        raise ArithmeticError("before")

    handle = model.layers[2].register_forward_pre_hook(refuse)
    Pager(model, groups_of(model), budget=3 * LAYER).attach()
    with pytest.raises(ArithmeticError):
        model(torch.randn(3, 256))
    handle.remove()
    x = torch.randn(3, 256)
    assert torch.equal(model(x), plain(x))
    assert kernel.most <= 3 * LAYER


def test_tied_weights_are_read_once_and_stay(tmp_path, monkeypatch, no_slack, small_pieces):
    plain, model = mapped(tmp_path)
    plain.layers[5].weight = plain.layers[0].weight
    model.layers[5].weight = model.layers[0].weight
    groups = groups_of(model)
    kernel = Memory(monkeypatch)
    Pager(model, groups, budget=4 * LAYER).attach()
    x = torch.randn(3, 256)
    assert torch.equal(model(x), plain(x))
    assert kernel.most <= 4 * LAYER
    tied = model.layers[0].weight.data_ptr() + (1 << 17)
    assert any(begin <= tied < begin + size for begin, size in kernel.pages.items())
    assert model.layers[5].weight is model.layers[0].weight


def test_two_models_over_the_same_files(tmp_path, no_slack):
    plain, first = mapped(tmp_path)
    second = load(tmp_path)
    for model in (first, second):
        Pager(model, groups_of(model), budget=2 * LAYER).attach()
    x = torch.randn(3, 256)
    for _ in range(3):
        assert torch.equal(first(x), plain(x))
        assert torch.equal(second(x), plain(x))


def test_threads_that_use_one_model(tmp_path, no_slack):
    plain, model = mapped(tmp_path)
    Pager(model, groups_of(model), budget=3 * LAYER).attach()
    x = torch.randn(3, 256)
    wanted = plain(x)
    equal = []

    def use():
        equal.extend(torch.equal(model(x), wanted) for _ in range(5))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert equal == [True] * 15


def test_an_edit_is_never_lost(tmp_path, no_slack):
    plain, model = mapped(tmp_path, count=4, width=1024)
    Pager(model, groups_of(model), budget=5 * MB).attach()
    x = torch.randn(3, 1024)
    assert torch.equal(model(x), plain(x))
    for each in (plain, model):
        with torch.no_grad():
            each.layers[1].weight[100:105].fill_(0.5)
            each.layers[3].bias.mul_(2)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    assert not torch.equal(load(tmp_path, count=4, width=1024)(x), plain(x))  # the files are as they were


def test_training_needs_the_weights_again(tmp_path, no_slack):
    plain, model = mapped(tmp_path)
    Pager(model, groups_of(model), budget=2 * LAYER).attach()
    x = torch.randn(3, 256)
    for each in (plain, model):
        each(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "accel-pager"]


def wait_until_none_is_alive():
    end = time.monotonic() + 10
    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    return not alive()


def test_the_thread_ends_with_the_model(tmp_path, no_slack):
    _, model = mapped(tmp_path)
    pager = Pager(model, groups_of(model), budget=2 * LAYER)
    pager.attach()
    assert not alive()  # not before the first forward
    model(torch.randn(1, 256))
    assert len(alive()) == 1
    mapping = weakref.ref(memory.mapped_file_of(model.layers[0].weight))
    del model, pager
    gc.collect()
    assert wait_until_none_is_alive()
    gc.collect()
    assert mapping() is None


def test_detach_and_attach(tmp_path, monkeypatch, no_slack):
    plain, model = mapped(tmp_path)
    kernel = Memory(monkeypatch)
    pager = Pager(model, groups_of(model), budget=2 * LAYER)
    x = torch.randn(1, 256)
    for _ in range(2):
        pager.attach()
        pager.attach()  # once is enough
        assert torch.equal(model(x), plain(x))
        pager.detach()
        pager.detach()
        assert wait_until_none_is_alive()
        reads = kernel.reads
        assert torch.equal(model(x), plain(x))
        assert kernel.reads == reads
        assert not model._forward_pre_hooks
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.layers)


def test_copies_and_pickles_have_no_pager(tmp_path, no_slack):
    plain, model = mapped(tmp_path)
    pager = Pager(model, groups_of(model), budget=2 * LAYER)
    pager.attach()
    x = torch.randn(1, 256)
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.layers[0]))):
        assert memory.mapped_file_of(next(other.parameters())) is None
    assert torch.equal(copy.deepcopy(model)(x), plain(x))
    other = copy.deepcopy(pager)
    other.attach()
    other.detach()
    assert other.stats().bytes_moved == 0


@pytest.mark.full
def test_a_compiled_model(tmp_path, no_slack):
    plain, model = mapped(tmp_path)
    pager = Pager(model, groups_of(model), budget=2 * LAYER)
    pager.attach()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(1, 256)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        for _ in range(3):
            assert torch.equal(compiled(x), plain(x))
    stats = pager.stats()
    assert stats.hits + stats.misses == 3 * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_reads_by_a_thread_of_its_own(tmp_path, no_slack):
    plain, model = mapped(tmp_path)
    pager = Pager(model, groups_of(model), budget=2 * LAYER)
    pager.attach()
    torch.set_num_threads(1)
    x = torch.randn(1, 256)
    wanted = plain(x)
    model(x)
    pager._paging._turn.acquire()  # as if another thread decided at this moment
    child = os.fork()
    if child == 0:
        equal = torch.equal(model(x), wanted) and len(alive()) == 1
        os._exit(0 if equal else 3)
    pager._paging._turn.release()
    end = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == (child, 0)
    assert torch.equal(model(x), wanted)


@pytest.mark.wide
def test_the_interpreter_ends_while_the_thread_reads(tmp_path):
    mapped(tmp_path, count=2)
    code = f"""
        import sys, time
        sys.path[:] = {sys.path!r}
        import torch
        from accel_bigmodel.paging import reading
        from accel_bigmodel.streaming.groups import plan_groups
        from accel_bigmodel.paging.pager import Pager
        from testkit.memory import mapped_weights

        state = mapped_weights({str(tmp_path / "0.safetensors")!r})
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        for layer, name in zip(model, ("layers.0.weight", "layers.1.weight")):
            layer.weight.data = state[name]
        slow = []
        begin = state["layers.1.weight"].data_ptr()

        def read(piece):
            if piece.data_ptr() >= begin:
                slow.append(piece)
                time.sleep(60)
            return True

        reading.populate = read
        Pager(model, plan_groups(model, [""]), budget=1 << 30).attach()
        model[0](torch.zeros(1, 256))
        while not slow:
            time.sleep(0.01)
        print("done")
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("missing", ["every call", "reading ahead"])
def test_a_kernel_without_the_calls(tmp_path, monkeypatch, no_slack, missing):
    """As on macOS and Windows, and as before Linux 5.14: pages are touched, and dropping is left to the kernel."""
    # An answer of its own, given back after the call: a thread that lives longer must not keep it for later tests.
    monkeypatch.setattr(reading, "_can_populate", functools.cache(reading._can_populate.__wrapped__))
    real = memory._madvise()
    fake = (
        None if missing == "every call" else lambda a, n, advice: -1 if advice == 22 else real(a, n, advice)
    )
    monkeypatch.setattr(memory, "_madvise", lambda: fake)
    touched = []
    touch = reading._touch
    monkeypatch.setattr(reading, "_touch", lambda pages: (touched.append(pages.numel()), touch(pages)))
    plain, model = mapped(tmp_path)
    Pager(model, groups_of(model), budget=3 * LAYER).attach()
    x = torch.randn(3, 256)
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    assert sum(touched) >= 6 * LAYER


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_forwards_go_on_without_a_thread_that_failed(tmp_path, monkeypatch, no_slack):
    def fail(piece):
        raise MemoryError

    monkeypatch.setattr(reading, "populate", fail)
    plain, model = mapped(tmp_path)
    Pager(model, groups_of(model), budget=3 * LAYER).attach()
    equal = []
    x = torch.randn(3, 256)
    forward = threading.Thread(
        target=lambda: equal.extend(torch.equal(model(x), plain(x)) for _ in range(2)), daemon=True
    )
    forward.start()
    forward.join(30)
    assert equal == [True, True]


def forwards_under_a_limit(folder, budget):
    """Runs in a process of its own."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = load(folder, count=24, width=3072)
    pager = Pager(model, groups_of(model), budget=budget)
    pager.attach()
    x = torch.randn(2, 3072, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [model(x) for _ in range(3)]


@pytest.mark.full
def test_a_model_of_several_times_the_memory_limit(tmp_path):
    if (reason := limits.why_not()) is not None:
        pytest.skip(reason)
    plain, model = mapped(tmp_path, count=24, width=3072)
    size = sum(parameter.nbytes for parameter in model.parameters())
    del model
    os.sync()
    # The interpreter and torch take 160 to 200 MB of memory.
    limit = 300 * MB
    result = limits.call(forwards_under_a_limit, tmp_path, 100 * MB, limit=limit, timeout=200)
    x = torch.randn(2, 3072, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = plain(x)
    assert [torch.equal(output, wanted) for output in result.value] == [True] * 3
    assert size > 2.8 * limit
    assert result.peak < limit  # the kernel had to take nothing


def test_tables_that_are_looked_up_in_are_not_read_as_a_whole(tmp_path, monkeypatch, no_slack):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100_000, 16)
            self.tied = nn.Embedding(500, 16)
            self.head = nn.Linear(16, 500, bias=False)
            self.head.weight = self.tied.weight

        def forward(self, rows):
            return self.head(self.table(rows) + self.tied(rows))

    plain = Lookup()
    save_file(
        {"table.weight": plain.table.weight, "tied.weight": plain.tied.weight}, tmp_path / "file.safetensors"
    )
    model = copy.deepcopy(plain)
    for name, value in mapped_weights(tmp_path / "file.safetensors").items():
        model.get_parameter(name).data = value
    read = []
    populate = reading.populate
    monkeypatch.setattr(reading, "populate", lambda part: read.append(part.numel()) or populate(part))
    pager = Pager(model, plan_groups(model, [""]), budget=4 * MB)
    pager.attach()
    rows = torch.tensor([3, 77, 499])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(rows), plain(rows))
    pager.detach()
    assert 500 * 16 * 4 <= sum(read) < MB


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_row_of_a_table_is_read_alone(tmp_path):
    """By default the kernel reads up to 8 MB around every place that is touched."""

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.head = nn.Linear(64, 1000)

        def forward(self, rows):
            return self.head(self.table(rows))

    model = Lookup()
    save_file(dict(model.state_dict()), tmp_path / "file.safetensors", {"format": "pt"})
    for name, value in mapped_weights(tmp_path / "file.safetensors").items():
        model.get_parameter(name).data = value

    def alone(tensor):
        """What the kernel has noted for the middle of a tensor."""
        place = tensor.data_ptr() + tensor.nbytes // 2
        inside = False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                first = line.split()[0]
                if not first.endswith(":"):
                    begin, end = (int(part, 16) for part in first.split("-"))
                    inside = begin <= place < end
                elif inside and first == "VmFlags:":
                    return "rr" in line.split()
        raise AssertionError

    pager = Pager(model, plan_groups(model, [""]), budget=0)
    pager.attach()
    assert alone(model.table.weight)
    assert not alone(model.head.weight)
    pager.detach()
    assert not alone(model.table.weight)
