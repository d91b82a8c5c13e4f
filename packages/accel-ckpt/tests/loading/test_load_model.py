"""Loading weights: everything is compared before anything is changed."""

import gc
import json
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileChangedError,
    LoadReport,
    StateMismatchError,
    UninitializedTensorError,
    UnsafeCheckpointError,
    check_checkpoint_fits,
    complete_checkpoints,
    load,
    load_checkpoint_in_model,
    load_state_dict,
    open_weights,
    prune_checkpoints,
    save,
    save_model,
    save_training_state,
)
from accel_ckpt.format.memory import mapped_file_of
from accel_ckpt.loading import load_model as loading
from accel_ckpt.loading.load_model import Placer, Request, load_weights
from accel_state.errors import DeviceError, NotAvailableError
from testkit.nets import Net, Tied, Untied, WithTable, on_meta, same


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("size", ["1MB", "40B"])
@pytest.mark.parametrize("safe", [True, False])
def test_round_trip(tmp_path, safe, size, meta):
    model = Net()
    save_model(model, tmp_path, max_shard_size=size, safe_serialization=safe)
    again = on_meta(Net) if meta else Net()
    assert load_checkpoint_in_model(again, tmp_path) == LoadReport()
    assert same(again, model)
    assert all(p.requires_grad for p in again.parameters())


def test_every_kind_of_path(tmp_path):
    model = Net()
    save_model(model, tmp_path / "whole")
    save_model(model, tmp_path / "parts", max_shard_size="40B")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    flat = tmp_path / "parts" / "flat.json"
    flat.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    for path in (
        tmp_path / "whole",
        tmp_path / "whole" / "model.safetensors",
        tmp_path / "parts",
        index,
        flat,
        str(index),
    ):
        again = Net()
        load_checkpoint_in_model(again, path)
        assert same(again, model)


def test_a_training_state_is_a_checkpoint_of_its_first_model(tmp_path):
    model, again = Net(), Net()
    path = save_training_state(tmp_path / "c", models=[model.state_dict()], shared={}, per_rank={})
    load_checkpoint_in_model(again, path)
    assert same(again, model)


def test_parameters_keep_their_identity(tmp_path):
    model, again = Net(), Net()
    save_model(model, tmp_path)
    optimizer = torch.optim.SGD(again.parameters(), lr=1.0)
    before = [p.data_ptr() for p in again.parameters()]
    load_checkpoint_in_model(again, tmp_path, dtype=None)
    assert [p.data_ptr() for p in optimizer.param_groups[0]["params"]] == before
    load_checkpoint_in_model(again, tmp_path, dtype="float64")
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], again.parameters(), strict=True))
    assert again.head.weight.dtype == torch.float64


def test_meta_models_are_views_of_the_file_that_never_write_to_it(tmp_path):
    save_model(Net(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    again = on_meta(Net)
    load_checkpoint_in_model(again, tmp_path)
    (file,) = {mapped_file_of(p) for p in again.parameters()}
    assert file.path == tmp_path / "model.safetensors"
    with torch.no_grad():
        again.head.weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": torch.device("cpu")}])
def test_one_device(tmp_path, device_map):
    model, again = Net(), on_meta(Net)
    save_model(model, tmp_path)
    load_checkpoint_in_model(again, tmp_path, device_map=device_map)
    assert same(again, model)


def test_t13_a_meta_model_needs_no_map_and_no_process_group(tmp_path):
    model, again = Net(), on_meta(Net)
    save_model(model, tmp_path)
    load_checkpoint_in_model(again, tmp_path)
    assert same(again, model)


@pytest.mark.parametrize("device_map", [{"body": "cpu", "head": "cpu"}, {"": "disk"}, {"head": 0}, {}])
def test_maps_of_several_devices_belong_to_accel_bigmodel(tmp_path, device_map):
    with pytest.raises(NotAvailableError, match="accel-bigmodel"):
        load_checkpoint_in_model(Net(), tmp_path, device_map=device_map)


@pytest.mark.parametrize("option", ["offload_state_dict", "offload_buffers", "offload_8bit_bnb"])
def test_offloading_belongs_to_accel_bigmodel(tmp_path, option):
    with pytest.raises(NotAvailableError, match=f"{option}.*accel-bigmodel"):
        load_checkpoint_in_model(Net(), tmp_path, **{option: True})
    with pytest.raises(NotAvailableError, match="full_state_dict=False"):
        load_checkpoint_in_model(Net(), tmp_path, full_state_dict=False)


# dtypes


def test_dtypes(tmp_path):
    model = Net()
    save_model(model, tmp_path)
    for build in (Net, lambda: on_meta(Net)):
        again = build()
        load_checkpoint_in_model(again, tmp_path, dtype="torch.bfloat16")
        assert again.head.weight.dtype == torch.bfloat16
        assert again.body[1].num_batches_tracked.dtype == torch.int64
        assert torch.equal(again.head.weight, model.head.weight.bfloat16())
        again = build().half()
        load_checkpoint_in_model(again, tmp_path)
        assert again.head.weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"int8 is for floating tensors.*load_and_quantize_model"):
        load_checkpoint_in_model(Net(), tmp_path, dtype=torch.int8)
    with pytest.raises(ValueError, match="'float17' is not a dtype"):
        load_checkpoint_in_model(Net(), tmp_path, dtype="float17")


def test_modules_kept_in_fp32(tmp_path):
    save_model(Net(), tmp_path)
    again = Net()
    for names in (["head"], "head"):
        load_checkpoint_in_model(again, tmp_path, dtype=torch.float16, keep_in_fp32_modules=names)
        assert (again.head.weight.dtype, again.body[0].weight.dtype) == (torch.float32, torch.float16)
    load_checkpoint_in_model(again, tmp_path, dtype=torch.bfloat16, keep_in_fp32_modules=["head"])
    assert again.head.weight.dtype == torch.bfloat16


def test_what_is_no_float_in_the_model_has_its_dtype_whatever_the_file_has_it_as(tmp_path):
    """A mask as uint8, as some files have it, a counter of another width, and floats that were rounded to integers."""
    model = nn.Linear(2, 1)
    for name, dtype in (("mask", torch.bool), ("count", torch.int64), ("phase", torch.complex64)):
        model.register_buffer(name, torch.zeros(2, dtype=dtype))
    saved = {
        "weight": torch.ones(1, 2, dtype=torch.int64),
        "bias": torch.ones(1),
        "mask": torch.ones(2, dtype=torch.uint8),
        "count": torch.ones(2, dtype=torch.int32),
        "phase": torch.ones(2),
    }
    safetensors.torch.save_file(saved, tmp_path / "x.safetensors", metadata={"format": "pt"})
    wanted = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wanted |= {"weight": torch.float16, "bias": torch.float16}
    load_checkpoint_in_model(model, tmp_path / "x.safetensors", dtype="float16")
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == wanted
    assert all((tensor == 1).all() for tensor in model.state_dict().values() if tensor.dtype != torch.bool)
    assert model.mask.all()


# strictness


def lacking(tmp_path, extra=None, without=("head.bias",)):
    state_dict = {n: t for n, t in Net().state_dict().items() if n not in without} | (extra or {})
    safetensors.torch.save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return state_dict


@pytest.mark.parametrize("strict", [None, True])
def test_t12_a_missing_name_is_an_error_and_changes_nothing(tmp_path, strict):
    lacking(tmp_path)
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"is not in the checkpoint: head\.bias"):
        load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"}, strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_unexpected_names_are_a_warning_and_an_error_when_strict(tmp_path):
    lacking(tmp_path, {"ghost": torch.ones(1)}, without=())
    with pytest.warns(UserWarning, match="Some weights of the model checkpoint.*were not used.*ghost"):
        report = load_checkpoint_in_model(Net(), tmp_path)
    assert report == LoadReport(unexpected=("ghost",))
    with pytest.raises(StateMismatchError, match="is not in the model: ghost"):
        load_checkpoint_in_model(Net(), tmp_path, strict=True)


def test_names_that_nothing_takes_are_told_with_those_that_are_missing(tmp_path):
    lacking(tmp_path, {"tail.bias": torch.ones(2)})
    with pytest.raises(
        StateMismatchError, match=r"not in the checkpoint: head\.bias; is not in the model: tail\.bias"
    ):
        load_checkpoint_in_model(Net(), tmp_path)


def test_thousands_of_names_are_not_all_listed(tmp_path):
    extra = {f"ghost.{number}": torch.ones(1) for number in range(2000)}
    lacking(tmp_path, extra)
    with pytest.raises(StateMismatchError, match=r"ghost\.\d+ and 1988 more\.") as caught:
        load_checkpoint_in_model(Net(), tmp_path)
    assert len(str(caught.value)) < 2000
    with pytest.warns(UserWarning, match="and 1988 more|does not fill") as warned:
        report = load_checkpoint_in_model(Net(), tmp_path, strict=False)
    assert len(report.unexpected) == 2000
    assert max(len(str(warning.message)) for warning in warned) < 2000


def test_a_model_of_transformers_is_told_who_knows_other_names(tmp_path):
    base = type("PreTrainedModel", (Net,), {"__module__": "transformers.modeling_utils"})
    model = type("Example", (base,), {})()
    lacking(tmp_path)
    # Nothing is left there that could be it.
    with pytest.raises(StateMismatchError, match=r"reports the rest$"):
        load_checkpoint_in_model(model, tmp_path)
    lacking(tmp_path, {"tail.bias": torch.ones(2)})
    with pytest.raises(StateMismatchError, match=r"Example\.from_pretrained.*dispatch_model.*save_model"):
        load_checkpoint_in_model(model, tmp_path)


def test_another_strictness_than_there_is(tmp_path):
    with pytest.raises(ValueError, match="strict is 'yes'; pass True"):
        load_checkpoint_in_model(Net(), tmp_path, strict="yes")


def test_other_shapes(tmp_path):
    save_model(Net(width=5), tmp_path)
    with pytest.raises(StateMismatchError, match=r"head\.weight: \(2, 5\) instead of \(2, 4\)"):
        load_checkpoint_in_model(Net(), tmp_path)


def test_not_strict_loads_what_matches_and_reports_the_rest(tmp_path):
    state_dict = lacking(tmp_path, {"ghost": torch.ones(1), "head.weight": torch.zeros(2, 9)})
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_checkpoint_in_model(model, tmp_path, strict=False)
    assert report.missing == ("head.bias",)
    assert report.unexpected == ("ghost",)
    assert report.mismatched == ("head.weight: (2, 9) instead of (2, 4)",)
    assert len(caught) == 3
    assert torch.equal(model.body[0].weight, state_dict["body.0.weight"])
    meta = on_meta(Net)
    with pytest.warns(UserWarning, match="does not fill|were not used"):
        load_checkpoint_in_model(meta, tmp_path, strict=False)
    assert meta.head.bias.device.type == "meta"


# ties


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_t32_a_name_tied_to_a_present_one_is_not_missing(tmp_path, name, meta):
    value = torch.randn(6, 4)
    safetensors.torch.save_file({name: value}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = on_meta(Tied) if meta else Tied()
    assert load_checkpoint_in_model(model, tmp_path, strict=True) == LoadReport()
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, value)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("meta", [False, True])
def test_t32_tied_checkpoint_into_an_untied_model(tmp_path, safe, meta):
    model = Tied()
    save_model(model, tmp_path, safe_serialization=safe)
    again = on_meta(Untied) if meta else Untied()
    assert load_checkpoint_in_model(again, tmp_path, strict=True) == LoadReport()
    assert torch.equal(again.head.weight, model.head.weight)
    with torch.no_grad():
        again.head.weight.zero_()
    assert torch.equal(again.embed.weight, model.embed.weight)  # two parameters, two memories


# names


def test_t33_wrapped_and_plain_models_load_each_other_s_files(tmp_path):
    model = Net()
    save_model(model, tmp_path)
    wrapped = nn.DataParallel(torch.compile(Net()))
    load_checkpoint_in_model(wrapped, tmp_path, strict=True)
    assert torch.equal(wrapped.module.head.weight, model.head.weight)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        state_dict = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        torch.save(state_dict, tmp_path / "x.bin")
        again = Net()
        load_checkpoint_in_model(again, tmp_path / "x.bin", strict=True)
        assert same(again, model)


# buffers


def test_t31_buffers_that_no_checkpoint_holds(tmp_path):
    save_model(WithTable(), tmp_path)
    again = WithTable()
    load_checkpoint_in_model(again, tmp_path, device_map={"": "cpu"})
    assert torch.equal(again.table, torch.arange(4.0))
    meta = on_meta(WithTable)
    with pytest.raises(UninitializedTensorError, match=r"No checkpoint holds table.*include_buffers=False"):
        load_checkpoint_in_model(meta, tmp_path)
    assert meta.linear.weight.device.type == "meta"  # nothing was changed
    meta = on_meta(WithTable)
    meta.table = torch.arange(4.0)
    load_checkpoint_in_model(meta, tmp_path)
    assert torch.equal(meta.linear.weight, load_state_dict(tmp_path / "model.safetensors")["linear.weight"])


# damage


def test_files_that_are_replaced_during_a_load(tmp_path):
    save_model(Net(), tmp_path, max_shard_size="40B")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["head.bias"]
    source = open_weights(tmp_path)
    source.tensor("body.0.weight")
    before = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(before)
    with pytest.raises(FileChangedError, match=f"{shard.name}.*may be a mixture"):
        source.finish()


def test_an_index_that_promises_what_is_not_there(tmp_path):
    save_model(Net(), tmp_path, max_shard_size="40B")
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["ghost"] = content["weight_map"]["head.bias"]
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match="the index says that ghost"):
        load_checkpoint_in_model(Net(), tmp_path)


def test_a_missing_shard(tmp_path):
    save_model(Net(), tmp_path, max_shard_size="40B")
    (tmp_path / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    with pytest.raises(CheckpointNotFoundError, match="00002"):
        load_checkpoint_in_model(Net(), tmp_path)


def test_a_truncated_shard_changes_nothing(tmp_path):
    save_model(Net(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    model = Net()
    before = model.head.weight.clone()
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.head.weight, before)


def test_files_that_hold_no_weights(tmp_path):
    torch.save([1, 2], tmp_path / "x.bin")
    with pytest.raises(
        CorruptCheckpointError, match=r"does not hold a dictionary of tensors by name, but one list"
    ):
        open_weights(tmp_path / "x.bin")
    torch.save({"w": torch.ones(1), "epoch": 3}, tmp_path / "x.bin")
    with pytest.raises(CorruptCheckpointError, match=r"under 'epoch' is one int.*Save the tensors alone"):
        open_weights(tmp_path / "x.bin")
    (tmp_path / "x.index.json").write_text('{"w": "../x.bin"}')
    with pytest.raises(UnsafeCheckpointError):
        open_weights(tmp_path / "x.index.json")


# load_state_dict


def test_load_state_dict(tmp_path):
    state_dict = Net().state_dict()
    safetensors.torch.save_file(state_dict, tmp_path / "a.safetensors", metadata={"format": "pt"})
    torch.save(state_dict, tmp_path / "a.bin")
    for name in ("a.safetensors", "a.bin"):
        found = load_state_dict(tmp_path / name)
        assert found.keys() == state_dict.keys()
        assert all(torch.equal(found[n], state_dict[n]) for n in state_dict)
    found = load_state_dict(tmp_path / "a.safetensors", {"body": "meta", "body.1": "cpu", "head": "disk"})
    devices = {name: tensor.device.type for name, tensor in found.items()}
    assert (devices["body.0.weight"], devices["body.1.weight"], devices["head.weight"]) == (
        "meta",
        "cpu",
        "cpu",
    )


@pytest.mark.parametrize("safe", [True, False])
def test_extra_state_that_is_a_tensor(tmp_path, safe):
    class Counted(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return torch.tensor(self.seen)

        def set_extra_state(self, state):
            self.seen = int(state)

    model, again = nn.Sequential(Counted(2, 2)), nn.Sequential(Counted(2, 2))
    model[0].seen = 3
    save_model(model, tmp_path, safe_serialization=safe)
    assert load_checkpoint_in_model(again, tmp_path, strict=True) == LoadReport()
    assert again[0].seen == 3


class Scaled(nn.Linear):
    """Has extra state that is no tensor."""

    scale: object = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


@pytest.mark.parametrize("how", ["torch.save", "save_model", "shards", "training state", "wrapped"])
def test_extra_state_that_is_no_tensor(tmp_path, how):
    model, again = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2)), nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    model[0].scale = 3.0
    path = tmp_path / "x"
    if how in ("torch.save", "wrapped"):
        prefix = "_orig_mod." if how == "wrapped" else ""
        path = tmp_path / "x.bin"
        torch.save({prefix + name: value for name, value in model.state_dict().items()}, path)
    elif how == "training state":
        save_training_state(path, models=[model.state_dict()], shared={}, per_rank={})
    else:
        save_model(model, path, 20 if how == "shards" else "10GB", safe_serialization=False)
        loaded = [torch.load(file, weights_only=True) for file in sorted(path.glob("*.bin"))]
        assert {name for part in loaded for name in part} == set(model.state_dict())
    assert load_checkpoint_in_model(again, path, strict=True) == LoadReport()
    assert again[0].scale == 3.0
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def test_extra_state_that_a_checkpoint_lacks_is_said(tmp_path):
    save_model(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    model = nn.Sequential(Scaled(2, 2))
    with pytest.warns(UserWarning, match=r"no extra state for 0\._extra_state, which stays as it is"):
        assert load_checkpoint_in_model(model, tmp_path) == LoadReport()
    with pytest.raises(StateMismatchError, match=r"not in the checkpoint: 0\._extra_state"):
        load_checkpoint_in_model(model, tmp_path, strict=True)


def test_extra_state_that_nothing_takes_is_unexpected(tmp_path):
    save_model(nn.Sequential(Scaled(2, 2)), tmp_path, safe_serialization=False)
    with pytest.warns(UserWarning, match=r"0\._extra_state"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(StateMismatchError, match=r"0\._extra_state"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2)), tmp_path, strict=True)


def test_t32_ties_of_values_that_do_not_equal_themselves(tmp_path):
    value = torch.full((6, 4), torch.nan)
    state_dict = {"embed.weight": value, "head.weight": value.clone()}
    safetensors.torch.save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Tied()
    load_checkpoint_in_model(model, tmp_path)
    assert model.head.weight.isnan().all()


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_load_state_dict_of_a_file_that_is_not_there(tmp_path, name):
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        load_state_dict(tmp_path / name)


@pytest.mark.parametrize(
    ("device_map", "told"),
    [
        ({"": "anywhere"}, "puts '' on 'anywhere', which is not a device"),
        ({"": None}, "puts '' on None, which is not a device"),
        ({"": "mps:7"}, "puts '' on 'mps:7', but this machine has no mps device"),
        ("cpu", r"give a map.*\{'': 'cpu'\}"),
    ],
)
def test_devices_that_are_not_there_are_refused_before_anything_is_read(tmp_path, device_map, told):
    for call in (lambda: load_checkpoint_in_model(Net(), tmp_path / "none", device_map),
                 lambda: load_state_dict(tmp_path / "none.safetensors", device_map)):  # fmt: skip
        with pytest.raises(DeviceError, match=told):
            call()


def test_load_state_dict_and_formats(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "none.safetensors")
    with pytest.warns(UserWarning, match="does not say which framework"):
        load_state_dict(tmp_path / "none.safetensors")
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "np.safetensors", metadata={"format": "np"})
    with pytest.raises(CorruptCheckpointError, match="'np'"):
        load_state_dict(tmp_path / "np.safetensors")


@pytest.mark.parametrize("read", ["model", "meta", "state dict"])
def test_files_of_torch_save_may_be_written_in_place_again(tmp_path, read):
    """As torch.save does: it empties the file first, and touching a view of it would then end the process."""
    saved, path = nn.Linear(50, 50), tmp_path / "pytorch_model.bin"
    torch.save(saved.state_dict(), path)
    again = on_meta(lambda: nn.Linear(50, 50)) if read == "meta" else nn.Linear(50, 50)
    loaded = load_state_dict(path) if read == "state dict" else load_checkpoint_in_model(again, tmp_path)
    path.write_bytes(bytes(path.stat().st_size))
    found = loaded if read == "state dict" else again.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("meta", [False, True])
def test_loading_on_an_accelerator(tmp_path, meta):
    model = WithTable()
    save_model(model.to(torch.accelerator.current_accelerator()), tmp_path)
    again = WithTable()
    if meta:
        again.linear = on_meta(lambda: nn.Linear(2, 2))
    load_checkpoint_in_model(again, tmp_path, device_map={"": torch.accelerator.current_accelerator()})
    assert {t.device.type for t in (*again.parameters(), *again.buffers())} == {model.table.device.type}
    assert torch.equal(again.linear.weight, model.linear.weight)


def test_a_lazy_model_is_refused(tmp_path):
    save_model(nn.Linear(2, 2), tmp_path)
    with pytest.raises(UninitializedTensorError, match="'weight' of the model is lazy"):
        load_checkpoint_in_model(nn.LazyLinear(2), tmp_path)


def test_an_expanded_buffer_is_refused_before_anything_changes(tmp_path):
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_buffer("e", torch.zeros(1).expand(3))

    save({"w": torch.ones(2), "e": torch.ones(3)}, tmp_path / "x.safetensors", safe_serialization=True)
    model = Expanded()
    with pytest.raises(StateMismatchError, match="'e' of the model is expanded"):
        load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    assert model.w.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("saved", "wanted", "fits"),
    [
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.bool, True),
        (torch.uint8, torch.bool, True),
        (torch.int64, torch.float32, True),
        (torch.float32, torch.complex64, True),
    ],
)
def test_kinds_of_dtypes_that_lose_values(tmp_path, saved, wanted, fits):
    model = nn.Module()
    model.register_buffer("b", torch.zeros(2, dtype=wanted))
    save({"b": torch.ones(2, dtype=saved)}, tmp_path / "x.safetensors", safe_serialization=True)
    if fits:
        load_checkpoint_in_model(model, tmp_path / "x.safetensors")
        assert torch.equal(model.b, torch.ones(2, dtype=wanted))
    else:
        with pytest.raises(StateMismatchError, match=f"b: {saved} instead of {wanted}"):
            load_checkpoint_in_model(model, tmp_path / "x.safetensors")


@pytest.mark.parametrize("scale", ["weight_scale_inv", "SCB"])
def test_quantised_weights_are_no_weights_of_a_plain_model(tmp_path, scale):
    codes = torch.ones(4, 4, dtype=torch.int8 if scale == "SCB" else torch.float8_e4m3fn)
    state_dict = {"weight": codes, "bias": torch.ones(4), scale: torch.ones(4)}
    safetensors.torch.save_file(state_dict, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        StateMismatchError, match=rf"weight: {codes.dtype}, quantised, instead of torch.float32"
    ):
        load_checkpoint_in_model(nn.Linear(4, 4), tmp_path / "x.safetensors")
    safetensors.torch.save_file(
        {"weight": codes.to(torch.float8_e4m3fn), "bias": torch.ones(4)}, tmp_path / "x.safetensors"
    )
    again = nn.Linear(4, 4)
    load_checkpoint_in_model(again, tmp_path / "x.safetensors")  # without scales these are just short floats
    assert torch.equal(again.weight, torch.ones(4, 4))


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    model = nn.Linear(2, 2)
    save_model(model, "~/m")
    save({"a": torch.ones(1)}, "~/a.pt")
    save_training_state("~/c/checkpoint_1", models=[model.state_dict()], shared={}, per_rank={})
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    load_checkpoint_in_model(model, "~/m")
    assert set(load_state_dict("~/m/model.safetensors")) == {"weight", "bias"}
    assert load("~/a.pt")["a"] == 1
    assert [path.name for path in complete_checkpoints("~/c")] == ["checkpoint_1"]
    assert prune_checkpoints("~/c", 1) == []


@pytest.mark.parametrize("differ", [True, False])
def test_t32_names_with_other_values_that_the_model_ties(tmp_path, differ):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    weights = {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2) + differ}
    save(weights, tmp_path / "x.safetensors", safe_serialization=True)
    if not differ:
        load_checkpoint_in_model(model, tmp_path / "x.safetensors")
        assert model[1].weight is model[0].weight
        return
    before = model[0].weight.clone()
    with pytest.raises(
        StateMismatchError, match=r"1\.weight: other values than 0\.weight, with which the model ties"
    ):
        load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    assert torch.equal(model[0].weight, before)
    with pytest.warns(UserWarning, match="other values than"):
        load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=False)
    assert torch.equal(model[0].weight, torch.ones(2, 2))


@pytest.mark.parametrize("is_small", [True, False], ids=["small load", "large load"])
def test_garbage_is_searched_for_again_after_a_load_and_during_a_large_one(tmp_path, monkeypatch, is_small):
    seen = []

    class Watching(Placer):
        def put(self, step, value):
            seen.append(gc.isenabled())
            if len(seen) == 2:
                raise OSError("stopped")
            super().put(step, value)

    monkeypatch.setattr(loading, "_SMALL_LOAD", 1 << 30 if is_small else 0)
    save_model(nn.Linear(2, 2), tmp_path)
    with pytest.raises(OSError, match="stopped"):
        load_weights(nn.Linear(2, 2), Request(tmp_path), Watching())
    assert seen == [not is_small] * 2
    assert gc.isenabled()


@pytest.mark.parametrize("checkpoint", [None, 3, {"weight": torch.ones(2)}])
def test_a_checkpoint_that_is_no_path(checkpoint):
    with pytest.raises(TypeError, match=f"the checkpoint is a {type(checkpoint).__name__}; pass the path of"):
        load_checkpoint_in_model(Net(), checkpoint)


def test_a_model_that_is_none(tmp_path):
    save_model(Net(), tmp_path)
    with pytest.raises(TypeError, match=r"the model is the text 'Net'; .*give a torch\.nn\.Module"):
        load_checkpoint_in_model("Net", tmp_path)


def test_what_would_be_refused_is_known_before_anything_is_loaded(tmp_path):
    save_model(Net(), tmp_path)
    for make in (Net, lambda: on_meta(Net)):
        model = make()
        before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        check_checkpoint_fits(model, tmp_path)
        assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    more = Net()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match=r"not in the checkpoint: extra\.weight, extra\.bias"):
        check_checkpoint_fits(more, tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="none"):
        check_checkpoint_fits(Net(), tmp_path / "none")
