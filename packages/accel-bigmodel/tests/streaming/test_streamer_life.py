"""Attaching, detaching and copying an engine; several models, several threads."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_bigmodel import OffloadError
from accel_bigmodel.hooks.alignment import has_offloaded_params
from accel_bigmodel.hooks.base import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_bigmodel.streaming import streamer as streamer_module
from accel_bigmodel.streaming.forward_wrappers import ForwardWrapper
from accel_bigmodel.streaming.groups import Group, plan_groups
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import HostTransfer
from testkit.streamed import BLOCK_BYTES, SIZE, Attached, Block, Model, same, x

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


def test_a_hook_that_was_put_over_a_gate_leaves_no_gate_behind(attach):
    attached = attach(Model())
    for module in attached.model.modules():
        add_hook_to_module(module, ModelHook())
    attached.check(x())
    attached.streamer.detach()
    attached.check(x())
    remove_hook_from_module(attached.model, recurse=True)
    assert not any("forward" in module.__dict__ for module in attached.model.modules())
    attached.streamer.attach()
    attached.check(x())


def test_attaching_twice_is_refused(attach):
    attached = attach(Model())
    with pytest.raises(OffloadError, match=r"'blocks\.0' are streamed already"):
        attached.streamer.attach()
    other = Streamer(attached.model, attached.groups, HostTransfer())
    with pytest.raises(OffloadError, match="streamed already"):
        other.attach()
    attached.check(x())


def test_a_copy_of_a_part_can_be_streamed_itself(attach):
    attached = attach(Model())
    blocks = copy.deepcopy(attached.model.blocks)
    model = nn.Sequential(*blocks)
    other = attach(model)
    other.check(x())
    assert other.stats.bytes_moved > 0


def test_attaching_that_is_interrupted_leaves_nothing_behind(attach, monkeypatch):
    class Interrupted(ForwardWrapper):
        def __init__(self, streamer, module, group, below):
            if group == 2:
                raise KeyboardInterrupt
            super().__init__(streamer, module, group, below)

    model = Model()
    streamer = Streamer(model, plan_groups(model, [""]), HostTransfer())
    monkeypatch.setattr(streamer_module, "ForwardWrapper", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        streamer.attach()
    assert not any("forward" in module.__dict__ for module in model.modules())


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
        assert attached.stats.hits == 6 - 1  # nothing of the copy was counted here
        other.blocks[1].scale.mul_(0)
        attached.model(x())
        same(attached.model(x()), attached.plain(x()))
    assert {id(one) for one in other.parameters()}.isdisjoint(map(id, attached.model.parameters()))


def test_a_deep_copy_of_a_part_has_no_engine(attach):
    attached = attach(Model())
    attached.check(x())
    before = attached.stats.bytes_moved
    block = copy.deepcopy(attached.model.blocks[1])
    with torch.no_grad():
        same(block(x()), attached.plain.blocks[1](x()))
        block.scale.mul_(0)
    assert attached.stats.bytes_moved == before
    attached.check(x())


def test_a_deep_copy_of_the_engine_goes_with_that_of_the_model(attach):
    attached = attach(Model())
    model, streamer = copy.deepcopy((attached.model, attached.streamer))
    assert streamer is not attached.streamer
    with torch.no_grad():
        same(model(x()), attached.plain(x()))
        assert streamer.stats().hits == 4
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


def test_nothing_keeps_a_model_that_is_forgotten():
    attached = Attached(Model())
    attached.check(x())
    model, streamer = weakref.ref(attached.model), weakref.ref(attached.streamer)
    del attached
    gc.collect()
    assert model() is None
    assert streamer() is None


# With other ways to change or run modules


def test_graphs_of_fx(attach):
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)))
    attached = attach(graph)
    attached.check(x())
    attached.check(x())
    assert attached.stats.bytes_moved > 0


def test_a_compiled_model_has_no_part_of_the_engine_in_its_graphs(attach, monkeypatch):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return torch.tanh(self.linear(x)) * 2

    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    attached = attach(nn.Sequential(*(Plain() for _ in range(4))))
    compiled = torch.compile(attached.model, backend=backend)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x()), attached.plain(x()))
    assert graphs
    assert all(calls == 3 for calls in graphs)  # linear, tanh, mul
    attached.check_home()


def test_vectorised_by_torch_func(attach):
    attached = attach(Model())
    inputs = torch.stack([x(), x() + 1])
    with torch.no_grad():
        found = torch.func.vmap(attached.model)(inputs)
        assert torch.equal(found, torch.func.vmap(attached.plain)(inputs))
    attached.check_home()


@pytest.mark.parametrize("first", ["transform", "plain"])
def test_derivatives_forwards_and_what_comes_after_them(attach, first):
    attached = attach(Model().requires_grad_(False))
    if first == "plain":
        attached.check(x())
    found, expected = (
        torch.func.jvp(model, (x(),), (torch.ones_like(x()),)) for model in (attached.model, attached.plain)
    )
    same(found, expected)
    attached.check(x())
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # PyTorch's, so far
        torch.func.grad(lambda x: attached.model(x).sum())(x())
    attached.check(x())


def test_parametrised_weights(attach):
    torch.manual_seed(0)
    layers = [torch.nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)) for _ in range(3)]
    attached = attach(nn.Sequential(*layers))
    assert [group.name for group in attached.groups] == ["0", "1", "2"]
    attached.check(x())
    attached.check(x())


def test_modules_say_that_their_weights_wait_elsewhere(attach):
    attached = attach(Model())
    assert has_offloaded_params(attached.model.blocks[0])
    assert not has_offloaded_params(attached.model)
    assert (
        attached.model.blocks[0].forward.execution_device == attached.streamer.device == torch.device("cpu")
    )
    attached.streamer.detach()
    assert not has_offloaded_params(attached.model.blocks[0])


def test_gates_that_were_left_under_a_wrapper_do_not_pile_up():
    model = Model()
    for _ in range(3):
        streamer = Streamer(model, plan_groups(model, [""]), HostTransfer())
        streamer.attach()
        add_hook_to_module(model.blocks[0], Doubling())
        assert not isinstance(model.blocks[0]._old_forward.__wrapped__, ForwardWrapper)
        streamer.detach()
        remove_hook_from_module(model.blocks[0])


class Doubling(ModelHook):
    def post_forward(self, module, output):
        return output * 2


@pytest.mark.parametrize("first", ["hook", "engine"])
def test_beside_model_hooks(first):
    model = Model()
    plain = copy.deepcopy(model)
    streamer = Streamer(model, plan_groups(model, [""]), HostTransfer())
    if first == "engine":
        streamer.attach()
    add_hook_to_module(model.blocks[3], Doubling())
    if first == "hook":
        streamer.attach()
    with torch.no_grad():
        for one in (model, copy.deepcopy(model)):
            assert torch.equal(one(x()), plain(x()) * 2)
        if first == "engine":
            remove_hook_from_module(model.blocks[3])
            assert torch.equal(model(x()), plain(x()))
            streamer.detach()
        else:
            streamer.detach()
            assert torch.equal(model(x()), plain(x()) * 2)
            remove_hook_from_module(model.blocks[3])
        assert torch.equal(model(x()), plain(x()))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_weights_that_stay_can_be_saved_one_by_one(attach, tmp_path):
    attached = attach(Model(), budget=1 << 20)
    state = attached.model.state_dict()
    assert attached.stats.resident_bytes
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
    safetensors.torch.save_model(attached.model, str(tmp_path / "all"))  # refuses parts of larger storages
    same(safetensors.torch.load_file(tmp_path / "all"), dict(attached.plain.state_dict()))


def test_models_with_weights_in_common_run_one_after_the_other(attach):
    class Waiting(Block):
        def forward(self, x):
            self.meanwhile()
            return super().forward(x)

    first, second = nn.Sequential(Waiting(), Waiting()), nn.Sequential(Waiting(), Waiting())
    second[0].linear.weight = first[0].linear.weight
    second_runs, first_ran = threading.Event(), threading.Event()
    for block in (*first, *second):
        block.meanwhile = bool
    values = first[0].linear.weight.clone()
    one, other = attach(first), attach(second)
    # Were both to run at once, the second would take the first one's slot for the home of the weight.
    first[0].meanwhile = lambda: second_runs.wait(0.3)
    second[0].meanwhile = lambda: (second_runs.set(), first_ran.wait(5))

    def run_first():
        one.model(x())
        first_ran.set()

    threads = [threading.Thread(target=run_first), threading.Thread(target=other.model, args=(x(),))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert first[0].linear.weight.data_ptr() == one.homes["0.linear.weight"]
    assert torch.equal(first[0].linear.weight, values)
