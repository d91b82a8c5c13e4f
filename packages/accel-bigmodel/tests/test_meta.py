from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, init_on_device, set_module_tensor_to_device
from accel_ckpt import check_nothing_on_meta, find_tied_parameters
from accel_ckpt.errors import UninitializedTensorError
from accel_state import patch_environment
from accel_state.errors import ConfigError


class Special(nn.Parameter):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("saved", torch.arange(4.0))
        self.register_buffer("derived", self.saved * 2, persistent=False)
        self.register_buffer("nothing", None)


def devices(module):
    return {name: t.device.type for name, t in (*module.named_parameters(), *module.named_buffers())}


def test_parameters_have_no_memory():
    with init_empty_weights():
        model = Model()
    assert {devices(model)[n] for n, _ in model.named_parameters()} == {"meta"}
    assert {devices(model)[n] for n, _ in model.named_buffers()} == {"cpu"}
    plain = Model()
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_more_than_any_memory():
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(100)])
    assert sum(p.numel() for p in model.parameters()) > 10**10


def test_a_parameter_larger_than_any_memory():
    with init_empty_weights():
        model = nn.Linear(2**22, 2**24)
    assert model.weight.nbytes == 2**48
    with pytest.raises(RuntimeError, match="memory"), init_empty_weights(), init_on_device("cpu"):
        nn.Linear(2**22, 2**24)
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(2**46)
    with pytest.raises(TypeError), init_empty_weights():
        torch.empty("many")


def test_t31_persistent_buffers_are_emptied_and_others_keep_their_values():
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(Model(), Model())
    found = devices(model)
    assert found["0.saved"] == found["1.saved"] == found["0.norm.running_mean"] == "meta"
    assert found["1.norm.num_batches_tracked"] == "meta"
    for part in model:
        assert part.derived.tolist() == [0.0, 2.0, 4.0, 6.0]
    model.load_state_dict(nn.Sequential(Model(), Model()).state_dict(), assign=True)
    check_nothing_on_meta(model)


class Derived(nn.Module):
    """Computes with a buffer of its own, and with one of a child, after other modules have registered theirs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))
        self.angles *= 2
        self.register_buffer("doubled", self.angles * 2, persistent=False)
        self.highest = float(self.angles.max())


def test_constructors_compute_with_their_buffers():
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(Derived(), Derived())
        assert {model[0].angles.device.type, model[1].norms[1].running_mean.device.type} == {"meta"}, (
            "memory is given back while the model is built"
        )
    for part in model:
        assert part.doubled.tolist() == [0.0, 4.0, 8.0, 12.0]
        assert part.highest == 6.0
    assert {kind for name, kind in devices(model).items() if not name.endswith("doubled")} == {"meta"}


def test_buffers_that_replace_others():
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(Model())
        model[0].saved = torch.ones(4)
        model[0].other = nn.Buffer(torch.ones(2))
        model[0].hidden = nn.Buffer(torch.ones(2), persistent=False)
    found = devices(model)
    assert found["0.saved"] == found["0.other"] == "meta"
    assert found["0.hidden"] == "cpu"


def test_with_torch_device_meta_is_found_out():
    with torch.device("meta"):
        model = Model()
    model.load_state_dict(Model().state_dict(), assign=True)
    with pytest.raises(UninitializedTensorError, match="derived"):
        check_nothing_on_meta(model)


def test_default_comes_from_the_environment():
    with patch_environment(ACCELERATE_INIT_INCLUDE_BUFFERS="yes"), init_empty_weights():
        assert nn.BatchNorm1d(2).running_mean is not None
        norm = nn.BatchNorm1d(2)
    assert norm.running_mean.device.type == "meta"
    with patch_environment(ACCELERATE_INIT_INCLUDE_BUFFERS="yes"), init_empty_weights(include_buffers=False):
        norm = nn.BatchNorm1d(2)
    assert norm.running_mean.device.type == "cpu"
    with (
        patch_environment(ACCELERATE_INIT_INCLUDE_BUFFERS="perhaps"),
        pytest.raises(ConfigError, match="ACCELERATE_INIT_INCLUDE_BUFFERS"),
        init_empty_weights(),
    ):
        pass


def test_class_attributes_and_requires_grad_are_kept():
    with init_empty_weights():
        module = nn.Module()
        special = Special(torch.ones(2), requires_grad=False)
        special.note = "kept"
        module.special = special
        module.counts = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    assert type(module.special) is Special
    assert module.special.note == "kept"
    assert not module.special.requires_grad
    assert module.counts.dtype == torch.int8
    assert special.device.type == "cpu", "the parameter that was handed in is left as it was"


class Scaled(nn.Parameter):
    """Its constructor wants more than a tensor."""

    def __new__(cls, data, scale):
        made = torch.Tensor._make_subclass(cls, data, True)
        made.scale = scale
        return made

    def __init__(self, data, scale):
        pass


def test_parameters_whose_constructor_wants_more():
    with init_empty_weights():
        module = nn.Module()
        module.weight = Scaled(torch.ones(2), 3)
    set_module_tensor_to_device(module, "weight", "cpu", torch.full((2,), 5.0))
    assert type(module.weight) is Scaled
    assert module.weight.scale == 3
    assert module.weight.tolist() == [5.0, 5.0]


def test_ties_stay_ties():
    with init_empty_weights():
        model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
        model["b"].weight = model["a"].weight
        shared = nn.Parameter(torch.ones(3))
        model["a"].bias = shared
        model["b"].bias = shared
    assert find_tied_parameters(model) == [["a.weight", "b.weight"], ["a.bias", "b.bias"]]
    assert devices(model) == {"a.weight": "meta", "a.bias": "meta"}


def test_tied_buffers_stay_tied():
    with init_empty_weights(include_buffers=True):
        table = torch.ones(3)
        model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
        model["a"].register_buffer("table", table)
        model["b"].register_buffer("table", table)
    assert model["a"].table is model["b"].table
    assert model["a"].table.device.type == "meta"


def test_the_innermost_context_counts():
    with init_empty_weights():
        with init_on_device("cpu"):
            real = nn.Linear(2, 2)
        empty = nn.Linear(2, 2)
    assert real.weight.device.type == "cpu"
    assert torch.isfinite(real.weight).all()
    assert empty.weight.device.type == "meta"


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(ValueError, match="in_channels"), init_empty_weights(include_buffers=True):
        nn.Sequential(nn.BatchNorm1d(2), nn.Conv1d(3, 2, 1, groups=2))
    assert set(devices(nn.BatchNorm1d(2)).values()) == {"cpu"}


def test_other_threads_are_left_alone():
    inside, built = threading.Event(), threading.Event()
    found = {}

    def other():
        inside.wait(10)
        found.update(devices(nn.Linear(2, 2)))
        built.set()

    thread = threading.Thread(target=other)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert built.wait(10)
        assert nn.Linear(2, 2).weight.device.type == "meta"
    thread.join()
    assert set(found.values()) == {"cpu"}


def test_many_threads_at_once():
    wrong = []

    def build(empty):
        for _ in range(200):
            if empty:
                with init_empty_weights():
                    kind = nn.Linear(2, 2).weight.device.type
            else:
                kind = nn.Linear(2, 2).weight.device.type
            if kind != ("meta" if empty else "cpu"):
                wrong.append(kind)

    threads = [threading.Thread(target=build, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lazy_modules():
    with init_empty_weights():
        lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 2, device="meta"))
    assert lazy.weight.shape == (3, 2)
    assert lazy.weight.device.type == "meta"
    with init_empty_weights(include_buffers=True):
        norm = nn.LazyBatchNorm1d()
        lazy = nn.UninitializedParameter()
        lazy.note = "kept"
        norm.register_parameter("other", lazy)
    assert norm.other.note == "kept"
    del norm.other
    assert norm(torch.ones(2, 3, device="meta")).device.type == "meta"
    assert set(devices(norm).values()) == {"meta"}


def test_init_on_device_with_buffers_makes_every_tensor_there():
    with init_on_device("cpu", include_buffers=True):
        model = Model()
    assert set(devices(model).values()) == {"cpu"}
    with init_on_device("meta", include_buffers=True):
        assert torch.ones(2).device.type == "cpu"
        model = Model()
    assert devices(model)["saved"] == "meta"


@pytest.mark.gpu
def test_init_on_an_accelerator():
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    with init_on_device(device.type, include_buffers=True):
        model = Model()
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {device}
    with init_on_device(device):
        model = Model()
    assert model.linear.weight.device == device
    assert model.saved.device.type == "cpu"


def test_unknown_device():
    with pytest.raises(RuntimeError, match="nowhere"), init_on_device("nowhere"):
        pass


def test_forwards_that_make_modules_compile_to_one_graph():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    with init_empty_weights():
        Sliced()
    model = Sliced()
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
