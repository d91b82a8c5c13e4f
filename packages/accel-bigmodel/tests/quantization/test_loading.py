"""How weights come to an engine; with an engine that rounds, so that none has to be installed."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import accel_bigmodel.quantization.loading as loading
from accel_bigmodel import (
    BnbQuantizationConfig,
    OffloadError,
    QuantizationError,
    TorchAoQuantizationConfig,
    dispatch_model,
    has_4bit_bnb_layers,
    init_empty_weights,
    load_and_quantize_model,
    offload_stats,
    undispatch,
)
from accel_bigmodel.streaming.transfer import HostTransfer
from accel_ckpt import StateMismatchError, UninitializedTensorError, save_model
from accel_ckpt.format.memory import mapped_file_of
from accel_state.errors import MissingDependencyError


class Rounded(nn.Module):
    def __init__(self, layer, codes):
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) / 8, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight.codes"] = self.codes.detach()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class RoundingEngine:
    """Eighths, as int8."""

    def __init__(self):
        self.flags = {"quantization_method": "rounding"}
        self.seen = []

    def why_not(self, layer, device):
        return None

    def quantize(self, layer, weight, device):
        self.seen.append((weight.dtype, weight.device.type, tuple(weight.shape)))
        return Rounded(layer, (weight * 8).round().to(torch.int8).to(device))

    def expected_pieces(self, layer, device):
        return {"weight.codes": (torch.Size((layer.out_features, layer.in_features)), torch.int8)}

    def restore(self, layer, pieces, device):
        return Rounded(layer, pieces["weight.codes"].to(device, copy=True))


@pytest.fixture
def engine(monkeypatch):
    made = RoundingEngine()
    monkeypatch.setattr(loading, "quantization_engine", lambda config: made)
    return made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8, bias=False)
        self.register_buffer("angle", torch.arange(8.0) / 3, persistent=False)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(self.up(x)).relu()
        return self.lm_head(self.down(x) + self.angle.to(x.dtype))


CONFIG = TorchAoQuantizationConfig("int8", torch_dtype="fp32")
IDS = torch.tensor([1, 2, 3])


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Model().eval()
    model.norm.running_mean.normal_()
    return model


def expected(model, dtype=torch.float32):
    """What should come out, by hand."""
    model = model.to(dtype)
    model.angle = torch.arange(8.0) / 3
    with torch.no_grad():
        for layer in (model.up, model.down):
            layer.weight.copy_((layer.weight * 8).round() / 8)
    return model(IDS)


def meta_model():
    with init_empty_weights():
        return Model().eval()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_checkpoint(engine, trained, tmp_path, safe, dtype):
    save_model(trained, tmp_path, safe_serialization=safe)
    config = TorchAoQuantizationConfig("int8", torch_dtype=dtype)
    model = load_and_quantize_model(meta_model(), config, tmp_path)
    assert torch.equal(model(IDS), expected(trained, dtype))
    assert set(engine.seen) == {(dtype, "cpu", (16, 8)), (dtype, "cpu", (8, 16))}


def test_of_a_model_in_memory(engine, trained):
    model = Model().eval()
    model.load_state_dict(trained.state_dict())
    old = weakref.ref(model.up.weight)
    assert load_and_quantize_model(model, CONFIG) is model
    assert old() is None, "the full weight is still there"
    assert torch.equal(model(IDS), expected(trained))


def test_a_checkpoint_goes_before_what_a_model_has(engine, trained, tmp_path):
    save_model(trained, tmp_path)
    model = Model().eval()
    load_and_quantize_model(model, CONFIG, tmp_path)
    assert torch.equal(model(IDS), expected(trained))


def test_T32_ties_are_kept(engine, trained, tmp_path):
    save_model(trained, tmp_path / "plain")
    model = load_and_quantize_model(meta_model(), CONFIG, tmp_path / "plain")
    assert model.lm_head.weight is model.embed.weight
    save_model(model, tmp_path / "quantised")
    again = load_and_quantize_model(meta_model(), CONFIG, tmp_path / "quantised", strict=True)
    assert again.lm_head.weight is again.embed.weight
    assert torch.equal(again(IDS), model(IDS))


def test_what_was_quantised_is_not_quantised_again(engine, trained, tmp_path):
    save_model(load_and_quantize_model(trained, CONFIG), tmp_path)
    engine.seen.clear()
    load_and_quantize_model(meta_model(), CONFIG, tmp_path, strict=True)
    assert engine.seen == []


def test_flags_that_others_read(engine, trained):
    model = load_and_quantize_model(trained, CONFIG, device_map={"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert type(model.hf_device_map) is dict
    assert model.quantization_method == "rounding"
    assert not hasattr(model, "is_quantized")


def test_dtypes(engine, trained, tmp_path):
    save_model(trained, tmp_path)
    config = TorchAoQuantizationConfig("int8", torch_dtype="bf16", keep_in_fp32_modules=["norm", "down"])
    for model in (
        load_and_quantize_model(meta_model(), config, tmp_path),
        load_and_quantize_model(trained, config),
    ):
        state = {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}
        assert state == {
            "embed.weight": torch.bfloat16,
            "up.codes": torch.int8,
            "up.bias": torch.bfloat16,
            "norm.weight": torch.float32,
            "norm.bias": torch.float32,
            "norm.running_mean": torch.float32,
            "norm.running_var": torch.float32,
            "norm.num_batches_tracked": torch.int64,
            "down.weight": torch.float32,
            "angle": torch.float32,
        }
        assert type(model.down) is nn.Linear


def test_a_shared_module_stays_shared(engine, tmp_path):
    def build():
        shared = nn.Linear(4, 4)
        return nn.ModuleDict({"a": shared, "b": nn.Linear(4, 4), "c": shared})

    config = TorchAoQuantizationConfig("int8", torch_dtype="fp32", skip_modules=[])
    plain = build()
    save_model(plain, tmp_path)
    with init_empty_weights():
        empty = build()
    model = load_and_quantize_model(empty, config, tmp_path)
    assert model["a"] is model["c"]
    assert isinstance(model["a"], Rounded)
    assert torch.equal(model["a"].codes, (plain["a"].weight * 8).round().to(torch.int8))
    save_model(model, tmp_path / "quantised")
    with init_empty_weights():
        empty = build()
    again = load_and_quantize_model(empty, config, tmp_path / "quantised", strict=True)
    assert again["a"] is again["c"]
    assert torch.equal(again["a"].codes, model["a"].codes)
    codes = {f"{name}.weight.codes": torch.ones(4, 4, dtype=torch.int8) for name in "abc"}
    codes["c.weight.codes"][0] = 0
    save_model({**codes, "a.bias": torch.ones(4), "b.bias": torch.ones(4)}, tmp_path / "quantised")
    with init_empty_weights():
        empty = build()
    with pytest.raises(StateMismatchError, match=r"c\.weight: other values than a\.weight"):
        load_and_quantize_model(empty, config, tmp_path / "quantised")


def unchanged(model):
    return (
        type(model.up) is nn.Linear
        and model.up.weight.device.type == "meta"
        and not hasattr(model, "hf_device_map")
    )


def damaged(trained, tmp_path, change):
    state = trained.state_dict()
    change(state)
    save_model(state, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("up.weight"), "is not in the checkpoint: up.weight"),
        (
            lambda state: state.update({"up.weight": torch.zeros(3, 3)}),
            r"up.weight: \(3, 3\) instead of \(16, 8\)",
        ),
        (lambda state: state.pop("norm.bias"), "is not in the checkpoint: norm.bias"),
    ],
)
def test_names_are_judged_before_anything_is_changed(engine, trained, tmp_path, change, message):
    model = meta_model()
    with pytest.raises(StateMismatchError, match=message):
        load_and_quantize_model(model, CONFIG, damaged(trained, tmp_path, change))
    assert unchanged(model)
    assert engine.seen == []


def test_what_is_missing_can_be_let_pass(engine, trained, tmp_path):
    folder = damaged(trained, tmp_path, lambda state: state.pop("up.weight"))
    model = Model()
    old = model.up.weight.detach().clone()
    with pytest.warns(UserWarning, match="up.weight"):
        load_and_quantize_model(model, CONFIG, folder, strict=False)
    assert torch.equal(model.up.codes, (old * 8).round().to(torch.int8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.update({"up.weight.codes": torch.zeros(2, 2, dtype=torch.int8)}),
            r"up\.weight\.codes is torch",
        ),
        (
            lambda s: s.update({"up.weight.codes": torch.zeros(16, 8)}),
            r"torch\.float32 .* instead of torch\.int8",
        ),
        (lambda s: s.update({"up.weight.absmax": torch.zeros(2)}), r"up\.weight\.absmax is not expected"),
        (lambda s: s.update({"down.SCB": s.pop("down.weight.codes")}), r"down\.weight\.codes is missing"),
        (
            lambda s: s.update({"lm_head.SCB": torch.zeros(2)}),
            "lm_head is quantised in the checkpoint, but is not to be quantised here",
        ),
        (
            lambda s: s.update({"lm_head.weight.codes": torch.zeros(10, 8, dtype=torch.int8)}),
            "lm_head is quantised in the checkpoint, but is not to be quantised here",
        ),
    ],
)
def test_a_checkpoint_that_was_quantised_otherwise(engine, trained, tmp_path, change, message):
    folder = damaged(load_and_quantize_model(trained, CONFIG), tmp_path, change)
    model = meta_model()
    with pytest.raises(QuantizationError, match=message):
        load_and_quantize_model(model, CONFIG, folder)
    assert unchanged(model)


@pytest.mark.parametrize("safe", [True, False, None], ids=["another dtype", "bin", "in memory"])
def test_a_missing_offload_folder_is_noticed_before_anything_is_quantised(engine, trained, tmp_path, safe):
    config = TorchAoQuantizationConfig("int8", torch_dtype="bf16" if safe else "fp32")
    device_map = {"embed": "disk", "lm_head": "disk", "": "cpu"}
    save_model(trained, tmp_path / "m", safe_serialization=safe is True)
    model, folder = (trained, None) if safe is None else (meta_model(), tmp_path / "m")
    with pytest.raises(OffloadError, match="offload_folder is 3; give the path of a folder"):
        load_and_quantize_model(model, config, folder, device_map, offload_folder=3)
    with pytest.raises(OffloadError, match=r"embed\.weight are to be kept on disk, but.*pass offload_folder"):
        load_and_quantize_model(model, config, folder, device_map)
    assert engine.seen == []
    assert type(model.up) is nn.Linear
    model = load_and_quantize_model(model, config, folder, device_map, offload_folder=tmp_path / "o")
    assert mapped_file_of(model.embed.weight) is not None
    save_model(trained.float(), tmp_path / "f")
    model = load_and_quantize_model(meta_model(), CONFIG, tmp_path / "f", device_map)
    assert mapped_file_of(model.embed.weight).path.parent == tmp_path / "f"


def test_a_dispatched_model_is_dispatched_no_longer(engine, trained):
    want = expected(copy.deepcopy(trained))
    dispatch_model(trained, {"": "cpu"}, transfer=HostTransfer())
    with pytest.raises(QuantizationError, match=r"up, down have hooks.*undispatch\(model\) removes"):
        load_and_quantize_model(trained, CONFIG)
    assert torch.equal(load_and_quantize_model(undispatch(trained), CONFIG)(IDS), want)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    dispatch_model(blocks, {"": "cpu"}, transfer=HostTransfer())  # hooks are on the blocks
    load_and_quantize_model(blocks, CONFIG)
    with pytest.raises(OffloadError, match="was not dispatched"):
        offload_stats(blocks)
    blocks(torch.ones(4))


def test_a_model_without_values_needs_a_checkpoint(engine):
    model = meta_model()
    with pytest.raises(UninitializedTensorError, match=r"embed\.weight.*give weights_location"):
        load_and_quantize_model(model, CONFIG)
    assert unchanged(model)


def test_one_full_weight_at_a_time(engine, tmp_path, monkeypatch):
    """No weight in full precision outlives its own quantising."""
    save_model(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), tmp_path)
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    alive = []

    def quantize(layer, weight, device, original=engine.quantize):
        assert [ref for ref in alive if ref() is not None] == []
        alive.append(weakref.ref(weight.untyped_storage()))
        return original(layer, weight, device)

    monkeypatch.setattr(engine, "quantize", quantize)
    load_and_quantize_model(
        model, TorchAoQuantizationConfig("int8", torch_dtype="bf16", skip_modules=[]), tmp_path
    )
    assert len(alive) == 6


def test_not_a_configuration():
    with pytest.raises(
        QuantizationError, match="give a BnbQuantizationConfig or a TorchAoQuantizationConfig"
    ):
        load_and_quantize_model(Model(), {"load_in_8bit": True})


@pytest.mark.parametrize(
    ("config", "package"),
    [
        (BnbQuantizationConfig(load_in_4bit=True), "bitsandbytes"),
        (TorchAoQuantizationConfig("int8"), "torchao"),
    ],
)
def test_an_engine_that_is_not_installed(config, package, monkeypatch):
    for module in (f"accel_bigmodel.quantization.{name}" for name in ("ao", "bnb")):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    model = Model()
    with pytest.raises(MissingDependencyError, match=rf"need {package}: pip install '{package}<"):
        load_and_quantize_model(model, config)
    assert type(model.up) is nn.Linear


def test_importing_loads_no_engine():
    code = (
        "import sys, accel_bigmodel as b; [getattr(b, name) for name in b.__all__ if 'uant' in name or 'bnb' in name];"
        "sys.exit(bool({'bitsandbytes', 'torchao'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not has_4bit_bnb_layers(Model())
