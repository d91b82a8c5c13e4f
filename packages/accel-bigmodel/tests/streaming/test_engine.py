"""The engine, over a device that is ordinary memory and a copy queue that is a thread."""

import copy
import inspect
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from accel_bigmodel import DeviceMapError, OffloadError
from accel_bigmodel.streaming.engine import Streamer
from accel_bigmodel.streaming.groups import Group, plan_groups
from accel_bigmodel.streaming.transfer import HostTransfer

SIZE = 16


class Block(nn.Module):
    """Notes, while it runs, where its weights are."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.randn(size))
        self.seen = []
        self.fail = None

    def forward(self, x):
        self.seen.append(self.linear.weight.data_ptr())
        if self.fail is not None:
            raise self.fail
        return torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    def __init__(self, blocks=4, size=SIZE):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.order = list(range(blocks))

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


BLOCK_BYTES = 512 * 4  # weight of 1024 bytes, bias and scale of 64 each, aligned to 512


class Attached:
    """A model, an equal one that nothing is attached to, and an engine."""

    def __init__(self, model, *, streamed=("",), offload_buffers=False, before_copy=None, **options):
        self.plain = copy.deepcopy(model)
        self.model = model
        self.homes = {name: tensor.data_ptr() for name, tensor in self.weights()}
        self.groups = plan_groups(model, streamed, offload_buffers=offload_buffers)
        self.streamer = Streamer(model, self.groups, HostTransfer(before_copy), **options)
        self.streamer.attach()

    def weights(self):
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def check(self, *inputs, **options):
        with torch.no_grad():
            expected = self.plain(*inputs, **options)
            found = self.model(*inputs, **options)
        same(found, expected)
        self.check_home()
        return found

    def check_home(self):
        assert {name: tensor.data_ptr() for name, tensor in self.weights()} == self.homes
        for (name, tensor), (_, other) in zip(
            [*self.plain.named_parameters(), *self.plain.named_buffers()], self.weights(), strict=True
        ):
            assert torch.equal(tensor, other), name

    @property
    def stats(self):
        return self.streamer.stats()


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@pytest.fixture
def attach():
    made = []

    def make(model, **options):
        made.append(Attached(model, **options))
        return made[-1]

    yield make
    for attached in made:
        attached.streamer.detach()


def x(rows=3, size=SIZE):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(7))


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


def test_the_second_forward_is_predicted(attach):
    attached = attach(Model(blocks=5))
    attached.check(x())
    assert (attached.stats.hits, attached.stats.misses) == (0, 5)
    attached.check(x())
    assert (attached.stats.hits, attached.stats.misses) == (5, 5)


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
    attached = attach(Model(blocks=4), before_copy=lambda name: time.sleep(0.05))
    attached.check(x())
    assert attached.stats.seconds_waited > 0.15
    before = attached.stats.seconds_waited
    for block in attached.model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(0.06))
    attached.check(x())
    # Only the first group is waited for; the sleeps of the hooks hide the other copies.
    assert attached.stats.seconds_waited - before < 0.15


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
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, SIZE)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(SIZE, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

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


# What users change


def test_changes_between_forwards_are_seen(attach):
    attached = attach(Model())
    attached.check(x())
    for model in (attached.model, attached.plain):
        with torch.no_grad():
            model.blocks[0].linear.weight.mul_(2)
            model.blocks[1].scale.data += 1
        model.blocks[2].load_state_dict(
            Block().state_dict() | {"scale": torch.full((SIZE,), 3.0)}, strict=False
        )
    state = attached.plain.blocks[2].state_dict()
    attached.model.blocks[2].load_state_dict(state)
    attached.check(x())


def test_changes_between_two_uses_in_one_forward_are_seen(attach):
    model = Model(blocks=3)
    attached = attach(model)
    attached.check(x())

    def double(module, args):
        other = double_of[module]
        with torch.no_grad():
            other.scale.mul_(2)

    double_of = {one.blocks[0]: one.blocks[1] for one in (attached.model, attached.plain)}
    for block in double_of:
        block.register_forward_hook(lambda module, args, out: double(module, args))
    attached.check(x())


def test_new_data_and_new_parameters_are_seen(attach):
    attached = attach(Model())
    attached.check(x())
    for model in (attached.model, attached.plain):
        torch.manual_seed(3)
        model.blocks[1].scale.data = torch.randn(SIZE)
        model.blocks[2].linear.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        model.blocks[3].linear = model.blocks[3].linear.double().float()
    attached.homes = {name: tensor.data_ptr() for name, tensor in attached.weights()}
    attached.check(x())
    attached.model.half()
    attached.plain.half()
    attached.homes = {name: tensor.data_ptr() for name, tensor in attached.weights()}
    attached.check(x().half())
    attached.model.double()
    attached.plain.double()
    attached.homes = {name: tensor.data_ptr() for name, tensor in attached.weights()}
    attached.check(x().double())


def test_a_removed_parameter_is_named(attach):
    attached = attach(Model())
    attached.model.blocks[1].scale = None
    with pytest.raises(OffloadError, match=r"'blocks\.1\.scale' was removed from its module"):
        attached.model(x())


@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_written_back(attach, training):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)) for _ in range(3)))
    attached = attach(model.train(training), offload_buffers=True)
    homes = attached.homes["1.1.running_mean"]
    for _ in range(3):
        attached.check(x())
    assert attached.model[1][1].running_mean.data_ptr() == homes
    assert attached.model[1][1].num_batches_tracked.item() == (3 if training else 0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("history", torch.zeros(0))
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        self.count += 1
        self.history = torch.cat([self.history, self.count[None]])
        return x * self.weight * self.count + self.history.sum()


def test_buffers_that_a_forward_changes_or_replaces(attach):
    attached = attach(nn.Sequential(Counting(), Counting()).eval(), offload_buffers=True)
    for _ in range(4):
        with torch.no_grad():
            assert torch.equal(attached.model(x()), attached.plain(x()))
    assert attached.model[0].history.tolist() == [1, 2, 3, 4]
    assert attached.model[1].count.item() == 4


def test_a_weight_that_a_forward_changes_in_place(attach):
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE) * 3)

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x * self.weight

    attached = attach(nn.Sequential(Clipped(), Clipped()))
    for _ in range(3):
        attached.check(x())


# Autograd


def test_gradients_through_frozen_weights_are_right(attach):
    attached = attach(Model(blocks=5), prefetch=1)
    for model in (attached.model, attached.plain):
        model.requires_grad_(False)
    for _ in range(2):
        gradients = []
        for model in (attached.model, attached.plain):
            inputs = x().requires_grad_()
            model(inputs).square().sum().backward()
            gradients.append(inputs.grad)
        assert torch.equal(*gradients)
        attached.check_home()


def test_gradients_with_activation_checkpointing(attach):
    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    attached = attach(Checkpointed(blocks=5).requires_grad_(False))
    gradients = []
    for model in (attached.model, attached.plain):
        inputs = x().requires_grad_()
        model(inputs).sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)
    attached.check_home()


def test_an_adapter_beside_frozen_weights_trains(attach):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = Model().requires_grad_(False)
            self.adapter = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return self.base(self.adapter(x))

    torch.manual_seed(5)
    attached = attach(Adapted(), streamed=("base",))
    for _ in range(3):
        for model in (attached.model, attached.plain):
            model(x()).square().mean().backward()
            with torch.no_grad():
                for parameter in model.adapter.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None
    assert torch.equal(attached.model.adapter.weight, attached.plain.adapter.weight)


def test_a_trainable_weight_refuses_its_gradient(attach):
    attached = attach(Model())
    with pytest.raises(OffloadError, match=r"'blocks\.3\.\S+' is trainable.*requires_grad_\(False\)"):
        attached.model(x()).sum().backward()
    # Gradients of other things are none of its business.
    inputs = x().requires_grad_()
    other = x().requires_grad_()
    (found,) = torch.autograd.grad(attached.model(inputs).sum(), inputs)
    (expected,) = torch.autograd.grad(attached.plain(other).sum(), other)
    assert torch.equal(found, expected)
    attached.streamer.detach()
    attached.model(x()).sum().backward()
    assert attached.model.blocks[0].scale.grad is not None


def test_a_weight_changed_before_the_backward_pass_is_refused(attach):
    attached = attach(Model().requires_grad_(False))
    out = attached.model(x().requires_grad_())
    with torch.no_grad():
        attached.model.blocks[1].linear.weight.add_(1)
    with pytest.raises(OffloadError, match=r"'blocks\.1\.linear\.weight' was changed after the forward"):
        out.sum().backward()


# Errors in the middle


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_an_exception_in_a_forward_brings_all_home(attach, error):
    attached = attach(Model())
    attached.check(x())
    attached.model.blocks[2].fail = error
    with pytest.raises(type(error)):
        attached.model(x())
    attached.check_home()
    attached.model.blocks[2].fail = None
    before = attached.stats.misses
    attached.check(x())
    assert attached.stats.misses == before  # the cut order was not learnt


def test_a_hook_of_the_user_that_fails(attach):
    attached = attach(Model())
    attached.check(x())
    for register in ("register_forward_pre_hook", "register_forward_hook"):

        def fail(*_):
            raise RuntimeError("hook")

        handle = getattr(attached.model.blocks[1], register)(fail)
        with pytest.raises(RuntimeError, match="hook"):
            attached.model(x())
        handle.remove()
        attached.check(x())


def test_a_failed_copy_is_raised_where_it_is_needed_and_tried_again(attach):
    broken = {"blocks.2"}

    def before_copy(name):
        if name in broken:
            raise OSError("disk gone")

    attached = attach(Model(), before_copy=before_copy)
    ran = attached.model.blocks[1].seen
    for calls in (1, 2):
        with pytest.raises(
            OffloadError, match=r"weights of 'blocks\.2' could not be copied to cpu: disk gone"
        ):
            attached.model(x())
        assert len(ran) == calls
        attached.check_home()
    broken.clear()
    attached.check(x())
    broken.add("blocks.2")
    with pytest.raises(OffloadError, match="disk gone"):  # moved ahead this time
        attached.model(x())
    attached.model.order = attached.plain.order = [0, 1, 3]
    attached.check(x())  # asked for ahead, not needed: nobody is told
    broken.clear()
    attached.model.order = attached.plain.order = [0, 1, 2, 3]
    attached.check(x())


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
    assert attached.stats.misses == (
        4 + 3 + 3 if slots == 1 else 4
    )  # from the second forward on, the first one is moved ahead


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
        OffloadError, match=r"weights of '2' take 2,048 bytes.*those of '0', which runs around it"
    ):
        attached.model(x())
    attached.check_home()


# Life of an engine


def test_detach_restores_everything(attach):
    attached = attach(Model(blocks=6), budget=4 * BLOCK_BYTES)
    with torch.no_grad():
        attached.model(x())
    attached.model.blocks[0].scale.data.mul_(2)  # resident: the device holds the truth
    attached.plain.blocks[0].scale.data.mul_(2)
    attached.streamer.detach()
    attached.check(x())
    assert not any("forward" in module.__dict__ for module in attached.model.modules())
    attached.streamer.detach()
    attached.streamer.attach()
    with torch.no_grad():
        same(attached.model(x()), attached.plain(x()))


def test_attaching_twice_is_refused(attach):
    attached = attach(Model())
    with pytest.raises(OffloadError, match=r"'blocks\.0' are streamed already"):
        attached.streamer.attach()
    other = Streamer(attached.model, attached.groups, HostTransfer())
    with pytest.raises(OffloadError, match="streamed already"):
        other.attach()
    attached.check(x())


def test_detaching_while_the_model_runs_is_refused(attach):
    attached = attach(Model())
    handle = attached.model.blocks[1].register_forward_hook(lambda *_: attached.streamer.detach())
    with pytest.raises(OffloadError, match="cannot be detached while a forward"):
        attached.model(x())
    handle.remove()
    attached.check(x())


def test_a_forward_that_was_wrapped_meanwhile_goes_on_working(attach):
    attached = attach(Model())
    block = attached.model.blocks[0]
    inner = block.forward
    block.forward = lambda x: inner(x) + 1
    with torch.no_grad():
        expected = attached.plain.blocks[0](x()) + 1
        assert torch.equal(block(x()), expected)
        attached.streamer.detach()
        assert torch.equal(block(x()), expected)


def test_a_forward_of_the_instance_comes_back(attach):
    model = Model()
    inner = model.blocks[0].forward
    own = model.blocks[0].forward = lambda x: inner(x) + 1
    streamer = Streamer(model, plan_groups(model, [""]), HostTransfer())
    expected = model(x())
    streamer.attach()
    assert torch.equal(model(x()), expected)
    streamer.detach()
    assert model.blocks[0].forward is own


def test_tensors_that_cannot_be_streamed_are_named():
    model = Model()
    model.blocks[1].scale = nn.Parameter(torch.empty(SIZE, device="meta"))
    with pytest.raises(OffloadError, match=r"'blocks\.1\.scale' has no values \(meta device\)"):
        Streamer(model, plan_groups(model, [""]), HostTransfer()).attach()


def test_a_deep_copy_is_independent(attach):
    attached = attach(Model(blocks=6), budget=4 * BLOCK_BYTES)
    attached.model(x())
    other = copy.deepcopy(attached.model)
    with torch.no_grad():
        for _ in range(2):
            same(other(x()), attached.plain(x()))
        assert attached.stats.misses == 6 - 1  # nothing of the copy was counted here
        other.blocks[1].scale.mul_(0)
        attached.model(x())
        same(attached.model(x()), attached.plain(x()))
    assert {id(one) for one in other.parameters()}.isdisjoint(map(id, attached.model.parameters()))


def test_a_deep_copy_of_a_part_and_of_the_engine(attach):
    attached = attach(Model())
    model, streamer = copy.deepcopy((attached.model, attached.streamer))
    assert streamer is not attached.streamer
    with torch.no_grad():
        same(model(x()), attached.plain(x()))
        assert streamer.stats().misses == 4
        streamer.detach()
        same(model(x()), attached.plain(x()))
    assert not any("forward" in module.__dict__ for module in model.modules())
    attached.check(x())


def test_pickling_gives_an_engine_of_its_own(attach):
    attached = attach(Model())
    attached.model(x())
    other = pickle.loads(pickle.dumps(attached.model))
    with torch.no_grad():
        for _ in range(2):
            same(other(x()), attached.plain(x()))
    attached.check(x())


def test_copying_while_the_model_runs_is_refused(attach):
    attached = attach(Model())
    attached.model.blocks[1].register_forward_hook(lambda *_: copy.deepcopy(attached.model) and None)
    with pytest.raises(OffloadError, match="cannot be copied or pickled while its forward runs"):
        attached.model(x())


def test_two_models_at_one_time(attach):
    class Pair(nn.Module):
        def __init__(self, one, two):
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x):
            for left, right in zip(self.one.blocks, self.two.blocks, strict=True):
                x = right(left(x))
            return x

    one, two = attach(Model()), attach(Model(blocks=4))
    with torch.no_grad():
        two.model.blocks[0].scale.mul_(2)
        two.plain.blocks[0].scale.mul_(2)
        for _ in range(2):
            same(Pair(one.model, two.model)(x()), Pair(one.plain, two.plain)(x()))
    one.check(x())
    two.check(x())


def test_threads_take_turns(attach):
    attached = attach(Model(), before_copy=lambda name: time.sleep(0.001))
    with torch.no_grad():
        expected = [attached.plain(x() * n) for n in range(4)]
    found = [[] for _ in range(4)]

    def run(n):
        with torch.no_grad():
            for _ in range(5):
                found[n].append(attached.model(x() * n))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert len(found[n]) == 5
        assert all(torch.equal(one, expected[n]) for one in found[n])
    attached.check_home()


def test_groups_of_ones_own(attach):
    model = Model()
    groups = [Group("blocks.1", model.blocks[1], {"blocks.1.linear.weight": model.blocks[1].linear.weight})]
    plain = copy.deepcopy(model)
    streamer = Streamer(model, groups, HostTransfer())
    streamer.attach()
    assert torch.equal(model(x()), plain(x()))
    assert streamer.stats().bytes_moved == SIZE * SIZE * 4
    streamer.detach()
