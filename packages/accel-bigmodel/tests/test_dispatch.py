"""Dispatched models give what they gave in memory, bit for bit, and stay models: state dict, ties, copies, pickles."""

import copy
import gc
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_bigmodel import (
    AlignDevicesHook,
    DeviceMapError,
    ModelHook,
    OffloadError,
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch,
    dispatch_model,
    has_offloaded_params,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_offloaded_weights,
    offload_state_dict,
    offload_stats,
    remove_hook_from_module,
    undispatch,
)
from accel_bigmodel.dispatch import is_dispatched
from accel_bigmodel.hooks.base import hook_of
from accel_bigmodel.streaming.transfer import HostTransfer
from accel_ckpt import (
    FileChangedError,
    StateMismatchError,
    UninitializedTensorError,
    load_checkpoint_in_model,
    save_model,
)
from accel_ckpt.format.memory import mapped_file_of
from accel_ckpt.modules import devices
from testkit.memory import mapped_weights


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(torch.relu(self.norm(self.up(x))))


class Net(nn.Module):
    """Embedding and head are tied; a buffer that no state dict holds."""

    def __init__(self, width=16, depth=4):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, width), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(30) % 40
MAPS = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "mixed": {"embed": "cpu", "head": "cpu", "shift": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk",
              "blocks.3.up": "cpu", "blocks.3.norm": "disk", "blocks.3.down": "disk"},
    "tensors": {"embed": "disk", "head": "disk", "shift": "cpu", "blocks": "cpu"},
}  # fmt: skip


def build(seed=0):
    torch.manual_seed(seed)
    return Net().eval()


@pytest.fixture
def saved(tmp_path):
    save_model(build(), tmp_path / "model", max_shard_size="8KB")
    return tmp_path / "model"


@pytest.fixture
def expected():
    with torch.no_grad():
        return build()(TOKENS)


def load(saved):
    with init_empty_weights():
        model = Net().eval()
    load_checkpoint_in_model(model, saved)  # views of the files
    return model


def answer(model):
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_the_same_bits_under_every_map_on_the_cpu(saved, expected, name, offload_buffers):
    model = dispatch_model(load(saved), MAPS[name], offload_buffers=offload_buffers)
    for _ in range(2):
        assert torch.equal(answer(model), expected)
    assert model.hf_device_map == MAPS[name]
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("device_memory", [None, "12KB"])
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_the_same_bits_under_every_map_with_streaming(saved, expected, name, offload_buffers, device_memory):
    model = dispatch_model(
        load(saved),
        MAPS[name],
        offload_buffers=offload_buffers,
        device_memory=device_memory,
        transfer=HostTransfer(),
    )
    for _ in range(3):
        assert torch.equal(answer(model), expected)
    assert model.head.weight is model.embed.weight
    assert offload_stats(model).bytes_moved > 0
    undispatch(model)
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("transfer", [None, HostTransfer])
def test_t11_disk_offload_of_a_checkpoint_writes_nothing(saved, expected, tmp_path, transfer):
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    model = load(saved)
    disk_offload(model, tmp_path / "offload", transfer=transfer and transfer())
    assert torch.equal(answer(model), expected)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    assert all(mapped_file_of(parameter) for parameter in model.parameters())


def test_t10_another_model_s_offload_folder_is_not_served(tmp_path, expected):
    first, second = build(), build(1)
    wanted = answer(second)
    disk_offload(first, tmp_path / "offload")
    disk_offload(second, tmp_path / "offload")
    assert torch.equal(answer(first), expected)
    assert torch.equal(answer(second), wanted)
    again = disk_offload(build(), tmp_path / "offload")
    assert torch.equal(answer(again), expected)
    assert len(list((tmp_path / "offload").glob("*.safetensors"))) == 2  # the third one found its own


def test_weights_in_memory_need_a_folder_to_wait_on_disk():
    model = build()
    with pytest.raises(OffloadError, match=r"blocks\.0\.up\.weight.*pass offload_dir"):
        dispatch_model(model, {"": "disk"})
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("make", [lambda m: cpu_offload(m, transfer=HostTransfer()), cpu_offload])
def test_cpu_offload(expected, make):
    model = make(build())
    assert torch.equal(answer(model), expected)


def test_state_dict_has_the_values(saved):
    wanted = build().state_dict()
    for model in (
        dispatch_model(load(saved), {"": "disk"}),
        disk_offload(load(saved), None, transfer=HostTransfer()),
        cpu_offload(build(), transfer=HostTransfer()),
    ):
        answer(model)
        found = model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("transfer", [None, HostTransfer])
def test_t32_saving_a_dispatched_model_over_its_own_checkpoint(saved, expected, transfer):
    model = disk_offload(load(saved), None, transfer=transfer and transfer())
    save_model(model, saved, max_shard_size="8KB")
    assert torch.equal(answer(model), expected)
    again = load(saved)
    assert again.head.weight is again.embed.weight
    assert torch.equal(answer(again), expected)


def test_a_file_that_is_changed_in_place_is_found_at_the_next_forward(saved):
    model = dispatch_model(load(saved), {"": "disk"})
    answer(model)
    victim = mapped_file_of(model.blocks[1].up.weight).path
    with open(victim, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(FileChangedError, match=str(victim)):
        answer(model)


def test_edits_stay_with_the_model_and_off_the_file(saved, expected):
    model = dispatch_model(load(saved), {"": "disk"})
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    changed = answer(model)
    assert not torch.equal(changed, expected)
    assert torch.equal(answer(load(saved)), expected)
    streamed = disk_offload(model, None, transfer=HostTransfer())
    assert torch.equal(answer(streamed), changed)


@pytest.mark.parametrize("transfer", [None, HostTransfer])
def test_a_copy_is_independent(saved, expected, transfer):
    model = disk_offload(load(saved), None, transfer=transfer and transfer())
    other = copy.deepcopy(model)
    assert other.head.weight is other.embed.weight
    with torch.no_grad():
        other.blocks[0].up.weight.zero_()
    assert torch.equal(answer(model), expected)
    assert not torch.equal(answer(other), expected)
    del model
    gc.collect()
    answer(other)


def test_a_pickle_is_a_model_in_memory(saved, expected):
    model = dispatch_model(load(saved), {"": "disk"})
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(answer(other), expected)


@pytest.mark.parametrize("method", ["to", "cuda", "cpu"])
def test_a_model_whose_weights_are_streamed_cannot_be_moved(saved, expected, method):
    model = disk_offload(load(saved), None, transfer=HostTransfer())
    with pytest.raises(OffloadError, match=rf"model\.{method}\(\).*undispatch"):
        getattr(model, method)(*(["cpu"] if method == "to" else []))
    assert torch.equal(answer(model), expected)
    undispatch(model).to("cpu")
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda model: torch.compile(model, backend="eager")])
def test_nor_with_what_contains_it(expected, wrap):
    model = cpu_offload(build(), transfer=HostTransfer())
    with pytest.raises(OffloadError, match=r"model\.to\(\).*undispatch"):
        wrap(model).to("meta")
    assert torch.equal(answer(model), expected)
    assert answer(wrap(model).bfloat16()).dtype == torch.bfloat16
    undispatch(model)
    wrap(model).to("meta")


def test_a_model_that_was_compiled_first_is_guarded_on_both_sides(expected):
    model = build()
    compiled = cpu_offload(torch.compile(model, backend="eager"), transfer=HostTransfer())
    for each in (model, compiled):
        with pytest.raises(OffloadError, match=r"model\.cpu\(\)"):
            each.cpu()
    undispatch(compiled)
    assert torch.equal(answer(compiled.cpu()), expected)
    assert model.cpu() is model


def test_a_module_that_is_added_later_works_where_everything_computes_on_the_host(saved):
    model = dispatch_model(load(saved), {"": "disk"})
    model.blocks.append(Block(16).eval())
    assert answer(model).shape == (30, 40)


def test_a_model_that_was_not_dispatched_has_no_figures(saved):
    with pytest.raises(OffloadError, match="Net was not dispatched"):
        offload_stats(build())
    assert offload_stats(dispatch_model(load(saved), {"": "disk"})) is None


def test_dispatching_again_replaces_the_first_map(saved, expected):
    model = disk_offload(load(saved), None, transfer=HostTransfer())
    dispatch_model(model, {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert model._accel_dispatch.mover is None
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize(
    ("device_map", "match"),
    [
        ({"embed": "cpu"}, "blocks"),
        ({"": "cpu", "nothing.here": "disk"}, r"nothing\.here"),
        ({"": "nonsense"}, "nonsense"),
        ({"": 99}, "99"),
    ],
)
def test_maps_that_do_not_fit(device_map, match):
    model = build()
    with pytest.raises(DeviceMapError, match=match):
        dispatch_model(model, device_map)
    assert not hasattr(model, "hf_device_map")


def test_tensors_without_values_are_refused():
    with init_empty_weights():
        model = Net()
    with pytest.raises(UninitializedTensorError, match=r"blocks\.0\.up\.weight"):
        dispatch_model(model, {"": "cpu"})


def test_values_of_a_state_dict_fill_the_meta_device(expected):
    with init_empty_weights():
        model = Net().eval()
    cpu_offload(model, state_dict=build().state_dict())
    assert torch.equal(answer(model), expected)
    assert model.head.weight is model.embed.weight


def test_values_of_another_shape_are_refused():
    with init_empty_weights():
        model = Net(width=8)
    with pytest.raises(StateMismatchError, match="shape"):
        cpu_offload(model, state_dict=build().state_dict())


def test_no_hook_runs_on_the_cpu_but_one_at_the_top(saved):
    model = dispatch_model(load(saved), {"": "disk"})
    for name, module in model.named_modules():
        if name:
            assert "forward" not in module.__dict__
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert not has_offloaded_params(module)


def test_streamed_modules_are_known_as_offloaded(saved):
    model = disk_offload(load(saved), None, transfer=HostTransfer())
    assert has_offloaded_params(model.blocks[0])


def test_a_model_bigger_than_the_memory_it_may_have_is_paged(saved, expected):
    model = dispatch_model(load(saved), {"": "disk"}, host_memory="20KB")
    assert model._accel_dispatch.mover is not None
    assert torch.equal(answer(model), expected)


def where(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (id(tensor), tensor.device, tensor.is_meta or tensor.data_ptr()) for name, tensor in tensors
    }


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device_memory": "1KB"}, DeviceMapError, "budget of 1,000 bytes"),
        ({"device_memory": "lots"}, ValueError, "lots"),
        ({"device_map": {"": "disk"}}, OffloadError, "pass offload_dir"),
        ({"device_map": {"embed": "cpu"}}, DeviceMapError, "blocks"),
        ({"device_map": "auto"}, DeviceMapError, "device_map is 'auto'; give a map"),
        ({"device_map": None}, DeviceMapError, "device_map is None; give a map"),
        ({"device_map": {"embed": "meta", "": "cpu"}}, DeviceMapError, "leaves 'embed' without values"),
        ({"main_device": 99}, DeviceMapError, "main_device is 99, but this machine has"),
        ({"main_device": "disk"}, DeviceMapError, "main_device is 'disk', which cannot compute"),
        ({"main_device": "meta"}, DeviceMapError, "main_device is 'meta', which cannot compute"),
        ({"main_device": "gpu"}, DeviceMapError, "main_device is 'gpu', which is not a device"),
        ({"offload_dir": 3}, OffloadError, "offload_dir is 3; give the path of a folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_changed(expected, dispatched, options, error, match):
    model = build()
    if dispatched:
        cpu_offload(model, transfer=HostTransfer(), device_memory="12KB")
    attached, before = model.__dict__.get("_accel_dispatch"), where(model)
    with pytest.raises(error, match=match):
        dispatch_model(model, **{"device_map": {"": "cpu"}, "transfer": HostTransfer(), **options})
    assert model.__dict__.get("_accel_dispatch") is attached
    assert where(model) == before
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize(
    ("values", "options", "error", "match"),
    [
        (
            lambda: {"embed.weight": torch.zeros(40, 16)},
            {},
            UninitializedTensorError,
            r"blocks\.0\.up\.weight",
        ),
        (
            lambda: Net(width=8).state_dict(),
            {},
            StateMismatchError,
            r"'embed\.weight' has the shape \(40, 16\)",
        ),
        (lambda: build().state_dict(), {"device_memory": "1KB"}, DeviceMapError, "budget of 1,000 bytes"),
    ],
)
def test_no_tensor_is_filled_before_all_is_known_to_be_right(values, options, error, match):
    with init_empty_weights():
        model = Net()
    before = where(model)
    with pytest.raises(error, match=match):
        cpu_offload(model, state_dict=values(), transfer=HostTransfer(), **options)
    assert where(model) == before


def test_values_that_are_mapped_need_no_folder_to_wait_on_disk(saved, expected):
    save_model(build(), saved)
    values = mapped_weights(saved / "model.safetensors")
    with init_empty_weights():
        model = Net().eval()
    dispatch_model(model, {"": "disk"}, state_dict=values, transfer=HostTransfer())
    assert torch.equal(answer(model), expected)
    assert all(mapped_file_of(parameter) for parameter in model.parameters())


def test_weights_that_stay_on_the_device_are_known_to_be_in_files(saved, expected):
    model = disk_offload(load(saved), None, transfer=HostTransfer(), device_memory="24KB")
    assert offload_stats(model).resident_bytes
    disk_offload(model, None, transfer=HostTransfer())
    assert torch.equal(answer(model), expected)
    assert all(mapped_file_of(parameter) for parameter in model.parameters())


def test_values_under_either_name_of_tied_weights(expected):
    state = build().state_dict()
    for name in ("embed.weight", "head.weight"):
        with init_empty_weights():
            model = Net().eval()
            model.head.weight = model.embed.weight
        cpu_offload(model, state_dict={key: value for key, value in state.items() if key != name})
        assert torch.equal(answer(model), expected)
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("first", ["compile", "dispatch"])
def test_a_compiled_model_knows_of_its_dispatch(expected, first):
    model = build()
    if first == "dispatch":
        cpu_offload(model, transfer=HostTransfer())
    compiled = torch.compile(model, backend="eager")
    if first == "compile":
        cpu_offload(compiled, transfer=HostTransfer())
    assert torch.equal(answer(compiled), expected)
    assert offload_stats(compiled).bytes_moved
    undispatch(compiled)
    assert "forward" not in model.blocks[0].__dict__
    with pytest.raises(OffloadError, match="not dispatched"):
        offload_stats(compiled)


def test_a_module_of_torch_jit_goes_to_a_device_as_a_whole():
    model = torch.jit.script(nn.Linear(2, 2))
    assert dispatch_model(model, {"": "cpu"})(torch.ones(1, 2)).shape == (1, 2)


def test_modules_of_torch_jit_are_refused():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.Linear(2, 2)
            self.compiled = torch.jit.script(nn.Linear(2, 2))

    model = Holder()
    with pytest.raises(OffloadError, match=r"'compiled' was compiled by torch\.jit"):
        cpu_offload(model, transfer=HostTransfer())
    assert not hasattr(model, "hf_device_map")


def test_taking_back_while_a_forward_runs_leaves_the_model_dispatched(expected):
    model = cpu_offload(build(), transfer=HostTransfer())
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: undispatch(model))
    with pytest.raises(OffloadError, match="while a forward"):
        answer(model)
    handle.remove()
    assert torch.equal(answer(model), expected)


class Full(HostTransfer):
    """A device without memory."""

    def allocate(self, nbytes):
        raise torch.OutOfMemoryError("no memory")


def test_a_device_without_memory_for_what_stays_leaves_the_model_as_it_was(expected):
    model = build()
    before = where(model)
    with pytest.raises(torch.OutOfMemoryError):
        cpu_offload(model, transfer=Full(), device_memory="1MB")
    assert where(model) == before
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_that_fail_in_the_middle_are_taken_off(expected, monkeypatch, error):
    def fail(model):
        raise error("no encoder")

    model = build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_encoder_hook", fail)
        with pytest.raises(error, match="no encoder"):
            cpu_offload(model, transfer=HostTransfer())
    assert not hasattr(model, "hf_device_map")
    assert not hasattr(model, "_accel_dispatch")
    assert all("forward" not in module.__dict__ and "to" not in module.__dict__ for module in model.modules())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert torch.equal(answer(model), expected)
    assert torch.equal(answer(cpu_offload(model, transfer=HostTransfer())), expected)


class PlusOne(ModelHook):
    def post_forward(self, module, output):
        return output + 1


def test_hooks_of_users_stay_and_keep_no_weights_from_moving(expected):
    model = build()
    for module in (model, *model.blocks):
        add_hook_to_module(module, PlusOne())
    expected = answer(model)
    dispatch_model(model, {"embed": "cpu", "head": "cpu", **{f"blocks.{number}": "cpu" for number in range(4)}},
                   transfer=HostTransfer(), force_hooks=True)  # fmt: skip
    added_later = PlusOne()
    add_hook_to_module(model, added_later, append=True)
    assert torch.equal(answer(model), expected + 1)
    assert offload_stats(model).hits == 6
    undispatch(model)
    assert torch.equal(answer(model), expected + 1)
    assert [hook_of(module) for module in model.modules() if type(hook_of(module)) is AlignDevicesHook] == []
    remove_hook_from_module(model, recurse=True)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_weights_go_on_moving_when_a_user_takes_a_hook_off(expected):
    model = build()
    add_hook_to_module(model.blocks[0], PlusOne())
    cpu_offload(model, transfer=HostTransfer())
    remove_hook_from_module(model.blocks[0])
    assert torch.equal(answer(model), expected)
    assert offload_stats(model).hits == 6
    undispatch(model)
    assert torch.equal(answer(model), expected)


def test_what_streams_under_hooks_is_known():
    model = dispatch_model(
        build(),
        dict.fromkeys(("embed", "head", "blocks"), "cpu"),
        transfer=HostTransfer(),
        force_hooks=True,
    )
    with pytest.raises(OffloadError, match="streamed already"):
        cpu_offload(nn.Sequential(model), transfer=HostTransfer())
    twin = undispatch(copy.deepcopy(model))
    assert all("forward" not in module.__dict__ for module in twin.modules())


def test_a_default_device_does_not_take_what_belongs_in_host_memory(tmp_path, expected):
    model = build()
    model.register_buffer("nothing", torch.zeros(0, 3))
    save_model(model, tmp_path)
    with torch.device("meta"), torch.no_grad():
        load_checkpoint_in_model(model, tmp_path)
        cpu_offload(model, "cpu", transfer=HostTransfer())
        assert torch.equal(model(TOKENS), expected)
    assert all(tensor.is_cpu for tensor in model.state_dict().values())


def test_a_move_that_fails_in_the_middle_is_undone(monkeypatch):
    plan = dispatch._Plan(
        build(), {"": torch.device("meta")}, torch.device("meta"), streams=False, buffers=False
    )
    before = where(plan.model)
    plan.homes[id(plan.model.blocks[2].up.weight)] = torch.device("cuda:99")  # here there is none
    with pytest.raises((RuntimeError, AssertionError)):
        plan.move()
    assert where(plan.model) == before


def test_what_waits_in_host_memory_is_gathered_and_what_waits_on_disk_stays_there(saved, expected):
    model = dispatch_model(load(saved), MAPS["mixed"], transfer=HostTransfer())
    names = [name for name, parameter in model.named_parameters() if mapped_file_of(parameter) is None]
    assert {name.rpartition(".")[0] for name in names} == {
        "embed", "blocks.1.up", "blocks.1.norm", "blocks.1.down",
    }  # fmt: skip
    assert torch.equal(answer(model), expected)
    assert offload_stats(model).page_locked_bytes == sum(
        parameter.nbytes for name, parameter in model.named_parameters() if name in names
    )


@pytest.fixture
def fake_accelerators(monkeypatch):
    """Two devices of tensors without values: an operation on tensors of two devices is an error there, too."""
    monkeypatch.setattr(devices, "device_count", lambda kind: 2)
    with torch.no_grad(), FakeTensorMode():  # autograd would look for a real device
        yield


class Scale(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("skip_keys", [None, "mask"])
def test_inputs_follow_the_weights_from_device_to_device(fake_accelerators, skip_keys):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Scale("cuda:0")
            self.second = Inner("cuda:1")
            self.last = Scale("cuda:0")

        def forward(self, x, mask):
            return {"scores": self.last(self.second(self.first(x), mask=mask)), "mask": mask}

    class Inner(Scale):
        def forward(self, x, mask):
            seen.append(mask.device)
            return super().forward(x)

    seen = []
    model = dispatch_model(Masked(), {"first": 0, "second": 1, "last": 0}, skip_keys=skip_keys)
    found = model(torch.ones(3, 4), mask=torch.ones(3))
    assert found["scores"].device == torch.device("cpu")  # where the input was
    assert seen == [torch.device("cpu" if skip_keys else "cuda:1")]
    assert found["mask"].device == torch.device("cpu")
    with pytest.raises(OffloadError, match=r"model\.to\(\)"):
        model.to("cpu")
    with pytest.raises(RuntimeError, match=r"devices,? cuda:0(,| and) cuda:1"):
        undispatch(model)(torch.ones(3, 4, device="cuda:0"), mask=torch.ones(3))


def test_a_module_that_is_added_later_is_named_when_it_is_on_the_wrong_device(fake_accelerators):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Scale("cuda:0")
            self.second = Scale("cuda:1")

        def forward(self, x):
            for layer in self.children():
                x = layer(x)
            return x

    model = dispatch_model(Two(), {"first": 0, "second": 1})
    model(torch.ones(3, 4))
    model.added = Scale("cpu")
    with pytest.raises(
        OffloadError,
        match=r"added after dispatch and are not in the device map: added\.weight \(on cpu\).*dispatch_model",
    ):
        model(torch.ones(3, 4))


class UsesItsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fails_with = "Expected all tensors to be on the same device"

    def forward(self, x):
        raise RuntimeError(self.fails_with)


def test_a_module_that_uses_weights_of_its_children_is_named_when_these_are_elsewhere():
    model = dispatch_model(UsesItsChild(), {"": "cpu"}, transfer=HostTransfer(), force_hooks=True)
    with pytest.raises(OffloadError, match=r"same device.*preload_module_classes=\['UsesItsChild'\]"):
        model(torch.ones(1, 4))
    model.fails_with = "something else"
    with pytest.raises(RuntimeError, match=r"^something else$"):
        model(torch.ones(1, 4))


def test_one_device_needs_no_hook(fake_accelerators):
    model = dispatch_model(Scale("cuda:0"), {"": 0})
    assert not hasattr(model, "_hf_hook")
    assert "to" not in vars(model)
    model = dispatch_model(model, {"": 0}, force_hooks=True)
    assert model(torch.ones(3, 4)).device == torch.device("cpu")


def test_hooks_tell_other_libraries_what_they_ask(fake_accelerators):
    """PEFT builds a module's hook anew by the name of its class; diffusers asks a model's hooks where it computes."""
    model = nn.Sequential(Scale("cuda:0"), Scale("cuda:1"))
    dispatch_model(model, {"0": 0, "1": 1})
    assert [type(layer._hf_hook) for layer in model] == [AlignDevicesHook] * 2
    assert [str(layer._hf_hook.execution_device) for layer in model] == ["cuda:0", "cuda:1"]
    assert str(model._hf_hook.execution_device) == "cuda:0"


def test_weights_that_were_offloaded_before_are_found_by_their_index(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    expected = model(x)
    offload_state_dict(
        tmp_path, {name: value for name, value in model.state_dict().items() if name[0] == "1"}
    )
    model[1].to("meta")
    with pytest.raises(UninitializedTensorError, match=r"1\.weight"):
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path / "empty")
    found = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    torch.testing.assert_close(found(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["dispatch", "offloaded folder", "checkpoint"])
def test_buffers_of_two_modules_stay_one_when_they_get_their_values(way, tmp_path):
    def build():
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))
        model[1][0].running_mean = model[0].running_mean
        return model

    values = build().state_dict() | {"0.running_mean": torch.ones(3), "1.0.running_mean": torch.ones(3)}
    with init_empty_weights(include_buffers=True):
        model = build()
    if way == "dispatch":
        dispatch_model(model, {"": "cpu"}, state_dict=values)
    elif way == "offloaded folder":
        offload_state_dict(tmp_path, values)
        load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    else:
        save_file({name: value.clone() for name, value in values.items()}, tmp_path / "model.safetensors")
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    assert model[0].running_mean is model[1][0].running_mean
    assert model[0].running_mean.tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_a_model_without_a_map_of_the_user_has_none(way, saved, expected):
    model = load(saved)
    cpu_offload(model, "cpu") if way == "cpu" else disk_offload(model, None, "cpu")
    assert not hasattr(model, "hf_device_map")
    assert is_dispatched(model)
    assert torch.equal(answer(model), expected)
    undispatch(model)
    assert not is_dispatched(model)
    assert is_dispatched(dispatch_model(model, {"": "cpu"}))
    undispatch(model)
    assert not hasattr(model, "hf_device_map")
