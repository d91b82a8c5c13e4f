"""Aligning devices. The meta device plays the second one: it tells where a tensor is, and computes shapes."""

import copy
import gc
import pickle
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    DeviceMapError,
    ModelHook,
    OffloadError,
    add_hook_to_module,
    remove_hook_from_module,
)
from accel_ckpt import StateMismatchError, UninitializedTensorError
from testkit.aligned import Block, where

META, CPU = torch.device("meta"), torch.device("cpu")


class Devices(nn.Module):
    """Returns where its arguments were."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args, kwargs


@pytest.fixture
def x():
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


# placing


@pytest.mark.parametrize("device", ["meta", META])
def test_placing_moves_tensors_and_inputs(device, x):
    block = Block()
    add_hook_to_module(block, AlignDevicesHook(device))
    assert where(block) == {
        "scale": "meta",
        "shift": "meta",
        "table": "meta",
        "inner.weight": "cpu",
        "inner.bias": "cpu",
    }
    assert block(x).is_meta
    remove_hook_from_module(block)
    assert block.scale.is_meta  # placed is placed


def test_place_submodules(x):
    block = Block()
    add_hook_to_module(block, AlignDevicesHook("meta", place_submodules=True))
    assert set(where(block).values()) == {"meta"}


def test_what_is_there_already_stays_the_same_object(x):
    block = Block()
    before = dict(block.named_parameters()), dict(block.named_buffers())
    add_hook_to_module(block, AlignDevicesHook("cpu", place_submodules=True))
    after = dict(block.named_parameters()), dict(block.named_buffers())
    for old, new in zip(before, after, strict=True):
        assert all(old[name] is new[name] for name in old)


def test_inputs_move_at_any_depth_and_skipped_keys_stay():
    module = add_hook_to_module(Devices(), AlignDevicesHook("meta", skip_keys=["kept"]))
    t = torch.ones(2)
    args, kwargs = module(t, [t, (t, {"a": t})], b={"c": t}, kept=t, number=1, nothing=None)
    assert args[0].is_meta
    assert args[1][0].is_meta
    assert args[1][1][0].is_meta
    assert args[1][1][1]["a"].is_meta
    assert kwargs["b"]["c"].is_meta
    assert kwargs["kept"] is t
    assert (kwargs["number"], kwargs["nothing"]) == (1, None)


def test_arguments_that_are_there_are_passed_as_they_are():
    module = add_hook_to_module(Devices(), AlignDevicesHook("cpu"))
    t, nested = torch.ones(2), [torch.ones(1), (torch.ones(1), None)]
    args, kwargs = module(t, nested, key=nested)
    assert args[0] is t
    assert args[1] is nested
    assert kwargs["key"] is nested


def test_without_an_execution_device_nothing_moves():
    module = add_hook_to_module(Devices(), AlignDevicesHook())
    t, m = torch.ones(2), torch.ones(2, device="meta")
    args, _ = module(t, m)
    assert args[0] is t
    assert args[1] is m


def test_io_same_device_brings_outputs_to_where_the_first_input_was():
    module = add_hook_to_module(Devices(), AlignDevicesHook(io_same_device=True, skip_keys="kept"))
    here, there = torch.ones(1), torch.ones(1, device="meta")
    args, kwargs = module(there, here, kept=here, other=[here])
    assert args[0].is_meta
    assert args[1].is_meta
    assert kwargs["other"][0].is_meta
    assert kwargs["kept"] is here
    args, _ = module(number=1)
    assert args == ()


def test_io_same_device_of_a_module_that_calls_itself():
    class Nested(nn.Module):
        def forward(self, x, inner=True):
            if inner:
                self(torch.ones(1), inner=False)
            return torch.ones(2)

    module = add_hook_to_module(Nested(), AlignDevicesHook(io_same_device=True))
    assert module(torch.ones(1, device="meta")).is_meta
    assert not module._hf_hook._input_devices


def test_io_same_device_may_be_switched_on_later(x):
    module = add_hook_to_module(nn.Linear(4, 2), AlignDevicesHook("cpu"))
    module(x)
    module._hf_hook.io_same_device = True
    assert module(x).device == CPU
    module._hf_hook.io_same_device = False
    module(x)


def test_a_changed_execution_device_is_used():
    module = add_hook_to_module(Devices(), AlignDevicesHook("cpu"))
    module._hf_hook.execution_device = "meta"
    assert module(torch.ones(1))[0][0].is_meta


@pytest.mark.parametrize("device", ["nonsense", "vulkan"])
def test_a_device_that_is_not_there_is_refused_before_anything_changes(device):
    block = Block()
    plain = dict(vars(block))
    with pytest.raises(DeviceMapError, match=f"{device}.*This machine has the CPU and"):
        add_hook_to_module(block, AlignDevicesHook(device, offload=True))
    assert vars(block) == plain
    assert where(block)["scale"] == "cpu"


def test_weights_without_values_cannot_be_placed():
    block = Block().to("meta")
    with pytest.raises(UninitializedTensorError, match=r"no values \(meta device\): scale, shift, table"):
        add_hook_to_module(block, AlignDevicesHook("cpu"))


def test_a_shared_map_gives_each_device_one_tied_tensor():
    first, second, third = (
        nn.Linear(3, 3, bias=False),
        nn.Linear(3, 3, bias=False),
        nn.Linear(3, 3, bias=False),
    )
    first.weight = second.weight = third.weight
    there = torch.zeros(3, 3)
    tied = {third.weight.data_ptr(): {CPU: there}}
    add_hook_to_module(first, AlignDevicesHook("cpu", tied_params_map=tied))
    assert first.weight is third.weight  # already there
    add_hook_to_module(second, AlignDevicesHook("meta", tied_params_map=tied))
    assert second.weight.is_meta
    assert third.weight.device == CPU


def test_ties_are_kept_when_placed_by_hooks_of_their_own():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    first.weight = second.weight
    for module in (first, second):
        add_hook_to_module(module, AlignDevicesHook("meta"))
    assert first.weight.is_meta
    assert first.weight is second.weight


def test_a_call_that_moves_nothing_costs_six_function_calls(x):
    # The time of a call depends on the machine; that no tree is walked and no signature looked at does not.
    def calls(module):
        seen = []
        sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
        try:
            module(x)
        finally:
            sys.setprofile(None)
        return len(seen)

    plain, module = nn.Linear(4, 2), add_hook_to_module(nn.Linear(4, 2), AlignDevicesHook("cpu"))
    module(x)
    assert calls(module) <= calls(plain) + 6


def test_arguments_of_any_kind_that_are_there_are_passed_as_they_are():
    class Cache:
        def __init__(self):
            self.values = torch.ones(1, device="meta")

    module = add_hook_to_module(Devices(), AlignDevicesHook("cpu"))
    cache, mapping = Cache(), OrderedDict(a=torch.ones(1))
    _, kwargs = module(cache=cache, mapping=mapping)
    assert kwargs["cache"] is cache
    assert kwargs["mapping"] is mapping


def test_objects_that_can_be_moved_are_moved():
    class Batch:
        def to(self, device):
            return f"moved to {device}"

    @dataclass
    class Pair:
        first: torch.Tensor

    module = add_hook_to_module(Devices(), AlignDevicesHook("meta"))
    args, kwargs = module(Batch(), pair=Pair(torch.ones(1)), mapping=OrderedDict(a=torch.ones(1)))
    assert args == ("moved to meta",)
    assert kwargs["pair"].first.is_meta
    assert kwargs["mapping"]["a"].is_meta
    assert type(kwargs["mapping"]) is OrderedDict


# offloading


def test_offloaded_weights_are_here_during_forward_only(x):
    block = Block()
    expected = block(x)
    seen = {}
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    block.register_forward_hook(lambda *_: seen.update(where(block)))
    assert where(block)["scale"] == "meta"
    assert where(block)["shift"] == where(block)["table"] == where(block)["inner.weight"] == "cpu"
    assert block.scale.requires_grad
    assert isinstance(block.scale, nn.Parameter)
    assert torch.equal(block(x), expected)
    assert seen["scale"] == "meta"  # torch's own hooks run outside
    assert where(block)["scale"] == "meta"
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("buffers", [False, True])
def test_offloading_and_removing_gives_everything_back(x, buffers):
    block = Block()
    before = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    values = {name: tensor.clone() for name, tensor in before.items()}
    add_hook_to_module(
        block, AlignDevicesHook("cpu", offload=True, offload_buffers=buffers, place_submodules=True)
    )
    assert where(block) == {
        **dict.fromkeys(["scale", "inner.weight", "inner.bias"], "meta"),
        "shift": "meta" if buffers else "cpu",
        "table": "cpu",
    }
    block(x)
    remove_hook_from_module(block)
    after = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in values)
    assert vars(block).keys() == vars(Block()).keys()


def test_buffers_come_back_from_the_execution_device():
    block = Block()
    before = dict(block.named_buffers())
    add_hook_to_module(block, AlignDevicesHook("meta", offload=True))
    assert block.shift.is_meta
    remove_hook_from_module(block)
    assert {name: buffer is before[name] for name, buffer in block.named_buffers()} == {
        "shift": True,
        "table": True,
    }


def test_a_weights_map_is_used_and_may_be_lazy(x):
    class Lazy(Mapping):
        asked = []

        def __getitem__(self, name):
            self.asked.append(name)
            return {"scale": torch.full((4,), 7.0, dtype=torch.float64)}[name]

        def __iter__(self):
            return iter(["scale"])

        def __len__(self):
            return 1

    block = Block()
    block.scale.half = "an attribute"
    original = weakref.ref(block.scale)
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True, weights_map=Lazy()))
    gc.collect()
    assert original() is None  # its memory is free
    assert Lazy.asked == []
    assert torch.equal(block(x), x * 7 + 3 + 5)
    assert block(x).dtype == torch.float32
    assert Lazy.asked == ["scale"] * 2
    assert block.scale.half == "an attribute"
    remove_hook_from_module(block)
    assert torch.equal(block.scale.detach(), torch.full((4,), 7.0))
    assert block.scale.half == "an attribute"


def test_a_meta_model_with_a_weights_map_stays_meta_when_the_hook_goes(x):
    block = nn.Linear(4, 2).to("meta")
    own = block.weight
    weights = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert torch.allclose(block(x), x.sum(1, keepdim=True).expand(2, 2))
    assert block.weight is own
    remove_hook_from_module(block)
    assert block.weight is own


def test_a_weights_map_of_another_model_is_refused():
    block = Block()
    with pytest.raises(StateMismatchError, match="no values for scale of this Block"):
        add_hook_to_module(
            block, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(4)})
        )
    assert block.scale.device == CPU
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True, weights_map={"scale": torch.ones(5)}))
    with pytest.raises(StateMismatchError, match=r"shape \(5,\) for 'scale', but the module has \(4,\)"):
        block(torch.ones(1, 4))
    assert block.scale.is_meta


def test_a_module_without_values_needs_a_weights_map():
    block = nn.Linear(2, 2).to("meta")
    with pytest.raises(UninitializedTensorError, match="weight, bias"):
        add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_which_keep_a_list_of_their_weights(kind, x):
    layer, other = kind(4, 3), kind(4, 3)
    expected = layer(x)[0]
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    for module in (other, kind(4, 3, device="meta")):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
        assert all(weight.is_meta for weight in module._flat_weights)
        assert torch.equal(module(x)[0], expected)
        assert torch.equal(copy.deepcopy(module)(x)[0], expected)
        assert all(weight.is_meta for weight in module._flat_weights)
    remove_hook_from_module(other)
    assert torch.equal(other(x)[0], expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_mode_of_autograd(mode, x):
    block = nn.Linear(4, 2)
    with mode():
        expected = block(x)
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    for context in (mode, torch.no_grad, mode):
        with context():
            assert torch.equal(block(x), expected)
    with mode():
        remove_hook_from_module(block)
    block(x).sum().backward()
    assert block.weight.grad is not None


def test_a_failing_forward_lets_the_weights_go(x):
    block = Block()
    expected = block(x)
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True, io_same_device=True))
    with pytest.raises(RuntimeError, match="on purpose"):
        block(x, fail=True)
    assert block.scale.is_meta
    assert torch.equal(block(x), expected)
    assert not block._hf_hook._input_devices


def test_a_load_that_fails_half_way_is_undone(x):
    weights = {"weight": torch.ones(2, 4), "bias": torch.ones(3)}
    block = add_hook_to_module(nn.Linear(4, 2), AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with pytest.raises(StateMismatchError, match="bias"):
        block(x)
    assert block.weight.is_meta
    weights["bias"] = torch.zeros(2)
    assert torch.allclose(block(x), x.sum(1, keepdim=True).expand(2, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_calls_itself_keeps_its_weights_until_the_end(x, device):
    block = Block()
    expected = block(x)
    add_hook_to_module(block, AlignDevicesHook(device, offload=True))
    output = block(x, depth=3)
    assert output.is_meta if device == "meta" else torch.equal(output, expected)
    assert block.scale.is_meta
    remove_hook_from_module(block)
    assert torch.equal(block(x), expected)


def test_a_hook_that_goes_during_its_forward_gives_the_weights_back(x):
    class Leaves(nn.Linear):
        def forward(self, x):
            remove_hook_from_module(self)
            return super().forward(x)

    module = Leaves(4, 2)
    expected = nn.Linear.forward(module, x)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x), expected)


def test_activation_checkpointing_brings_the_weights_again(x):
    block = nn.Linear(4, 2).requires_grad_(False)
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    output = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    (found,) = torch.autograd.grad(output.square().sum(), x)
    assert torch.equal(found, expected)
    assert block.weight.is_meta


def test_gradients_of_inputs_pass_and_those_of_offloaded_weights_are_refused(x):
    block = nn.Linear(4, 2)
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    (found,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(found, expected)
    with pytest.raises(
        OffloadError, match=r"gradient was computed for '(weight|bias)'.*requires_grad_\(False\)"
    ):
        block(x).sum().backward()


def test_values_that_someone_puts_in_place_are_used_and_stay(x):
    block = add_hook_to_module(nn.Linear(4, 4, bias=False), AlignDevicesHook("cpu", offload=True))
    block.weight = nn.Parameter(torch.eye(4))
    assert torch.equal(block(x), x)
    remove_hook_from_module(block)
    assert torch.equal(block.weight.detach(), torch.eye(4))


def test_a_converted_module_gets_converted_weights(x):
    block = nn.Linear(4, 2)
    expected = copy.deepcopy(block).double()(x.double())
    add_hook_to_module(block, AlignDevicesHook("cpu", offload=True))
    block.double()
    assert torch.equal(block(x.double()), expected)
    remove_hook_from_module(block)
    assert torch.equal(block(x.double()), expected)


def test_what_is_frozen_while_offloaded_stays_frozen(x):
    block = add_hook_to_module(nn.Linear(4, 2), AlignDevicesHook("cpu", offload=True))
    block.requires_grad_(False)
    assert not block(x).requires_grad
    remove_hook_from_module(block)
    assert not any(parameter.requires_grad for parameter in block.parameters())


def test_replacing_and_adding_again_take_the_weights_of_now(x):
    block, hook = nn.Linear(4, 4, bias=False), AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(block, hook)
    add_hook_to_module(block, ModelHook())
    assert block.weight.device == CPU
    with torch.no_grad():
        block.weight.copy_(torch.eye(4))
    add_hook_to_module(block, hook)
    assert torch.equal(block(x), x)


def test_tied_weights_stay_tied_while_offloaded_in_calls_that_overlap_and_afterwards(x):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))
            self.inner = nn.Linear(4, 4, bias=False)
            self.inner.weight = self.weight

        def forward(self, x):
            output = self.inner(x)
            assert self.inner.weight.is_meta  # its call is over, ours is not
            assert not self.weight.is_meta
            return output @ self.weight

    model = Outer()
    own = model.weight
    asked = []

    class Map(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    for module in (model, model.inner):
        weights = Map(weight=torch.eye(4))
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert model.weight is model.inner.weight
    assert torch.equal(model(x), x)
    assert asked == ["weight"]
    assert model.weight is model.inner.weight
    remove_hook_from_module(model, recurse=True)
    assert model.weight is own
    assert model.inner.weight is own


def test_tied_weights_stay_tied_though_their_memory_was_given_up():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    weights = {"weight": torch.eye(3)}
    for module in (first, second):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert first.weight is second.weight
    for module in (first, second):
        remove_hook_from_module(module)
    assert first.weight is second.weight
    assert torch.equal(first.weight.detach(), torch.eye(3))


def test_a_tied_module_without_a_hook_keeps_its_weight(x):
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    expected = second(x)
    add_hook_to_module(first, AlignDevicesHook("cpu", offload=True))
    assert torch.equal(second(x), expected)
    remove_hook_from_module(first)
    assert first.weight is second.weight


def test_a_shared_map_of_tied_weights_is_filled_during_calls_only(x):
    value = torch.eye(4)
    tied = {value.data_ptr(): {}}
    seen = []
    hook = AlignDevicesHook("cpu", offload=True, weights_map={"weight": value}, tied_params_map=tied)

    class Look(nn.Linear):
        def forward(self, x):
            seen.append(dict(tied[value.data_ptr()]))
            return super().forward(x)

    module = add_hook_to_module(Look(4, 4, bias=False), hook)
    module(x)
    assert list(seen[0]) == [CPU]
    assert tied == {value.data_ptr(): {}}
    resident = torch.full((4, 4), 2.0)
    tied[value.data_ptr()][CPU] = resident
    assert torch.allclose(module(x), x @ resident.T)
    assert tied[value.data_ptr()][CPU] is resident


@pytest.mark.parametrize("offloaded", [[0, 1], [0], [1]])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_offloaded_modules_are_independent(x, copied, offloaded):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    expected = model(x)
    for module in (model[index] for index in offloaded):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    other = copied(model)
    assert torch.equal(other(x), expected)
    remove_hook_from_module(other, recurse=True)
    assert other[0].weight is other[1].weight
    assert other[0].weight is not model[0].weight
    with torch.no_grad():
        other[0].weight.zero_()
    assert torch.equal(model(x), expected)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(x), expected)
    assert model[0].weight is model[1].weight


def test_hooks_can_be_pickled_before_and_after_use(x):
    for hook in (AlignDevicesHook("cpu"), AlignDevicesHook("cpu", offload=True, weights_map={"a": x})):
        assert repr(pickle.loads(pickle.dumps(hook))) == repr(hook)
    block = add_hook_to_module(Block(), AlignDevicesHook("cpu", offload=True))
    other = pickle.loads(pickle.dumps(block._hf_hook))
    assert torch.equal(other.weights_map["scale"], block._hf_hook.weights_map["scale"])


def test_the_attributes_make_an_equal_hook():
    # As transformers rebuilds hooks when it dequantises a model.
    hook = AlignDevicesHook("cpu", offload=True, skip_keys="a", place_submodules=True, io_same_device=True)
    names = set(AlignDevicesHook.__init__.__annotations__) & vars(hook).keys()
    assert repr(AlignDevicesHook(**{name: getattr(hook, name) for name in names})) == repr(hook)


def test_scales_of_int8_weights_come_along(x):
    weights = {"weight": torch.ones(2, 4, dtype=torch.int8), "SCB": torch.ones(2), "bias": torch.zeros(2)}
    seen = []

    class Look(nn.Linear):
        def forward(self, x):
            seen.append((self.weight.dtype, self.weight.SCB))
            return x

    module = Look(4, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    module(x)
    assert seen[0][0] == torch.int8
    assert torch.equal(seen[0][1], torch.ones(2))


# compilation


@pytest.mark.usefixtures("fresh_compiler")
def test_a_resident_module_compiles_to_one_graph(x):
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for module in block.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))


@pytest.mark.usefixtures("fresh_compiler")
def test_hooked_blocks_compiled_one_by_one_share_their_code(x):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12)))
    with torch.no_grad():
        expected = blocks(x)
        for block in blocks:
            add_hook_to_module(block, AlignDevicesHook("cpu"))
            block.compile(backend="eager", fullgraph=True)  # which refuses to compile a function nine times
        assert torch.equal(blocks(x), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_offloading_runs_outside_of_graphs(x):
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = block(x)
    add_hook_to_module(block, AlignDevicesHook("cpu", io_same_device=True))
    add_hook_to_module(block[2], AlignDevicesHook("cpu", offload=True))
    compiled = torch.compile(block, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
    assert block[2].weight.is_meta
