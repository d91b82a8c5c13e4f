"""The simulated device: it computes as the CPU does, and notices what a real device would punish."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import attention

from testkit import simulated_device, worlds

pytestmark = pytest.mark.simulated

LATE = 30.0  # seconds; nothing runs before it is waited for


def with_device(function: Callable[..., Any], lateness: float, *args: Any) -> Any:
    simulated_device.use("npu:4")
    torch.npu.set_lateness(lateness)
    return function(*args)


def on_device(
    function: Callable[..., Any] | None = None, *, ranks: int = 1, lateness: float = 0.002
) -> Callable[..., Any]:
    """A test that runs in a process, or in several ranks, with four devices."""
    if function is None:
        return functools.partial(on_device, ranks=ranks, lateness=lateness)

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> None:
        worlds.run(with_device, ranks, functools.partial(function, *args, **kwargs), lateness)

    return test


def device(index: int = 0) -> torch.device:
    return torch.device("npu", index)


# ---- it computes as the CPU does


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norms[2](self.norms[0](self.convolution(x.transpose(1, 2)))).transpose(1, 2).contiguous()
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = nn.functional.gelu(self.norms[1](x))
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x)


@pytest.mark.wide(but=["False-SGD", "True-AdamW"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize("foreach", [False, True])
def test_training_equals_the_cpus_bit_for_bit(optimizer, foreach):
    @on_device
    def run(optimizer, foreach):
        found = []
        for where in (torch.device("cpu"), device()):
            torch.manual_seed(0)
            model = Net().to(where)
            step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, foreach=foreach)
            tokens = (torch.arange(36).reshape(4, 9) * 7 % 11).to(where)
            losses = []
            for _ in range(3):
                with attention.sdpa_kernel(attention.SDPBackend.MATH):  # which is what the device has
                    logits = model(tokens)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                step.step()
                step.zero_grad()
                losses.append(loss.detach())
            found.append([each.cpu() for each in [*losses, *model.state_dict().values()]])
        for cpu, simulated in zip(*found, strict=True):
            assert torch.equal(cpu, simulated)
        assert torch.npu.waiting_operators() == {}

    run(optimizer, foreach)


@on_device
def test_operators_whose_result_has_a_shape_of_its_own():
    x = torch.tensor([3.0, 0.0, 2.0, 0.0, 3.0])
    there = x.to(device())
    assert torch.equal(there.nonzero().cpu(), x.nonzero())
    assert torch.equal(there[there > 1].cpu(), x[x > 1])
    assert torch.equal(there.unique().cpu(), x.unique())
    assert there.max().item() == 3.0
    assert bool((there == there).all())
    assert torch.equal(torch.where(there > 1)[0].cpu(), torch.where(x > 1)[0])


@on_device
def test_results_that_the_caller_gives():
    x = torch.randn(4, 4)
    there = x.to(device())
    out = torch.empty(4, 4, device=device())
    assert torch.mm(there, there, out=out) is out
    assert torch.equal(out.cpu(), x @ x)
    into = torch.empty(0, device=device())
    torch.add(there, 1, out=into)
    assert torch.equal(into.cpu(), x + 1)
    row = torch.zeros(2, 4, device=device())
    torch.sum(there, 0, out=row[1])
    assert torch.equal(row.cpu(), torch.stack([torch.zeros(4), x.sum(0)]))


@on_device
def test_views_share_memory():
    x = torch.zeros(4, 6, device=device())
    x.view(2, 12)[0, 3:5] = 1
    x[2:].t()[1] = 2
    x.unfold(1, 2, 2)[0, 2] = 3
    want = torch.zeros(4, 6)
    want.view(2, 12)[0, 3:5] = 1
    want[2:].t()[1] = 2
    want.unfold(1, 2, 2)[0, 2] = 3
    assert torch.equal(x.cpu(), want)
    y = torch.randn(3, 2, device=device())
    assert torch.equal(torch.view_as_complex(y).real.cpu(), y[:, 0].cpu())
    z = torch.empty(0, device=device()).set_(x.untyped_storage(), 6, (2, 3), (6, 1))
    assert torch.equal(z.cpu(), want[1:3, :3])


@on_device
def test_a_storage_grows_and_shrinks():
    x = torch.arange(4.0, device=device())
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == 0
    x.untyped_storage().resize_(16)
    assert x.isnan().all()
    x.copy_(torch.arange(4.0))
    x.untyped_storage().resize_(32)
    assert x.cpu().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("source", ["cpu", "pinned", "npu:0", "npu:1"])
@pytest.mark.parametrize("target", ["cpu", "pinned", "npu:0"])
def test_copies_between_types_and_layouts(source, target):
    @on_device
    def run(source, target):
        def place(tensor, where):
            return tensor.pin_memory() if where == "pinned" else tensor.to(where)

        for cast in (torch.float32, torch.float64, torch.int32):
            for layout in ("same", "transposed", "strided", "expanded"):
                for late in (False, True):
                    x = torch.arange(12.0).reshape(3, 4)
                    given = place({"expanded": x[:1]}.get(layout, x), source)
                    if layout == "transposed":
                        given = place(x.t().contiguous(), source).t()
                    into = place(torch.zeros(3, 4, dtype=cast), target)
                    if layout == "strided":
                        into = place(torch.zeros(3, 8, dtype=cast), target)[:, ::2]
                    into.copy_(given, non_blocking=late)
                    torch.accelerator.synchronize(0)
                    torch.accelerator.synchronize(1)
                    want = (x[:1].expand(3, 4) if layout == "expanded" else x).to(cast)
                    assert torch.equal(into.cpu(), want), (cast, layout, late)

    run(source, target)


@on_device
def test_autocast_has_torchs_policies():
    x = torch.randn(4, 4, device=device())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("npu", dtype=dtype):
            assert (x @ x).dtype == dtype
            assert (x @ x).softmax(0).dtype == torch.float32
            with pytest.raises(RuntimeError, match="unsafe under autocast"):
                nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())


@on_device
def test_loss_scaling():
    scaler = torch.amp.GradScaler("npu", init_scale=4.0, growth_interval=1)
    x = torch.ones(2, device=device(), requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (x.tolist(), scaler.get_scale()) == ([0, 0], 8.0)
    scaler.scale((x / 0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


# ---- devices


@on_device
def test_devices_and_their_context():
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == 4
    with torch.npu.device(1):
        assert torch.empty(1, device="npu").device == device(1)
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal 4: there are 4 devices"):
        torch.accelerator.set_device_index(4)


@on_device
def test_tensors_of_two_devices_do_not_meet():
    here, there, host = torch.ones(2, device=device(0)), torch.ones(2, device=device(1)), torch.ones(2)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]
    assert here[torch.tensor([1])].tolist() == [1]
    assert (here + there.to(device(0))).tolist() == [2, 2]


@on_device
def test_a_forked_process_cannot_use_the_device():
    torch.ones(1, device=device())
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device=device())
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def script(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [*sys.path, str(simulated_device.METADATA)]
    environment = os.environ | {"SIMULATED_DEVICE": "npu:1", "PYTHONPATH": os.pathsep.join(paths)} | variables
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)


def test_the_host_cannot_touch_device_memory():
    ended = script("import torch, ctypes; ctypes.string_at(torch.ones(2, device='npu').data_ptr(), 4)")
    assert ended.returncode == -signal.SIGSEGV
    assert "host code touched memory of simulated device 0" in ended.stderr


@pytest.mark.wide
def test_what_nobody_asked_for_fails_the_process_at_its_end():
    ended = script(
        "import torch; torch.npu.set_lateness(9); x = torch.zeros(2, device='npu'); x[torch.tensor([5], device='npu')]"
    )
    assert ended.returncode == 1
    assert "the device failed after this call was queued" in ended.stderr
    assert "<string>:1 in <module>" in ended.stderr


@pytest.mark.wide
def test_a_wrong_name_of_the_device():
    ended = script("import torch", SIMULATED_DEVICE="npu=2")
    assert (
        "SIMULATED_DEVICE is 'npu=2'; expected a type and a number of devices, such as npu:2" in ended.stderr
    )


# ---- it is late


@on_device(lateness=LATE)
def test_nothing_runs_before_it_is_waited_for():
    began = time.monotonic()
    x = torch.ones(4, device=device())
    done = torch.Event()
    done.record()
    assert not done.query()
    assert not torch.accelerator.current_stream().query()
    assert x.sum().item() == 4
    assert done.query()
    assert time.monotonic() - began < LATE / 2


@on_device(lateness=0.3)
def test_what_nobody_waits_for_runs_at_last():
    x = torch.ones(4, device=device())
    done = torch.Event()
    done.record()
    began = time.monotonic()
    while not done.query():
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    assert time.monotonic() - began > 0.1
    assert x.sum().item() == 4


@on_device(lateness=LATE)
def test_events_measure_time():
    first, second = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
    first.record()
    torch.ones(100, 100, device=device()) @ torch.ones(100, 100, device=device())
    second.record()
    with pytest.raises(RuntimeError, match=r"(?i)both events must be"):
        first.elapsed_time(second)
    second.synchronize()
    assert 0 < first.elapsed_time(second) < 10_000


@on_device
def test_an_error_of_the_caller_comes_at_once_and_one_of_a_kernel_later():
    x = torch.ones(2, 3, device=device())
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|reduction dim"):
        x @ x
    bad = x[torch.tensor([7], device=device())]
    with pytest.raises(
        RuntimeError, match=r"(?s)the device failed after this call.*out of bounds.*test_simulated_device"
    ):
        bad.cpu()
    assert x.sum().item() == 6


# ---- memory


@on_device
def test_new_memory_is_not_a_number():
    assert torch.empty(5, device=device()).isnan().all()
    x = torch.ones(5, device=device())
    at = x.data_ptr()
    del x
    y = torch.empty(5, device=device())
    assert y.data_ptr() == at
    assert y.isnan().all()


@on_device
def test_statistics_and_running_out_of_memory():
    torch.npu.set_capacity(1 << 20)
    assert torch.npu.mem_get_info() == (1 << 20, 1 << 20)
    kept = torch.empty(1 << 17, device=device())
    assert torch.accelerator.memory_allocated() == 1 << 19
    x = torch.empty(1 << 16, device=device())
    del x
    assert torch.accelerator.max_memory_allocated() == (1 << 19) + (1 << 18)
    assert torch.accelerator.memory_reserved() == (1 << 19) + (1 << 18)
    y = torch.empty(3 << 15, device=device())  # fits, since what is only cached is given back first
    assert torch.accelerator.memory_reserved() == (1 << 19) + (3 << 17)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"simulated device 0 is out of memory\. Tried to allocate 1048576"
    ):
        torch.empty(1 << 18, device=device())
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    del y, kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0
    assert torch.accelerator.memory_allocated(1) == 0


@on_device
def test_data_of_a_tensor_may_be_forbidden_to_change_its_device():
    x = torch.nn.Parameter(torch.ones(2))
    torch.npu.allow_set_data(False)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.ones(2, device=device())
    torch.npu.allow_set_data(True)
    x.data = torch.ones(2, device=device())
    assert x.device == device()


# ---- random numbers


@on_device
def test_random_states():
    torch.manual_seed(3)
    first = [torch.randn(4, device=device()), torch.randn(4, device=device())]
    assert not torch.equal(*first)
    state = torch.npu.get_rng_state()
    second = torch.rand(4, device=device())
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device()), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=device()), first[0])
    assert torch.equal(
        torch.randn(4, device=device(1)).cpu(), first[0].cpu()
    )  # each device from the same seed
    with torch.random.fork_rng(device_type="npu"):
        torch.randn(4, device=device())
    assert torch.equal(torch.randn(4, device=device()), first[1])
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device=device(), generator=torch.Generator())
    mine = torch.Generator("npu").manual_seed(3)
    assert torch.equal(torch.randn(4, device=device(), generator=mine), first[0])
    host = torch.get_rng_state()
    nn.functional.dropout(torch.ones(9, device=device()))
    torch.randperm(9, device=device())
    torch.ones(9, device=device()).multinomial(2)
    assert torch.equal(torch.get_rng_state(), host)


@on_device
def test_random_numbers_depend_on_the_calls_not_on_the_streams():
    def draw(late):
        torch.npu.set_lateness(late)
        torch.manual_seed(0)
        side = torch.Stream()
        with side:
            first = torch.rand(3, device=device())
        second = torch.rand(3, device=device())
        torch.accelerator.current_stream().wait_stream(side)
        return torch.stack([first, second]).cpu()

    assert torch.equal(draw(0), draw(0.05))


@on_device
def test_dropout_keeps_the_mean():
    x = torch.ones(10_000, device=device(), requires_grad=True)
    y = nn.functional.dropout(x, 0.25)
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


# ---- what is out of order


def raises_race(what: str) -> Any:
    return pytest.raises(RuntimeError, match=rf"(?s)unordered access to memory: .*{what}")


@pytest.mark.parametrize("order", ["event", "stream", "synchronize", "host"])
def test_streams_that_wait_for_each_other(order):
    @on_device(lateness=LATE)
    def run(order):
        x, side = torch.zeros(4, device=device()), torch.Stream()
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            x += 1
            done = torch.Event()
            done.record()
        if order == "event":
            main.wait_event(done)
        elif order == "stream":
            main.wait_stream(side)
        elif order == "synchronize":
            torch.accelerator.synchronize()
        else:
            done.synchronize()
        assert (x * 2).tolist() == [2] * 4
        assert torch.npu.races() == []

    run(order)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("write", "read", "reads.*writes"),
        ("read", "write", "writes.*reads"),
        ("write", "write", "(reads|writes).*writes"),
    ],
)
def test_streams_that_do_not_wait(first, second, words):
    @on_device(lateness=0)
    def run(first, second, words):
        x, side = torch.zeros(4, device=device()), torch.Stream()
        side.wait_stream(torch.accelerator.current_stream())

        def act(what):
            if what == "write":
                x.fill_(1)
            else:
                x.sum()

        with side:
            act(first)
        time.sleep(0.05)  # they do not meet, and yet
        with raises_race(words) as found:
            act(second)
        places = str(found.value).split("Second:")
        assert all("test_simulated_device.py" in place and "in act" in place for place in places)
        assert len(torch.npu.races()) == 1

    run(first, second, words)


@on_device
def test_streams_may_use_parts_of_one_block_and_read_the_same():
    x, side = torch.zeros(8, device=device()), torch.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x[:4] = 1
        y = x[:4] + 1
    x[4:] = 2
    with raises_race("reads"):
        x.sum()
    torch.accelerator.current_stream().wait_stream(side)
    assert x.sum().item() == 12
    assert y.sum().item() == 8


@on_device
def test_an_event_that_is_recorded_too_early_orders_nothing():
    x, side, done = torch.zeros(4, device=device()), torch.Stream(), torch.Event()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        done.record()
        x += 1
    torch.accelerator.current_stream().wait_event(done)
    with raises_race("reads"):
        x.sum()


@pytest.mark.parametrize("safe", ["nothing", "record", "wait"])
def test_memory_that_is_freed_while_another_stream_uses_it(safe):
    @on_device(lateness=LATE)
    def run(safe):
        main, side = torch.accelerator.current_stream(), torch.Stream()
        x = torch.ones(1000, device=device())
        side.wait_stream(main)
        with side:
            y = x * 2
        if safe == "record":
            x.record_stream(side)
        del x
        if safe == "wait":
            main.wait_stream(side)
        if safe == "nothing":
            with raises_race("frees memory that"):
                torch.zeros(3, device=device())  # of another size, so that nothing was lost this time
            return
        z = torch.zeros(1000, device=device())
        main.wait_stream(side)
        assert y.sum().item() == 2000
        assert z.sum().item() == 0

    run(safe)


@on_device(lateness=LATE)
def test_a_recorded_block_is_not_given_away_before_its_stream_is_done():
    main, side = torch.accelerator.current_stream(), torch.Stream()
    x = torch.ones(1000, device=device())
    at = x.data_ptr()
    side.wait_stream(main)
    with side:
        x * 2
    x.record_stream(side)
    del x
    assert torch.zeros(1000, device=device()).data_ptr() != at
    side.synchronize()
    assert torch.zeros(1000, device=device()).data_ptr() == at


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("direction", ["to", "from"])
def test_the_host_uses_pinned_memory_that_a_copy_needs(direction, waits):
    @on_device(lateness=LATE)
    def run(direction, waits):
        host = torch.ones(10_000).pin_memory()
        there = torch.zeros(10_000, device=device())
        (there if direction == "to" else host).copy_(host if direction == "to" else there, non_blocking=True)
        assert torch.npu.counts()[
            f"{direction.replace('from', 'to')}_{'device' if direction == 'to' else 'host'}_async"
        ]
        if waits:
            torch.accelerator.current_stream().synchronize()
        if direction == "to":
            assert host[0] == 1  # it may be read
            host[5000] = 7
        else:
            float(host[5000])
        if waits:
            torch.accelerator.synchronize()
            return
        with raises_race("the host (uses|overwrites) pinned memory"):
            torch.accelerator.synchronize()

    run(direction, waits)


@on_device(lateness=LATE)
def test_other_bytes_of_a_pinned_page_are_free():
    host = torch.ones(1000).pin_memory()
    there = torch.zeros(500, device=device())
    there.copy_(host[:500], non_blocking=True)
    host[500:] = 3
    torch.accelerator.synchronize()
    assert there.sum().item() == 500


@on_device(lateness=LATE)
def test_pinned_memory_lives_until_its_copy_is_done():
    there = torch.empty(1000, device=device())
    there.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
    other = torch.zeros(1000).pin_memory()
    assert there.sum().item() == 1000
    assert other.sum() == 0


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_its_allocator_cannot_keep(waits):
    @on_device(lateness=LATE)
    def run(waits):
        there = torch.empty(100, device=device())
        block = torch.ones(1000).pin_memory()
        part = torch.frombuffer(memoryview(block.numpy()), dtype=torch.float32)[500:600]
        there.copy_(part, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        del part, block
        gc.collect()
        if waits:
            torch.accelerator.synchronize()
            return
        with raises_race("pinned memory is freed while a copy may still use it"):
            torch.accelerator.synchronize()

    run(waits)


@on_device
def test_pageable_memory_is_copied_at_once():
    there = torch.empty(1000, device=device())
    host = torch.ones(1000)
    there.copy_(host, non_blocking=True)
    host.zero_()
    assert there.sum().item() == 1000
    assert torch.npu.counts()["to_device_async"] == 0
    assert torch.npu.counts()["to_device_sync"] == 4000


@on_device
def test_races_may_be_listed_instead():
    torch.npu.raise_races(False)
    x, side = torch.zeros(4, device=device()), torch.Stream()
    with side:
        x += 1
    assert len(torch.npu.races()) == 1
    torch.npu.forget_races()
    assert torch.npu.races() == []
    torch.npu.raise_races(True)
    torch.accelerator.synchronize()


# ---- collectives


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_equal_gloos(ranks):
    @on_device(ranks=ranks)
    def run():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("cpu:gloo,npu:hccl")
        found: dict[str, list[torch.Tensor]] = {}
        for kind in ("cpu", "npu"):
            here = torch.device("cpu") if kind == "cpu" else device(rank)
            x = (torch.arange(8.0) * (rank + 1)).to(here)
            results = found.setdefault(kind, [])
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
                y = x.clone()
                dist.all_reduce(y, op)
                results.append(y)
            y = x.clone()
            dist.broadcast(y, 1)
            results.append(y)
            y = x.clone()
            dist.reduce(y, 1)
            results += [y] if rank == 1 else []
            parts = [torch.zeros_like(x) for _ in range(size)]
            dist.all_gather(parts, x)
            results += parts
            whole = torch.zeros(8 * size, device=here)
            dist.all_gather_into_tensor(whole, x)
            results.append(whole)
            part = torch.zeros(8 // size, device=here)
            dist.reduce_scatter_tensor(part, x)
            results.append(part)
            y = torch.zeros_like(x)
            dist.all_to_all_single(y, x)
            results.append(y)
            parts = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
            dist.gather(x, parts, 0)
            results += parts or []
            y = torch.zeros_like(x)
            dist.scatter(y, [x * k for k in range(size)] if rank == 0 else None, 0)
            results.append(y)
            y = torch.zeros_like(x)
            ahead, behind = (rank + 1) % size, (rank - 1) % size
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, ahead), dist.P2POp(dist.irecv, y, behind)]
            ):
                work.wait()
            results.append(y)
            dist.barrier()
        for cpu, simulated in zip(*found.values(), strict=True):
            assert torch.equal(cpu, simulated.cpu())
        x = torch.full((8,), float(rank + 1), device=device(rank))
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [(size + 1) / 2] * 8
        parts = [torch.zeros(2, device=device(rank)) for _ in range(size)]
        dist.all_to_all(parts, [torch.full((2,), 10.0 * rank + k, device=device(rank)) for k in range(size)])
        assert [part[0].item() for part in parts] == [10.0 * k + rank for k in range(size)]
        dist.destroy_process_group()

    run()


@on_device(ranks=2, lateness=0.2)
def test_a_collective_that_is_not_waited_for():
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    x = torch.ones(4, device=device(rank))
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    with raises_race("reads"):
        x.sum()
    before = torch.npu.counts()["synchronizations"]
    work.wait()
    assert torch.npu.counts()["synchronizations"] == before  # the stream waits, not the host
    assert x.sum().item() == 8
    dist.destroy_process_group()


@on_device(ranks=2)
def test_the_future_of_a_collective():
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    x = torch.ones(4, device=device(rank))
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().tolist() == [4] * 4
    dist.destroy_process_group()


@on_device(ranks=4)
def test_a_group_is_split():
    rank = int(os.environ["RANK"])
    here = device(rank)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", device_id=here)
    group = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    for place in (here, torch.device("cpu")):
        x = torch.full((2,), float(rank), device=place)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0 if rank in (0, 2) else 4.0] * 2
    mesh = init_device_mesh("npu", (2, 2))  # splits, since the group is bound to a device
    x = torch.full((2,), float(rank), device=here)
    dist.all_reduce(x, group=mesh.get_group(1))
    assert x.tolist() == [1.0 if rank < 2 else 5.0] * 2
    dist.destroy_process_group()


@on_device(ranks=2)
def test_a_collective_that_another_rank_never_joins_is_aborted():
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    if rank == 1:
        return
    dist.all_reduce(torch.ones(4, device=device(rank)), async_op=True)
    dist.group.WORLD.abort()
    with pytest.raises(RuntimeError, match="allreduce: the process group was aborted"):
        torch.accelerator.synchronize()


@on_device
def test_a_batch_norm_that_does_not_train():
    x = torch.randn(3, 4)
    norm = nn.BatchNorm1d(4).eval()
    expected = norm(x)
    assert torch.equal(norm.to(device())(x.to(device())).cpu(), expected)
