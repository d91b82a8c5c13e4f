"""Hooks and folders of offloaded weights beside those of the real Accelerate 1.15.

Each scenario is run with the names of either library; what can be seen of it from outside must be the same. Where ours
differs on purpose, the test says how. Run with `hatch run engines:accelerate`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="hatch run engines:accelerate installs it")

NAMES = [
    *(
        "ModelHook",
        "SequentialHook",
        "AlignDevicesHook",
        "CpuOffload",
        "UserCpuOffloadHook",
        "LayerwiseCastingHook",
    ),
    *("add_hook_to_module", "remove_hook_from_module", "remove_hook_from_submodules"),
    *("attach_execution_device_hook", "attach_align_device_hook", "attach_align_device_hook_on_blocks"),
    *(
        "attach_layerwise_casting_hooks",
        "cpu_offload_with_hook",
        "align_module_device",
        "has_offloaded_params",
    ),
    *("get_state_dict_offloaded_model", "get_state_dict_from_offload", "extract_submodules_state_dict"),
    *("offload_weight", "load_offloaded_weight", "save_offload_index", "offload_state_dict"),
    *("load_offloaded_weights", "OffloadedWeightsLoader", "PrefixedDataset"),
]
HOMES = ("hooks", "big_modeling", "utils.modeling", "utils.offload", "utils")


def of_accelerate():
    homes = [importlib.import_module(f"accelerate.{home}") for home in HOMES]
    return SimpleNamespace(
        **{name: next(getattr(home, name) for home in homes if hasattr(home, name)) for name in NAMES}
    )


def ours():
    package = importlib.import_module("accel_bigmodel")
    return SimpleNamespace(**{name: getattr(package, name) for name in NAMES})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.ones(4))
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU()
        self.linear2 = nn.Linear(4, 5)
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.eval()

    def forward(self, x, scale=1.0):
        return self.linear2(self.act(self.norm(self.linear1(x))) * self.own + self.hidden) * scale


def x():
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def look(model):
    """What can be seen of a model: where its tensors are, what they are, and which modules have hooks."""
    tensors = {
        name: (
            tensor.device.type,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.requires_grad,
            type(tensor).__name__,
        )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    hooks = {
        name: [type(hook).__name__, getattr(hook, "offload", None), getattr(hook, "io_same_device", None)]
        for name, module in model.named_modules()
        if (hook := getattr(module, "_hf_hook", None)) is not None
    }
    forwards = {name for name, module in model.named_modules() if hasattr(module, "_old_forward")}
    return tensors, hooks, forwards, str(inspect.signature(model.forward))


def run(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).clone()


def replaced_and_appended(lib):
    model = Model()
    lib.add_hook_to_module(model, lib.ModelHook())
    lib.add_hook_to_module(model.linear1, lib.AlignDevicesHook("cpu"))
    lib.add_hook_to_module(model.linear1, lib.ModelHook(), append=True)
    lib.add_hook_to_module(model.linear1, lib.ModelHook(), append=True)
    seen = [look(model), run(model, x()), [type(hook).__name__ for hook in model.linear1._hf_hook.hooks]]
    lib.remove_hook_from_module(model.linear1)
    seen.append(look(model))
    lib.remove_hook_from_submodules(model)
    return [*seen, look(model), run(model, x())]


def placed(lib):
    model = Model()
    lib.attach_execution_device_hook(model, "meta", skip_keys=["a"])
    return [look(model), model(x()).device, model.linear2._hf_hook.skip_keys]


def placed_whole(lib):
    model = Model()
    lib.attach_align_device_hook_on_blocks(model, execution_device="cpu")
    return [look(model), run(model, x())]


def offloaded(lib, **options):
    model = Model()
    lib.attach_align_device_hook(model, "cpu", offload=True, **options)
    seen = [look(model), run(model, x()), look(model), run(copy.deepcopy(model), x())]
    seen += [lib.has_offloaded_params(module) for module in model.modules()]
    with lib.align_module_device(model.linear1):
        seen += [look(model), model.linear1.weight.detach().clone()]
    with lib.align_module_device(model.linear1, "meta"):
        seen.append(look(model))
    state = lib.get_state_dict_from_offload(
        model.linear1, "linear1.weight", {"linear1.weight": 0, "other": 0}
    )
    seen += [look(model), state["linear1.weight"].clone(), sorted(state)]
    lib.remove_hook_from_submodules(model)
    return [*seen, look(model), run(model, x())]


def offloaded_with_buffers(lib):
    return offloaded(lib, offload_buffers=True)


def offloaded_from_a_map(lib):
    model = Model()
    # Parameters only: Accelerate gives buffers that it never offloaded the values of the map when the hook goes.
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    lib.attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
    seen = [look(model), run(model, x()), model.linear1._hf_hook.weights_map["weight"].clone()]
    lib.remove_hook_from_submodules(model)
    return [*seen, look(model), run(model, x())]


def preloaded(lib):
    model = nn.Sequential(Model(), nn.Linear(5, 2)).eval()
    lib.attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Model"])
    return [look(model), run(model, x())]


def blocks(lib):
    model = Model()
    devices = dict.fromkeys(["own", "linear1", "norm", "act", "linear2"], "cpu")
    offload = {"own": False, "linear1": True, "norm": False, "act": False, "linear2": True}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lib.attach_align_device_hook_on_blocks(model, devices, offload, weights_map=weights)
    return [look(model), run(model, x())]


def turns(lib):
    model, hook = lib.cpu_offload_with_hook(Model(), "cpu")
    second, _ = lib.cpu_offload_with_hook(nn.Linear(5, 5), "cpu", prev_module_hook=hook)
    seen = [look(model), run(model, x()), torch.device(model._hf_hook.execution_device), hook.model is model]
    hook.offload()
    hook.remove()
    return [*seen, look(model), look(second)]


def cast(lib):
    model = Model()
    lib.attach_layerwise_casting_hooks(
        model,
        torch.float8_e4m3fn,
        torch.float32,
        skip_modules_pattern=("norm",),
        skip_modules_classes=(nn.ReLU,),
    )
    return [look(model), run(model, x()), look(model), run(model, x())]


def cast_some(lib):
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ConvTranspose1d(1, 1, 1), nn.Bilinear(1, 1, 1), Model())
    lib.attach_layerwise_casting_hooks(
        model,
        torch.float16,
        torch.float32,
        skip_modules_pattern=["linear1$"],
        skip_modules_classes=(nn.Conv2d,),
    )
    return look(model)


SCENARIOS = [
    replaced_and_appended,
    placed,
    placed_whole,
    offloaded,
    offloaded_with_buffers,
    offloaded_from_a_map,
    preloaded,
    blocks,
    turns,
    cast,
    cast_some,
]


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_same_can_be_seen(scenario):
    theirs, own = scenario(of_accelerate()), scenario(ours())
    for number, (expected, found) in enumerate(zip(theirs, own, strict=True)):
        assert equal(expected, found), f"observation {number}: {found!r} instead of {expected!r}"


@pytest.mark.parametrize(("adder", "remover"), [(of_accelerate, ours), (ours, of_accelerate)])
def test_either_takes_the_hooks_of_the_other_off(adder, remover):
    model, expected = Model(), run(Model(), x())
    adder().attach_align_device_hook(model, "cpu", offload=True)
    assert torch.equal(run(model, x()), expected)
    remover().remove_hook_from_submodules(model)
    assert look(model) == look(Model())
    assert torch.equal(run(model, x()), expected)


def test_the_state_dict_of_an_offloaded_model():
    model, theirs = Model(), Model()
    for lib, each in ((ours(), model), (of_accelerate(), theirs)):
        lib.attach_align_device_hook(each, "cpu", offload=True)
    found = ours().get_state_dict_offloaded_model(model)
    expected = of_accelerate().get_state_dict_offloaded_model(theirs)
    # Accelerate forgets the parameters of the outermost module.
    assert found.keys() - expected.keys() == {"own"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize(("writer", "reader"), [(of_accelerate, ours), (ours, of_accelerate)])
def test_either_reads_the_folders_of_the_other(tmp_path, writer, reader):
    state_dict = {f"{dtype}"[6:]: torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    state_dict["scalar"] = torch.tensor(2.5)
    writer().offload_state_dict(tmp_path, state_dict)
    found = reader().OffloadedWeightsLoader(save_folder=tmp_path)
    assert sorted(found) == sorted(state_dict)
    for name, expected in state_dict.items():
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert torch.equal(found[name].float(), expected.float())
    model, index = Model(), {}
    for name, tensor in model.state_dict().items():
        writer().offload_weight(tensor + 1, name, tmp_path, index)
    reader().load_offloaded_weights(other := Model(), index, tmp_path)
    assert all(
        torch.equal(tensor, model.state_dict()[name] + 1) for name, tensor in other.state_dict().items()
    )


def test_the_folders_are_the_same_bytes(tmp_path):
    state_dict = {
        **Model().state_dict(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(1),
    }
    for name, lib in (("theirs", of_accelerate()), ("ours", ours())):
        lib.offload_state_dict(tmp_path / name, state_dict)
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "ours").iterdir())
    for file in files:
        expected, found = ((tmp_path / name / file).read_bytes() for name in ("theirs", "ours"))
        assert found == expected if file != "index.json" else json.loads(found) == json.loads(expected)


def can_be_pickled(value):
    try:
        pickle.loads(pickle.dumps(value))
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda lib: lib.ModelHook(),
        lambda lib: lib.SequentialHook(lib.ModelHook(), lib.AlignDevicesHook("cpu")),
        lambda lib: lib.AlignDevicesHook("cpu", offload=True),
        lambda lib: lib.CpuOffload("cpu"),
        lambda lib: lib.LayerwiseCastingHook(torch.float16, torch.float32, False),
    ],
)
def test_what_can_be_pickled_there_can_be_pickled_here(make):
    stages = []
    for lib in (of_accelerate(), ours()):
        model, hook = Model(), make(lib)
        stage = [can_be_pickled(hook)]
        lib.add_hook_to_module(model, hook)
        stage += [can_be_pickled(hook), can_be_pickled(model)]
        lib.remove_hook_from_module(model)
        stages.append([*stage, can_be_pickled(model)])
    theirs, own = stages
    assert theirs == [True, True, False, True]
    assert own == [True] * 4


def test_signatures_take_the_same_arguments_in_the_same_order():
    theirs, own = of_accelerate(), ours()
    for name in NAMES:
        expected, found = (inspect.signature(getattr(lib, name)).parameters.values() for lib in (theirs, own))
        assert [(p.name, p.kind, p.default) for p in found] == [
            (p.name, p.kind, p.default) for p in expected
        ], name
