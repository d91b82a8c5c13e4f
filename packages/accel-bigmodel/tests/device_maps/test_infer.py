"""Device maps. Values marked as Accelerate's were computed with Accelerate 1.15 and frozen here."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    DeviceMapError,
    check_tied_parameters_in_config,
    clean_device_map,
    explain_device_map,
    infer_auto_device_map,
    init_empty_weights,
    resolve_device_map,
)
from accel_bigmodel.device_maps.device_usage import device_of

pytestmark = pytest.mark.filterwarnings("error")


class Model(nn.Module):
    """64, 72 and 100 bytes."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def named(**modules):
    return nn.Sequential(OrderedDict(modules))


def three():
    return named(a=Model(), b=Model(), c=Model())


def layers(*shapes):
    return named(**{f"l{i}": nn.Linear(*shape) for i, shape in enumerate(shapes, 1)})


ACCELERATES = [
    ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    ({0: 200, 1: 172, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    ({0: 200, 1: 172, "cpu": 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    ({0: 400, "cpu": 500}, {"": 0}),
    ({"cpu": 200}, {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}),
    ({"cpu": 500}, {"": "cpu"}),
    ({0: 236}, {"": 0}),
]


@pytest.mark.parametrize(("memory", "expected"), ACCELERATES)
def test_maps_of_accelerate(memory, expected):
    assert infer_auto_device_map(Model(), memory) == expected
    with init_empty_weights(include_buffers=True):
        model = Model()
    assert infer_auto_device_map(model, memory) == expected


def test_split_only_where_it_is_allowed():
    memory = {0: 400, 1: 400, "cpu": 100}
    raw = {
        "a": 0,
        "b.linear1": 0,
        "b.batchnorm": 1,
        "b.linear2": 1,
        "c.linear1": 1,
        "c.batchnorm": 1,
        "c.linear2": "cpu",
    }
    # Accelerate's map, except that the 100 bytes of c.linear2 must fit on 0 beside what is there, and do.
    assert infer_auto_device_map(three(), memory, clean_result=False) == raw
    for whole in ("Model", ["Model"], ("Model",), {"Model"}):
        found = infer_auto_device_map(three(), {0: 500, 1: 300, "cpu": 250}, whole)
        assert found == {"a": 0, "b": 1, "c": "cpu"}


def test_room_is_kept_where_layers_really_pass_through():
    # Accelerate keeps room for a block on 0, leaves 0 empty, fills 1 with a and b, and has none for c to pass through.
    assert infer_auto_device_map(three(), {0: 400, 1: 500}, ["Model"]) == {"a": 0, "b": 1, "c": 1}
    assert infer_auto_device_map(three(), {0: 200, 1: 500}, ["Model"], offload_buffers=True) == {
        "a": 1,
        "b": "disk",
        "c": "disk",
    }


def test_direct_buffers_of_a_split_module_have_a_place():
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)  # 80 bytes
            self.register_buffer("table", torch.zeros(10))
            self.register_buffer("hidden", torch.zeros(10), persistent=False)

    model = named(first=WithBuffer(), last=nn.Linear(4, 4))
    found = infer_auto_device_map(model, {0: 170, "cpu": 300}, offload_buffers=True)
    assert found == {"first.inner": 0, "first.table": "cpu", "first.hidden": "cpu", "last": "cpu"}


def test_tied_parts_go_together():
    model = layers((4, 4), (6, 6), (4, 4))  # 80, 168, 80
    model.l3.weight = model.l1.weight
    assert infer_auto_device_map(model, {0: 200, 1: 500}) == {"": 1}
    equal = layers(*[(4, 4)] * 4)
    equal.l3.weight = equal.l1.weight
    assert infer_auto_device_map(equal, {0: 180, 1: 500}) == {"l1": 0, "l3": 0, "l2": 1, "l4": 1}
    for memory in ({0: 270, "cpu": 200}, {"cpu": 300}, {"cpu": 264}):
        found = infer_auto_device_map(model, memory)
        assert found.get("l1", found.get("")) == found.get("l3", found.get(""))


def test_ties_deep_in_other_modules():
    model = named(a=Model(), b=Model())
    model.b.linear2.weight = model.a.linear2.weight
    assert infer_auto_device_map(model, {0: 400, "cpu": 1000}) == {"": 0}
    found = infer_auto_device_map(model, {0: 300, "cpu": 1000})
    assert found == {"a.linear1": 0, "a.batchnorm": 0, "a.linear2": "cpu", "b": "cpu"}  # Accelerate's


def test_a_module_that_is_there_twice():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), nn.Linear(4, 4), shared)
    found = infer_auto_device_map(model, {0: 170, "cpu": 200})
    assert found == {"0": 0, "3": 0, "1": "cpu", "2": "cpu"}


def test_dtypes():
    memory = {0: 150}
    assert infer_auto_device_map(Model(), memory, dtype="float16") == {"": 0}
    special = {"linear2.weight": torch.float32, "linear2.bias": torch.float32}
    assert infer_auto_device_map(
        Model(), memory, dtype="float16", special_dtypes=special, offload_buffers=True
    ) != {"": 0}


def test_fallback_allocation():
    model = layers((10, 4), (4, 4), (4, 8))  # 176, 80, 160
    outer = named(module=model)
    memory = {0: 256}
    assert infer_auto_device_map(outer, memory) == {"": "disk"}
    found = infer_auto_device_map(outer, memory, fallback_allocation=True)
    assert found == {"module.l2": 0, "module.l1": "disk", "module.l3": "disk"}  # Accelerate's


@pytest.mark.parametrize("fallback", [False, True])
def test_nothing_fits_the_accelerator(fallback, caplog):
    with caplog.at_level(logging.INFO):
        found = infer_auto_device_map(layers((10, 10), (1, 1)), {0: 5}, fallback_allocation=fallback)
    assert found == {"": "disk"}
    assert "insufficient memory" in caplog.text
    assert "0 with at least 448 bytes" in caplog.text


def test_a_budget_that_nothing_fits():
    model = layers((10, 10), (4, 4))
    # The CPU computes from the pages of mapped files.
    assert infer_auto_device_map(model, {"cpu": 100}, strict=True) == {"": "disk"}
    assert infer_auto_device_map(model, {0: 500, "cpu": 100}) == {"": "disk"}
    message = (
        r"first part needs 520 bytes on 0\. Its largest layer, 'l1', takes 440 bytes of 520\..*max_memory"
    )
    with pytest.raises(DeviceMapError, match=message):
        infer_auto_device_map(model, {0: 500, "cpu": 100}, strict=True)
    assert infer_auto_device_map(model, {0: 0, "cpu": 100}, strict=True) == {"": "disk"}
    with pytest.raises(
        DeviceMapError, match=r"do not fit the devices \('cpu': 500, 'disk': 10 bytes\).*'l1'"
    ):
        infer_auto_device_map(model, {"cpu": 500, "disk": 10})


def test_models_without_weights():
    assert infer_auto_device_map(nn.Sequential(), {0: 10}, strict=True) == {}
    assert infer_auto_device_map(nn.Sequential(nn.ReLU()), {0: 0, "cpu": 0}, strict=True) == {"0": 0}


def test_a_limited_disk_is_respected():
    model = layers((10, 10), (4, 4), (4, 4))  # 440, 80, 80
    assert infer_auto_device_map(model, {"cpu": 520, "disk": 160}) == {
        "l1": "cpu",
        "l2": "disk",
        "l3": "disk",
    }


def test_reserve():
    assert infer_auto_device_map(Model(), {0: 400}, reserve=100) == {"": 0}
    found = infer_auto_device_map(Model(), {0: 400}, reserve=200, offload_buffers=True)
    assert found == {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}


def test_buffers_that_fit_no_accelerator():
    model = named(
        x=nn.Linear(4, 4), y=nn.Linear(4, 4), n=nn.BatchNorm1d(30)
    )  # 80, 80, 488 with 248 of buffers
    memory = {0: 200, "cpu": 1000}
    with pytest.warns(UserWarning, match="248 bytes.*offload_buffers=True"):
        assert infer_auto_device_map(model, memory) == {"": "cpu"}
    assert infer_auto_device_map(model, memory, offload_buffers=True) == {"": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 740 + 248, "cpu": 1000})


def test_verbose_prints_the_reasons(capsys):
    infer_auto_device_map(Model(), {0: 200, 1: 200}, verbose=True)
    printed = capsys.readouterr().out
    assert "batchnorm" in printed
    assert "does not fit 0" in printed


def test_the_model_is_left_as_it_is():
    model = three()
    before = {name: (t.data_ptr(), t.device) for name, t in model.state_dict().items()}
    memory = {1: "400B", 0: 400}
    infer_auto_device_map(model, memory)
    assert memory == {1: "400B", 0: 400}
    assert {name: (t.data_ptr(), t.device) for name, t in model.state_dict().items()} == before


# words for maps


def test_modes():
    model = layers(*[(4, 4)] * 6)  # 80 bytes each
    memory = {0: 1000, 1: 1000, "cpu": 1000}
    halves = {"l1": 0, "l2": 0, "l3": 0, "l4": 1, "l5": 1, "l6": 1}
    assert resolve_device_map(model, "sequential", memory) == {"": 0}
    assert resolve_device_map(model, "auto", memory) == resolve_device_map(model, "balanced", memory)
    balanced = resolve_device_map(model, "balanced", memory)
    assert {name: balanced[name] for name in halves} == {**halves, "l4": balanced["l4"]}
    assert resolve_device_map(model, "balanced_low_0", memory) == {"": 1}
    with pytest.raises(DeviceMapError, match=r"'blanced' is not one of 'auto'.*\{'': 'blanced'\}"):
        resolve_device_map(model, "blanced", memory)
    for wrong in (None, 0):
        with pytest.raises(DeviceMapError, match=rf"device_map is {wrong}; give one of 'auto'"):
            resolve_device_map(model, wrong, memory)
    given = {"": "cpu"}
    assert resolve_device_map(model, given) == given
    assert resolve_device_map(model, given) is not given


@pytest.mark.parametrize("function", [resolve_device_map, explain_device_map])
def test_budgets_of_another_machine_are_announced_once(function, caplog):
    function(layers((4, 4)), "auto", {98: 1000, 99: 1000, "cpu": 1000})
    assert caplog.text.count("the map is for another machine") == 1


# cleaning


def test_clean_device_map():
    given = {"a": 0, "b": 0, "c": 0}
    assert clean_device_map(given) is given
    assert given == {"": 0}
    given = {"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "b.z.0": 1, "c": 1}
    assert list(clean_device_map(given).items()) == [("a", 0), ("b", 1), ("c", 1)]
    given = {"a.x.1": 0, "a.x.2": 0, "a.y": 1, "ab": 0}
    assert clean_device_map(given) == {"a.x": 0, "a.y": 1, "ab": 0}
    assert clean_device_map({"a.x": 0, "b.x": 1, "b.y": 1}, "b") == {"a.x": 0, "b": 1}
    assert clean_device_map({"a.x": 0}) == {"a.x": 0}
    assert clean_device_map({"a": 0, "a.b": 0}) == {"": 0}


# ties that a configuration asks for


class PreTrainedModel(nn.Module):  # what transformers' models are recognised by
    def __init__(self, tied):
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": tied})()
        self.inputs, self.outputs = nn.Embedding(4, 4), nn.Linear(4, 4)

    def get_output_embeddings(self):
        return self.outputs


def test_classes_that_the_model_does_not_have_are_announced(caplog):
    infer_auto_device_map(Model(), {"cpu": 1000}, ["Linear", "AnotherModel'sBlock"])
    assert not caplog.text
    infer_auto_device_map(Model(), {"cpu": 1000}, "Linaer")
    assert "(Linaer), so any of its modules may be split. Is 'Linear' meant by 'Linaer'?" in caplog.text


def test_untied_weights_are_announced(caplog):
    assert not check_tied_parameters_in_config(Model())
    assert not check_tied_parameters_in_config(PreTrainedModel(tied=False))
    model = PreTrainedModel(tied=True)
    assert check_tied_parameters_in_config(model)
    with caplog.at_level(logging.WARNING):
        infer_auto_device_map(model, {"cpu": 1000})
    assert "tie_weights()" in caplog.text
    caplog.clear()
    model.outputs.weight = model.inputs.weight
    infer_auto_device_map(model, {"cpu": 1000})
    assert not caplog.text


class _Rotary(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(64.0), persistent=persistent)


class _SharingLayer(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.inner = nn.ModuleDict({"rotary": rotary})
        self.linear = nn.Linear(16, 16)


@pytest.mark.filterwarnings("ignore:the buffers of the offloaded modules")
@pytest.mark.parametrize(
    "memory", [{0: 5_000, 1: 9_000}, {0: 5_000, "cpu": 9_000}, {0: 5_000}, {"cpu": 5_000}]
)
@pytest.mark.parametrize("no_split", [None, ["_SharingLayer"]])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"fallback_allocation": True}, {"offload_buffers": True}, {"clean_result": False}]
)
@pytest.mark.parametrize("tied", ["module", "buffer"])
def test_buffers_that_layers_share_have_one_device(memory, no_split, persistent, options, tied):
    rotary = _Rotary(persistent)
    parts = [rotary if tied == "module" else _Rotary(persistent) for _ in range(6)]
    for part in parts:
        part.inv_freq = rotary.inv_freq
    model = nn.Sequential(*map(_SharingLayer, parts))
    found = infer_auto_device_map(model, memory, no_split, **options)
    assert len({device_of(f"{n}.inner.rotary.inv_freq", found) for n in range(6)}) == 1
    if no_split:
        assert len({device_of(f"{n}.linear.weight", found) for n in range(6)}) == 1


def test_budgets_that_keep_no_shared_buffer_on_one_device_are_refused():
    rotary = _Rotary(True)
    model = nn.Sequential(*(_SharingLayer(rotary) for _ in range(6)))
    with pytest.raises(DeviceMapError, match="no device map of Sequential fits"):
        infer_auto_device_map(model, {0: 4_000, 1: 4_000, "disk": 0}, ["_SharingLayer"])
