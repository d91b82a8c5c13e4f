"""What the engine makes of changed weights, of autograd and of errors."""

import weakref

import pytest
import torch
from torch import nn

from accel_bigmodel import OffloadError
from accel_bigmodel.streaming.schedule import StreamingSchedule
from accel_bigmodel.streaming.slots import SlotPool
from accel_bigmodel.streaming.streamed_groups import StreamedGroup
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import HostTransfer
from testkit.streamed import BLOCK_BYTES, SIZE, Block, Model, same, x

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


def test_a_removed_parameter_that_is_not_needed_is_nobodys_business(attach):
    attached = attach(Model())
    attached.model.blocks[2].scale = None
    attached.model.order = attached.plain.order = [0, 1, 3]
    with torch.no_grad():
        same(attached.model(x()), attached.plain(x()))


def test_weights_tied_later_are_known_as_tied(attach):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 4)
            self.inner = [inner]

        def forward(self, x):
            return self.inner[0](x @ self.weight) @ self.weight

    block = Block()
    attached = attach(nn.Sequential(Around(block), block), prefetch=1)
    attached.check(x())
    for model in (attached.model, attached.plain):
        model[0].weight = model[1].linear.weight
    attached.homes = {name: tensor.data_ptr() for name, tensor in attached.weights()}
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


class Noted(nn.Module):
    """Notes its activations."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.activations = []

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
            self.activations.append(weakref.ref(x.untyped_storage()))
        return x

    def alive(self):
        return sum(activation() is not None for activation in self.activations)


def test_activation_checkpointing_keeps_as_little_as_without_streaming(attach):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    attached = attach(Checkpointed(Noted(), Noted()).requires_grad_(False))
    for model in (attached.plain, attached.model):
        out = model(x().requires_grad_())
        assert [block.alive() for block in model] == [1, 1]  # of 3: what the block returned
        out.sum().backward()


def test_activations_of_a_forward_without_a_backward_pass_go_with_its_output(attach):
    attached = attach(nn.Sequential(Noted(), Noted()).requires_grad_(False))
    out = attached.model(x().requires_grad_())
    assert attached.model[0].alive() == 3
    del out
    assert attached.model[0].alive() == 0


def test_an_activation_that_was_changed_in_place_is_refused_by_the_backward_pass(attach):
    class Faulty(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return torch.tanh(self.linear(x)).add_(1)

    attached = attach(nn.Sequential(Faulty(), Faulty()).requires_grad_(False))
    for model, message in ((attached.plain, "inplace operation"), (attached.model, r"\(3, 16\).*in place")):
        with pytest.raises(RuntimeError, match=message):
            model(x().requires_grad_()).sum().backward()


def test_gradients_through_conjugated_weights_are_right(attach):
    class Conjugated(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.randn(SIZE, dtype=torch.complex64))

        def forward(self, x):
            return x @ self.matrix.mH + x * self.scale.conj().imag

    attached = attach(nn.Sequential(Conjugated(), Conjugated()).requires_grad_(False))
    gradients = []
    for model in (attached.model, attached.plain):
        inputs = x().to(torch.complex64).requires_grad_()
        model(inputs).abs().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)


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


def test_autocast(attach):
    attached = attach(Model())
    for dtype in (torch.bfloat16, torch.float16):
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                assert torch.equal(attached.model(x()), attached.plain(x()))


def test_casts_of_weights_that_went_do_not_stay(attach):
    attached = attach(Model(blocks=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = attached.model(x())
        attached.model.blocks[0].linear.weight.data.zero_()
        attached.model.blocks[0].linear.bias.data.zero_()
        # A cast that autocast kept would still show the old weights.
        assert not torch.equal(attached.model(x()), before)
        assert attached.model(x()).abs().sum() == 0


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


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SlotPool, "take"),
        (SlotPool, "give_back"),
        (HostTransfer, "copy"),
        (StreamingSchedule, "record"),
        (StreamedGroup, "point"),
        (StreamedGroup, "restore"),
        (Streamer, "enter"),
        (Streamer, "leave"),
        (Streamer, "close"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_interrupt_inside_the_engine(attach, monkeypatch, owner, name, call, before):
    attached = attach(Model(), budget=2 * BLOCK_BYTES)
    attached.check(x())
    del attached.streamer._pool.give_back  # the one that poisons
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and before:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        attached.model(x())
    monkeypatch.undo()
    for _ in range(2):
        attached.check(x())
    assert attached.stats.peak_bytes <= 2 * BLOCK_BYTES
    attached.streamer.detach()
    attached.check(x())


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
