"""The engine, over a device that is ordinary memory and a copy queue that is a thread."""

import copy
import inspect
import time
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import random_unstructured

from accel_bigmodel import DeviceMapError, OffloadError
from accel_bigmodel.streaming.groups import plan_groups
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import HostTransfer
from testkit.streamed import BLOCK_BYTES, SIZE, Block, Model, Tied, same, x

# Results and places


def test_outputs_are_equal_and_weights_come_home(attach):
    attached = attach(Model())
    for _ in range(3):
        attached.check(x())


def test_weights_are_in_slots_while_the_module_runs(attach):
    attached = attach(Model(blocks=6))
    attached.check(x())
    attached.check(x())
    homes = set(attached.homes.values())
    seen = [address for block in attached.model.blocks for address in block.seen]
    assert len(seen) == 12
    assert homes.isdisjoint(seen)


def test_slots_are_used_again(attach):
    attached = attach(Model(blocks=9), prefetch=2)
    for _ in range(3):
        attached.check(x())
    seen = {address for block in attached.model.blocks for address in block.seen}
    assert len(seen) == 3
    assert attached.stats.slot_bytes == attached.stats.peak_bytes == 3 * BLOCK_BYTES


def test_parameters_keep_their_identity(attach):
    model = Model()
    before = list(model.parameters())
    attached = attach(model)
    attached.check(x())
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_mode_of_autograd_and_from_one_to_another(attach, context):
    attached = attach(Model())
    with torch.no_grad():
        expected = attached.plain(x())
    for _ in range(2):
        with context():
            assert torch.equal(attached.model(x()), expected)
        attached.check(x())
    attached.check_home()


def test_parameters_made_in_inference_mode(attach):
    with torch.inference_mode():
        model = Model()
        attached = attach(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(attached.model(x()), attached.plain(x()))


def test_the_first_forward_is_expected_to_go_as_the_modules_are_listed(attach):
    attached = attach(Model(blocks=5))
    attached.check(x())
    assert (attached.stats.hits, attached.stats.misses) == (5, 0)


def test_the_second_forward_is_predicted(attach):
    model = Model(blocks=5)
    model.order = [4, 2, 0, 3, 1]
    attached = attach(model)
    attached.check(x())
    misses = attached.stats.misses
    assert misses > 0
    attached.check(x())
    assert attached.stats.misses == misses


def test_what_was_asked_for_by_mistake_holds_nothing_up(attach):
    copied = []
    model = Model(blocks=8)
    model.order = [7]
    plain = copy.deepcopy(model)
    transfer = HostTransfer(lambda name: (copied.append(name), time.sleep(0.02)))
    streamer = Streamer(model, plan_groups(model, [""]), transfer, prefetch=4)
    streamer.attach()
    with torch.no_grad():
        same(model(x()), plain(x()))
    streamer.detach()
    # What had begun is finished, what waited in the queue is not begun.
    assert copied[-1] == "blocks.7"
    assert len(copied) <= 2


def test_without_moving_ahead(attach):
    attached = attach(Model(), prefetch=0)
    attached.check(x())
    attached.check(x())
    assert (attached.stats.hits, attached.stats.misses) == (0, 8)
    assert attached.stats.peak_bytes == BLOCK_BYTES


def test_prefetch_is_not_negative():
    with pytest.raises(ValueError, match="prefetch=-1 must be 0 or more"):
        Streamer(Model(), [], HostTransfer(), prefetch=-1)


def test_bytes_are_counted(attach):
    attached = attach(Model(blocks=4))
    attached.check(x())
    payload = 4 * (SIZE * SIZE * 4 + 2 * SIZE * 4)
    stats = attached.stats
    assert stats.bytes_moved == payload
    assert stats.seconds_moving > 0
    assert stats.rate == stats.bytes_moved / stats.seconds_moving


def test_copies_run_beside_the_computation(attach):
    attached = attach(Model(blocks=4), before_copy=lambda name: time.sleep(0.1))
    attached.check(x())
    assert attached.stats.seconds_waited > 0.3
    before = attached.stats.seconds_waited
    for block in attached.model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(0.15))
    attached.check(x())
    # Only the first group is waited for; the sleeps of the hooks hide the other copies.
    assert attached.stats.seconds_waited - before < 0.3


def test_memory_formats_and_odd_tensors(attach):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.spread = nn.Parameter(torch.randn(1, 4).expand(3, 4))
            self.slanted = nn.Parameter(torch.randn(6, 4)[::2].t())
            self.strides = []

        def forward(self, image):
            self.strides.append(self.conv.weight.stride())
            out = self.conv(image) * self.scalar
            return out, self.short * 2, self.empty.sum(), self.spread * 3, self.slanted + 1

    attached = attach(nn.Sequential(Odd(), nn.Identity()))
    attached.check(torch.randn(1, 3, 5, 5))
    assert attached.model[0].strides[0] == attached.plain[0].conv.weight.stride()


# Direct calls, shared modules, nesting


def test_direct_calls_of_blocks_and_of_forward(attach):
    attached = attach(Model())
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(attached.model.blocks[1](x()), attached.plain.blocks[1](x()))
            assert torch.equal(attached.model.forward(x()), attached.plain.forward(x()))
            assert torch.equal(attached.model.blocks[2].forward(x()), attached.plain.blocks[2](x()))
            attached.check_home()


def test_signature_is_that_of_the_forward(attach):
    attached = attach(Model())
    assert list(inspect.signature(attached.model.forward).parameters) == ["x"]
    assert list(inspect.signature(attached.model.blocks[0].forward).parameters) == ["x"]


def test_a_module_that_is_called_several_times_is_copied_once_in_a_row(attach):
    model = Model(blocks=3)
    model.order = [0, 0, 0, 1, 2, 2]
    attached = attach(model)
    attached.check(x())
    attached.check(x())
    before = attached.stats
    attached.check(x())
    assert attached.stats.bytes_moved - before.bytes_moved == 3 * (SIZE * SIZE * 4 + 2 * SIZE * 4)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 4)

    def forward(self, x, depth=2):
        x = x @ self.weight
        if depth:
            x = self(x, depth=depth - 1) + x @ self.weight
        return x


def test_a_module_that_calls_itself(attach):
    attached = attach(nn.Sequential(Recursive(), Recursive()), budget=SIZE * SIZE * 4)
    attached.check(x())
    attached.check(x())


class Towers(nn.Module):
    """A parameter beside blocks is a group around theirs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.blocks = Model().blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def test_groups_around_others_stay(attach):
    attached = attach(Towers())
    with torch.no_grad():
        same(attached.model(x()), attached.plain(x()))
    assert attached.stats.resident_bytes == 512
    assert attached.model.scale.data_ptr() != attached.homes["scale"]
    attached.streamer.detach()
    attached.check_home()


class Caller(nn.Module):
    """Calls a module that is registered elsewhere, and shares a weight with it."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.linear.weight
        self.own = nn.Parameter(torch.randn(SIZE))
        self.others = [other]

    def forward(self, x):
        before = self.weight.data_ptr()
        x = self.others[0](x @ self.weight) + self.own
        assert self.weight.data_ptr() == before
        return x @ self.weight


def test_tied_weights_of_groups_that_run_at_one_time(attach):
    model = nn.Module()
    model.block, model.caller = Block(), None
    model.caller = Caller(model.block)
    model.last = Block()
    model = Chain(model.caller, model.last, model.block)
    attached = attach(model)
    for _ in range(3):
        attached.check(x())
    assert attached.model[0].weight is attached.model[2].linear.weight


class Chain(nn.Sequential):
    pass


def test_tied_weights_are_copied_once_where_they_are_in_use(attach):
    block = Block()
    attached = attach(Chain(Caller(block), block), prefetch=0)
    with torch.no_grad():
        attached.model[0](x())
    weight, vector = SIZE * SIZE * 4, SIZE * 4
    assert attached.stats.bytes_moved == (weight + vector) + 2 * vector


def test_tied_weights_of_groups_that_follow_each_other(attach):
    attached = attach(Tied())
    for _ in range(3):
        attached.check(torch.tensor([[1, 2, 6]]))
    assert attached.model.head.weight is attached.model.embed.weight


def test_results_that_are_weights_do_not_change_later(attach):
    class Table(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.table = nn.Parameter(torch.full((SIZE,), float(value)))

        def forward(self, kind):
            if kind == "whole":
                return self.table
            if kind == "dict":
                return {"part": self.table[:3], "list": [self.table[3:], 1], "none": None}
            return self.table[:4], (self.table.view(4, 4), "text")

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(Table(n) for n in range(4))

        def forward(self, kind):
            return [table(kind) for table in self.tables]

    attached = attach(Tables(), prefetch=0)
    for kind in ("whole", "dict", "tuple"):
        attached.check(kind)


# Order


def test_another_order_is_right_and_learnt(attach):
    attached = attach(Model(blocks=6))
    attached.check(x())
    attached.check(x())
    for order in ([5, 4, 3, 2, 1, 0], [0, 3, 3, 1], [2]):
        attached.model.order = attached.plain.order = order
        attached.check(x())
        before = attached.stats
        attached.check(x())
        assert attached.stats.misses == before.misses
        assert attached.stats.hits == before.hits + len(order)


class Routed(nn.Module):
    """Experts of which the data choose one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.gate = nn.Linear(SIZE, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            out[chosen == number] = self.experts[number](x[chosen == number])
        return x + out


def test_routing_by_the_data(attach):
    attached = attach(nn.Sequential(*(Routed() for _ in range(3))))
    assert "1.experts.2" in [group.name for group in attached.groups]
    for seed in range(6):
        attached.check(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)))


# Budgets


def test_everything_stays_if_it_fits(attach):
    attached = attach(Model(), budget=4 * BLOCK_BYTES)
    with torch.no_grad():
        same(attached.model(x()), attached.plain(x()))
    stats = attached.stats
    assert (stats.resident_bytes, stats.slot_bytes, stats.bytes_moved) == (4 * BLOCK_BYTES, 0, 0)
    assert not any("forward" in module.__dict__ for module in attached.model.modules())
    attached.streamer.detach()
    attached.check_home()


def test_a_budget_for_some(attach):
    attached = attach(Model(blocks=8), budget=6 * BLOCK_BYTES, prefetch=2)
    with torch.no_grad():
        for _ in range(3):
            same(attached.model(x()), attached.plain(x()))
    resident = [
        number
        for number, block in enumerate(attached.model.blocks)
        if block.scale.data_ptr() != attached.homes[f"blocks.{number}.scale"]
    ]
    assert resident == [0, 2, 5]
    assert attached.stats.peak_bytes == 6 * BLOCK_BYTES


@pytest.mark.parametrize("slots", [1, 2])
def test_a_budget_for_few_slots(attach, slots):
    attached = attach(Model(), budget=slots * BLOCK_BYTES + 511)
    for _ in range(3):
        attached.check(x())
    assert attached.stats.peak_bytes == slots * BLOCK_BYTES
    # With one slot only the first group is there ahead.
    assert attached.stats.misses == (9 if slots == 1 else 0)


def test_a_budget_for_nothing_names_the_group_and_what_it_takes():
    model = Model()
    model.blocks[2] = Block(2 * SIZE)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    streamer = Streamer(model, plan_groups(model, [""]), HostTransfer(), budget=5000)
    with pytest.raises(DeviceMapError, match=r"5,000 bytes.*'blocks\.2' \(5,120 bytes\).*takes 5,120 bytes"):
        streamer.attach()
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_groups_that_run_inside_others_beyond_the_budget_are_named(attach):
    block = Block()
    model = Chain(Caller(block), Block(), block)
    attached = attach(model, budget=BLOCK_BYTES, prefetch=1)
    with pytest.raises(
        OffloadError, match=r"weights of '2' take 2,048 bytes.*those of '0', whose forward calls it"
    ):
        attached.model(x())
    attached.check_home()


class Small(HostTransfer):
    """A device that has little memory."""

    def __init__(self, nbytes):
        super().__init__()
        self.left = nbytes

    def allocate(self, nbytes):
        if nbytes > self.left:
            raise torch.OutOfMemoryError(f"{nbytes} bytes are not there")
        self.left -= nbytes
        memory = super().allocate(nbytes)
        weakref.finalize(memory, self._free, nbytes)
        return memory

    def _free(self, nbytes):
        self.left += nbytes


@pytest.mark.parametrize("slots", [1, 2])
def test_a_device_with_less_memory_than_planned(slots):
    model = Model()
    plain = copy.deepcopy(model)
    streamer = Streamer(model, plan_groups(model, [""]), Small(slots * BLOCK_BYTES))
    streamer.attach()
    with torch.no_grad():
        for _ in range(3):
            same(model(x()), plain(x()))
    assert streamer.stats().slot_bytes == slots * BLOCK_BYTES
    streamer.detach()


def test_a_device_without_memory():
    model = Model()
    streamer = Streamer(model, plan_groups(model, [""]), Small(BLOCK_BYTES - 1))
    streamer.attach()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="2048 bytes are not there"):
            model(x())
    streamer.detach()
    model(x())


def test_a_device_without_memory_for_what_stays():
    model = Model()
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    streamer = Streamer(model, plan_groups(model, [""]), Small(2 * BLOCK_BYTES), budget=1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        streamer.attach()
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_weights_from_which_hooks_compute_before_the_forward_stay_on_the_device(attach):
    model = Model().requires_grad_(False)
    random_unstructured(model.blocks[1].linear, "weight", amount=0.5)
    attached = attach(model)
    attached.homes = {name: tensor.data_ptr() for name, tensor in attached.weights()}
    attached.check(x())
    assert attached.stats.resident_bytes == BLOCK_BYTES
