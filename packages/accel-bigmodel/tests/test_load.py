"""Loading by a device map: every tensor where the map says, nothing copied, every mistake known before it is made."""

import copy
import json
import os
import re
import time
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import accel_bigmodel.load as load_module
from accel_bigmodel.errors import DeviceMapError, OffloadError
from accel_bigmodel.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_bigmodel.meta import init_empty_weights
from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileChangedError,
    LoadReport,
    StateMismatchError,
    UninitializedTensorError,
    UnsafeCheckpointError,
    save_model,
)
from accel_ckpt.format.memory import mapped_file_of
from accel_state.errors import NotAvailableError
from testkit.nets import Net, Tied, Untied, WithTable, on_meta, same


def empty(build=Net):
    with init_empty_weights():
        return build()


def file_of(tensor):
    mapped = mapped_file_of(tensor)
    return None if mapped is None else mapped.path.name


def is_untouched(model):
    return all(p.device.type == "meta" for p in model.parameters())


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.body(torch.randn(8, 3))  # statistics
    model.eval()
    save_model(model, tmp_path / "m")
    return model, tmp_path / "m"


MAPS = [
    {"": "cpu"},
    {"": "disk"},
    {"": torch.device("cpu")},
    {"body": "cpu", "head": "disk"},
    {"body.0": "disk", "body.1": "cpu", "head.weight": "cpu", "head.bias": "disk"},
]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("device_map", MAPS)
def test_host_and_disk_are_views_of_the_file(saved, device_map, real):
    model, path = saved
    before = (path / "model.safetensors").read_bytes()
    again = Net() if real else empty()
    parameters = list(again.parameters())
    assert load_checkpoint_in_model(again, path, device_map) == LoadReport()
    assert same(again, model)
    assert all(file_of(t) == "model.safetensors" for t in (*again.parameters(), again.body[1].running_mean))
    if real:
        assert all(a is b for a, b in zip(parameters, again.parameters(), strict=True))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert (path / "model.safetensors").read_bytes() == before
    assert os.listdir(path) == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["file", "index", "folder", "string", "bin", "bin shards", "dcp"])
def test_every_source(tmp_path, kind):
    model = Net()
    shards, safe = kind in ("index", "folder", "bin shards"), not kind.startswith("bin")
    save_model(model, tmp_path / "m", max_shard_size="40B" if shards else "1GB", safe_serialization=safe)
    source = {
        "file": tmp_path / "m" / "model.safetensors",
        "index": tmp_path / "m" / "model.safetensors.index.json",
        "string": str(tmp_path / "m"),
    }.get(kind, tmp_path / "m")
    if kind == "dcp":
        import torch.distributed.checkpoint as dcp

        source = tmp_path / "dcp"
        dcp.save(model.state_dict(), checkpoint_id=source, no_dist=True)
    for device_map in (None, *MAPS):
        again = empty()
        load_checkpoint_in_model(again, source, device_map, tmp_path / "offload")
        assert same(again, model)


def test_t13_no_map_and_a_map_of_disk_alone(saved):
    model, path = saved
    for device_map in (None, {"": "disk"}):
        again = empty()
        load_checkpoint_in_model(again, path, device_map)
        assert same(again, model)


# the cache


def test_t11_a_load_to_disk_writes_nothing(saved, tmp_path):
    load_checkpoint_in_model(empty(), saved[1], {"": "disk"}, offload_folder=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_what_no_file_holds_as_it_is_needed_goes_to_the_offload_folder_once(tmp_path, safe):
    model = Net()
    save_model(model, tmp_path / "m", safe_serialization=safe)
    dtype = torch.bfloat16 if safe else None
    wanted = Net()
    wanted.load_state_dict(model.state_dict())
    wanted = wanted.to(dtype or torch.float32)
    times = []
    for _ in range(2):
        again = empty()
        load_checkpoint_in_model(
            again, tmp_path / "m", {"body": "cpu", "head": "disk"}, tmp_path / "o", dtype
        )
        assert same(again, wanted)
        [cache] = (tmp_path / "o").iterdir()
        assert file_of(again.head.weight) == file_of(again.head.bias) == cache.name
        assert file_of(again.body[0].weight) is None
        times.append(cache.stat().st_mtime_ns)
    assert times[0] == times[1]
    assert set(safetensors.torch.load_file(cache)) == {"head.weight", "head.bias"}


def test_t10_a_checkpoint_that_was_saved_anew_is_not_served_from_the_cache(tmp_path):
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        save_model(model, tmp_path / "m", safe_serialization=False)
        again = empty(lambda: nn.Linear(2, 2))
        load_checkpoint_in_model(again, tmp_path / "m", {"": "disk"}, tmp_path / "o")
        assert torch.equal(again.weight, torch.full((2, 2), value))


@pytest.mark.parametrize("kind", ["safetensors", "bin", "dcp"])
def test_the_offload_folder_may_be_that_of_the_checkpoint(tmp_path, kind):
    model = Net()
    if kind == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    else:
        save_model(model, tmp_path, safe_serialization=kind == "safetensors")
    for _ in range(3):
        again = empty()
        load_checkpoint_in_model(again, tmp_path, {"": "disk"}, tmp_path, "float64")
        assert torch.equal(again.head.weight, model.head.weight.double())
    assert len([name for name in os.listdir(tmp_path) if name.startswith("offload-")]) == 1


def test_a_missing_offload_folder_names_the_tensors(tmp_path, saved):
    _, path = saved
    again = empty()
    with pytest.raises(OffloadError, match=r"puts head\.bias, head\.weight on disk.*pass offload_folder"):
        load_checkpoint_in_model(again, path, {"body": "cpu", "head": "disk"}, dtype="float16")
    assert is_untouched(again)


@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
@pytest.mark.parametrize("folder", [3, b"folder", ["folder"]])
def test_an_offload_folder_that_is_no_path(saved, load, folder):
    model = empty()
    with pytest.raises(
        OffloadError, match=rf"offload_folder is {re.escape(repr(folder))}; give the path of a folder"
    ):
        load(model, saved[1], {"": "cpu"}, offload_folder=folder)
    assert is_untouched(model)


def test_an_offload_folder_that_is_a_file(tmp_path, saved):
    _, path = saved
    (tmp_path / "x").write_text("mine")
    again = empty()
    with pytest.raises(OffloadError, match="x: a file of that name exists"):
        load_checkpoint_in_model(again, path, {"": "disk"}, tmp_path / "x", dtype="float16")
    assert is_untouched(again)


def test_a_disk_that_fills_up_leaves_the_model_as_it_was(tmp_path, saved, monkeypatch):
    from accel_ckpt.disk import Disk

    _, path = saved
    left = [3]

    def write(disk, descriptor, data):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, data)

    monkeypatch.setattr(Disk, "write", write)
    again = empty()
    with pytest.raises(OffloadError, match=r"No space left.*free some space"):
        load_checkpoint_in_model(
            again, path, {"body": "cpu", "head": "disk"}, tmp_path / "o", dtype="float16"
        )
    assert is_untouched(again)
    assert os.listdir(tmp_path / "o") == []


def test_files_that_change_during_a_load_leave_no_cache(tmp_path, monkeypatch):
    save_model(Net(), tmp_path / "m", safe_serialization=False)
    put = load_module.MapPlacer.put

    def put_and_touch(self, step, value):
        os.utime(tmp_path / "m" / "pytorch_model.bin")
        put(self, step, value)

    monkeypatch.setattr(load_module.MapPlacer, "put", put_and_touch)
    with pytest.raises(FileChangedError, match="changed or replaced while"):
        load_checkpoint_in_model(empty(), tmp_path / "m", {"": "disk"}, tmp_path / "o")
    assert os.listdir(tmp_path / "o") == []


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_buffers_that_have_to_be_stored(tmp_path, offload_buffers):
    model = Net()
    save_model(model, tmp_path / "m")
    again = empty()
    load_checkpoint_in_model(
        again, tmp_path / "m", {"": "disk"}, tmp_path / "o", "bfloat16", offload_buffers=offload_buffers
    )
    assert again.body[1].running_var.dtype == torch.bfloat16
    assert (file_of(again.body[1].running_var) is not None) == offload_buffers
    assert file_of(again.body[1].num_batches_tracked) == "model.safetensors"  # an integer is not converted
    assert file_of(again.head.weight).startswith("offload-")


# dtypes and options


def test_modules_kept_in_fp32(saved):
    _, path = saved
    again = empty()
    load_checkpoint_in_model(again, path, {"": "cpu"}, dtype=torch.float16, keep_in_fp32_modules=["head"])
    assert (again.head.weight.dtype, again.body[0].weight.dtype) == (torch.float32, torch.float16)
    assert file_of(again.head.weight) == "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.int8, "complex64", "float17"])
def test_dtypes_that_weights_cannot_become(saved, dtype):
    _, path = saved
    again = empty()
    with pytest.raises(ValueError, match="dtype"):
        load_checkpoint_and_dispatch(again, path, {"": "cpu"}, dtype=dtype)
    assert is_untouched(again)


def test_a_model_of_another_dtype_keeps_it(tmp_path, saved):
    model, path = saved
    again = empty().half()
    load_checkpoint_in_model(again, path, {"head": "cpu", "body": "disk"}, tmp_path / "o")
    assert {p.dtype for p in again.parameters()} == {torch.float16}
    assert torch.equal(again.body[0].weight, model.body[0].weight.half())


@pytest.mark.parametrize("option", ["offload_8bit_bnb", "full_state_dict"])
def test_options_that_plain_loading_does_not_have(saved, option):
    _, path = saved
    with pytest.raises(NotAvailableError, match=option):
        load_checkpoint_in_model(empty(), path, {"": "cpu"}, **{option: option != "full_state_dict"})


def test_offload_state_dict_changes_nothing(saved):
    model, path = saved
    again = empty()
    load_checkpoint_in_model(again, path, {"": "cpu"}, offload_state_dict=True)
    assert same(again, model)
    assert file_of(again.head.weight) == "model.safetensors"


# ties


@pytest.mark.parametrize("places", [("cpu", "cpu"), ("disk", "disk"), ("cpu", "disk"), ("disk", "cpu")])
@pytest.mark.parametrize("real", [False, True])
def test_t32_ties_are_kept(tmp_path, places, real):
    model = Tied()
    save_model(model, tmp_path / "m")
    again = Tied() if real else empty(Tied)
    load_checkpoint_in_model(
        again, tmp_path / "m", dict(zip(("embed", "head"), places, strict=True)), strict=True
    )
    assert again.head.weight is again.embed.weight
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_t32_names_that_only_the_file_ties_get_memory_of_their_own(tmp_path, place):
    model = Tied()
    save_model(model, tmp_path / "m")
    again = empty(Untied)
    load_checkpoint_in_model(again, tmp_path / "m", {"": place}, strict=True)
    assert file_of(again.head.weight) == file_of(again.embed.weight) == "model.safetensors"
    with torch.no_grad():
        again.head.weight.zero_()
    assert torch.equal(again.embed.weight, model.embed.weight)


# parts of a model


def test_a_tie_of_what_is_read_and_what_is_not_is_read(tmp_path):
    model = Tied()
    save_model(model, tmp_path)
    for device_map in ({"embed": "cpu", "head": "meta"}, {"embed": "meta", "head": "disk"}):
        again = empty(Tied)
        load_checkpoint_in_model(again, tmp_path, device_map)
        assert again.head.weight is again.embed.weight
        assert torch.equal(again.head.weight, model.head.weight)


def test_what_the_map_leaves_on_meta_is_not_read(tmp_path):
    model = Net()
    save_model(model, tmp_path, max_shard_size="40B")
    again = empty()
    assert load_checkpoint_in_model(again, tmp_path, {"body": "meta", "head": "cpu"}) == LoadReport()
    assert {n for n, p in again.named_parameters() if p.device.type != "meta"} == {"head.weight", "head.bias"}
    assert torch.equal(again.head.weight, model.head.weight)


# strictness


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("device_map", [None, {"": "disk"}, {"body": "cpu", "head": "disk"}])
def test_t12_missing_names_are_an_error_with_a_map_too(tmp_path, device_map, strict):
    state_dict = {n: t for n, t in Net().state_dict().items() if n != "head.bias"}
    safetensors.torch.save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = empty()
    with pytest.raises(StateMismatchError, match=r"is not in the checkpoint: head\.bias"):
        load_checkpoint_in_model(again, tmp_path, device_map, strict=strict)
    assert is_untouched(again)


def test_a_report_of_missing_unexpected_and_mismatched(tmp_path):
    state_dict = Net().state_dict() | {"ghost": torch.ones(1), "head.weight": torch.ones(2, 9)}
    del state_dict["head.bias"]
    safetensors.torch.save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_checkpoint_in_model(again, tmp_path, {"": "cpu"}, strict=False)
        load_checkpoint_and_dispatch(again, tmp_path, {"": "cpu"}, strict=False)
    assert report == LoadReport(("head.bias",), ("ghost",), ("head.weight: (2, 9) instead of (2, 4)",))
    assert [os.path.basename(w.filename) for w in caught] == ["test_load.py"] * 6
    with pytest.raises(StateMismatchError, match="ghost"):
        load_checkpoint_in_model(again, tmp_path, {"": "cpu"}, strict=True)


def test_what_strict_false_would_leave_empty_is_known_before_a_dispatch(tmp_path):
    state_dict = {**Net().state_dict(), "head.weight": torch.zeros(3, 3)}
    del state_dict["head.bias"]
    safetensors.torch.save_file(state_dict, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for strict in (False, 0):
        again = empty()
        with pytest.raises(UninitializedTensorError, match=r"values.*head\.weight, head\.bias\. Nothing"):
            load_checkpoint_and_dispatch(again, tmp_path / "x.safetensors", {"": "disk"}, strict=strict)
        assert is_untouched(again)
    with pytest.warns(UserWarning, match="does not fill"):
        load_checkpoint_and_dispatch(again, tmp_path / "x.safetensors", None, strict=False)
    assert not again.body[0].weight.is_meta


def test_a_buffer_that_nothing_fills(tmp_path):
    save_model(WithTable(), tmp_path)
    again = on_meta(WithTable)
    with pytest.raises(UninitializedTensorError, match="No checkpoint holds table"):
        load_checkpoint_in_model(again, tmp_path, {"": "cpu"})
    assert is_untouched(again)
    load_checkpoint_in_model(again, tmp_path, {"": "meta"})
    again = empty(WithTable)
    load_checkpoint_in_model(again, tmp_path, {"": "disk"})
    assert torch.equal(again.table, torch.arange(4.0))


# bad maps


@pytest.mark.parametrize(
    ("device_map", "named"),
    [
        ({"body": "cpu"}, "head.weight"),
        ({}, "head.weight"),
        ({"": "cpu", "tail": "cpu"}, "tail"),
        ({"": "cpu", "head": "cuda:99"}, "cuda:99"),
        ({"": "cpu", "head": 99}, "99"),
        ({"": "cpu", "head": "gpu"}, "gpu"),
    ],
)
def test_a_bad_map_is_refused_before_anything_is_read(device_map, named):
    again = empty()
    with pytest.raises(DeviceMapError, match=re.escape(named)):
        load_checkpoint_in_model(again, "/nowhere/at/all", device_map)
    assert is_untouched(again)


def test_words_instead_of_a_map(saved):
    _, path = saved
    with pytest.raises(DeviceMapError, match=r"'auto'.*load_checkpoint_and_dispatch"):
        load_checkpoint_in_model(empty(), path, "auto")
    with pytest.raises(DeviceMapError, match=r"device_map is 0; .*'': device"):
        load_checkpoint_in_model(empty(), path, 0)
    with pytest.raises(ValueError, match=r"'cpu' is not one of 'auto', 'balanced'.*\{'': 'cpu'\}"):
        load_checkpoint_and_dispatch(empty(), path, "cpu")


def test_a_budget_that_nothing_fits(saved):
    _, path = saved
    model = empty()
    with pytest.raises(
        DeviceMapError, match=r"no device map of Net fits these budgets.*bytes on 0.*'body\.1'"
    ):
        load_checkpoint_and_dispatch(model, path, "auto", max_memory={0: 20, "cpu": 1000})
    assert model.head.weight.is_meta


@pytest.mark.parametrize("option", ["device_memory", "host_memory"])
def test_a_size_that_is_none_is_refused_before_the_load(saved, option):
    _, path = saved
    again = empty()
    with pytest.raises(ValueError, match=f"{option}: 'lots' is not a size"):
        load_checkpoint_and_dispatch(again, path, {"": "cpu"}, **{option: "lots"})
    assert is_untouched(again)


def test_parts_without_values_cannot_run(saved):
    _, path = saved
    again = empty()
    with pytest.raises(DeviceMapError, match=r"leaves 'head' without values.*load_checkpoint_in_model"):
        load_checkpoint_and_dispatch(again, path, {"body": "cpu", "head": "meta"})
    assert is_untouched(again)


# bad files


@pytest.mark.parametrize("size", ["1GB", "40B"])
@pytest.mark.parametrize("damage", ["short", "header", "empty", "gone"])
def test_damaged_files_change_nothing(tmp_path, size, damage):
    save_model(Net(), tmp_path / "m", max_shard_size=size)
    path = sorted((tmp_path / "m").glob("*.safetensors"))[-1]
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(
            {"short": content[:-1], "header": content[:9] + b"#" + content[10:], "empty": b""}[damage]
        )
    again = empty()
    kind = CheckpointNotFoundError if damage == "gone" else CorruptCheckpointError
    with pytest.raises(kind, match=path.name if size != "1GB" or damage != "gone" else "model.safetensors"):
        load_checkpoint_in_model(again, tmp_path / "m", {"body": "disk", "head": "cpu"})
    assert is_untouched(again)


def test_an_index_that_points_outside_its_folder(tmp_path):
    save_model(Net(), tmp_path / "m")
    (tmp_path / "x").mkdir()
    index = {"weight_map": dict.fromkeys(Net().state_dict(), "../m/model.safetensors")}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsafeCheckpointError, match="not inside its folder"):
        load_checkpoint_in_model(empty(), tmp_path / "x", {"": "disk"})


def test_the_default_device_of_the_process_does_not_matter(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
    with init_empty_weights():
        again = copy.deepcopy(model).to("meta")
    with torch.device("meta"):  # as a test can have it; programs set "cuda"
        save_model(model, tmp_path / "m", safe_serialization=False)
        load_checkpoint_and_dispatch(again, tmp_path / "m", {"": "disk"}, offload_folder=tmp_path / "o")
        save_model(again, tmp_path / "n")
        load_checkpoint_in_model(again, tmp_path / "n")
    assert same(again, model)


def test_saving_over_the_mapped_checkpoint(saved):
    model, path = saved
    again = empty()
    load_checkpoint_in_model(again, path, {"body": "disk", "head": "cpu"})
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(again, path, max_shard_size="40B")  # itself
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    save_model(Net(), path)  # another one
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


# progress


def test_a_bar_for_long_loads_only(saved, capsys, monkeypatch):
    _, path = saved
    load_checkpoint_in_model(empty(), path, {"": "cpu"})
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(load_module, "_PATIENCE", 0.01)
    put = load_module.MapPlacer.put

    def slow(self, step, value):
        time.sleep(0.02)
        put(self, step, value)

    monkeypatch.setattr(load_module.MapPlacer, "put", slow)
    load_checkpoint_in_model(empty(), path, {"": "cpu"})
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights" in err
    assert "100%" in err
    load_checkpoint_in_model(empty(), path, {"": "cpu"}, progress=False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_checkpoint_in_model(empty(), path, {"": "cpu"})
    assert capsys.readouterr() == ("", "")


# and run


@pytest.mark.parametrize("device_map", [None, "auto", "balanced", "balanced_low_0", "sequential", *MAPS])
def test_loaded_models_run(saved, device_map):
    model, path = saved
    again = load_checkpoint_and_dispatch(empty().eval(), path, device_map)
    x = torch.randn(5, 3)
    assert torch.equal(again(x), model(x))
    assert hasattr(again, "hf_device_map") == (device_map is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_parts_on_an_accelerator(saved, tmp_path):
    model, path = saved
    device = torch.accelerator.current_accelerator()
    for place in (0, device, f"{device.type}:0"):
        again = empty()
        load_checkpoint_in_model(again, path, {"body": place, "head": "disk"})
        assert again.body[0].weight.device.type == again.body[1].running_mean.device.type == device.type
        assert file_of(again.head.weight) == "model.safetensors"
        assert same(again.cpu(), model)


class Logarithm(nn.Module):
    """Saves the logarithm of its weight."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), value))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.detach().log()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"].exp())

    def forward(self, x):
        return x * self.weight


class Renamed(nn.Linear):
    """Its files know ``old`` as the name of ``weight``."""

    def __init__(self, value=1.0):
        super().__init__(64, 64)
        nn.init.constant_(self.weight, value)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")


@pytest.mark.parametrize(
    "places",
    [
        {"": "cpu"},
        {"": "disk"},
        {"0": "cpu", "1": "disk", "2": "disk"},
        {"0": "disk", "1": "cpu", "2": "cpu"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_modules_that_translate_their_state_go_where_the_map_says(tmp_path, places, name):
    trained = nn.Sequential(nn.Linear(64, 64), Logarithm(3.0), Renamed(2.0))
    state = {key.replace("2.weight", "2.old"): value.detach() for key, value in trained.state_dict().items()}
    if name.endswith(".bin"):
        torch.save(state, tmp_path / name)
    else:
        safetensors.torch.save_file(state, tmp_path / name, {"format": "pt"})
    x = torch.randn(2, 64)
    for _ in range(2):  # the second time what is on disk is there already
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(64, 64), Logarithm(), Renamed())
        model = load_checkpoint_and_dispatch(
            model, tmp_path / name, places, offload_folder=tmp_path / "offload"
        )
        torch.testing.assert_close(model(x), trained(x))
    if "disk" in (places.get("1"), places.get("")):
        assert mapped_file_of(model[1].weight) is not None
    if name.endswith(".safetensors"):
        assert file_of(model[2].weight) == file_of(model[0].weight) == name


def test_what_a_module_made_of_other_values_is_not_served_from_the_cache(tmp_path):
    class Base(Logarithm):
        base = torch.e

        def _load_from_state_dict(self, state_dict, prefix, *rest):
            with torch.no_grad():
                self.weight.copy_(self.base ** state_dict[prefix + "weight"])

    safetensors.torch.save_file(
        {"0.weight": torch.full((64,), 2.0)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    for base in (3.0, 5.0):
        Base.base = base
        with init_empty_weights():
            model = nn.Sequential(Base())
        load_checkpoint_in_model(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "offload")
        assert (model[0].weight == base**2).all()
