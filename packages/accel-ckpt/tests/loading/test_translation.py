"""Modules that translate their state dict: torch's own load_state_dict says what is right."""

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_ckpt import check_checkpoint_fits, load_checkpoint_in_model, save_model
from accel_ckpt.errors import CheckpointError, StateMismatchError
from accel_ckpt.format.memory import mapped_file_of
from accel_state import PartialState
from testkit import worlds


class Logarithm(nn.Module):
    """Saves the logarithm of its weight."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))
        self.register_buffer("steps", torch.tensor(int(value)))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().log()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if prefix + "weight" in state_dict:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].exp()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x):
        return x * self.weight


class Transposed(nn.Module):
    """Saves its weight transposed, by torch's public hooks."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4) * value)
        self.register_state_dict_post_hook(self._turn)
        self.register_load_state_dict_pre_hook(self._turn)

    @staticmethod
    def _turn(module, state_dict, prefix, *rest):
        if prefix + "weight" in state_dict:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T.contiguous()

    def forward(self, x):
        return x @ self.weight


class Renamed(nn.Module):
    """Its files know ``old.`` as the name of ``new.``: the hook is on the module above."""

    def __init__(self, value=1.0):
        super().__init__()
        self.new = nn.Linear(4, 4)
        nn.init.constant_(self.new.weight, value)
        self._register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(state_dict, prefix, *rest):
        for name in [name for name in state_dict if name.startswith(prefix + "old.")]:
            state_dict[prefix + "new." + name.removeprefix(prefix + "old.")] = state_dict.pop(name)

    def forward(self, x):
        return self.new(x)


class WholeOwn(nn.Module):
    """Has a load_state_dict of its own."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))

    def state_dict(self, *args, **kwargs):
        return {"weight": super().state_dict(*args, **kwargs)["weight"] / 2}

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict({"weight": state_dict["weight"] * 2}, strict)

    def forward(self, x):
        return x * self.weight


def model_of(kind, value=1.0):
    return nn.Sequential(nn.Linear(4, 4), kind(value)) if kind is not WholeOwn else kind(value)


def file_of(trained, path, old_names=False):
    state = {name: value.detach().clone() for name, value in trained.state_dict().items()}
    if old_names:
        state = {name.replace("new.", "old."): value for name, value in state.items()}
    if path.suffix == ".bin":
        torch.save(state, path)
    else:
        save_file(state, path, {"format": "pt"})
    return path


@pytest.mark.parametrize("kind", [Logarithm, Transposed, Renamed, WholeOwn])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_what_torch_loads(tmp_path, kind, meta, name):
    trained = model_of(kind, 3.0)
    path = file_of(trained, tmp_path / name, old_names=True)
    with torch.device("meta" if meta else "cpu"):
        model = model_of(kind)
    kept = None if meta else dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_checkpoint_in_model(model, path, strict=True)
    assert report == type(report)()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), trained(x))
    assert kept is None or all(kept[name] is p for name, p in model.named_parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_save_model_and_load(tmp_path):
    trained = nn.Sequential(Logarithm(3.0), Transposed(3.0))
    save_model(trained, tmp_path)
    model = nn.Sequential(Logarithm(), Transposed())
    load_checkpoint_in_model(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), trained.state_dict())


@pytest.mark.parametrize("kind", [Logarithm, Transposed])
def test_dtype(tmp_path, kind):
    trained = model_of(kind, 3.0)
    path = file_of(trained, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = model_of(kind)
    load_checkpoint_in_model(model, path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(
        dict(model.named_parameters()),
        {name: p.to(torch.bfloat16) for name, p in trained.named_parameters()},
        rtol=0.01,
        atol=0,
    )


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("lacking", ["0.weight", "1.weight", "1.steps"])
def test_what_is_missing_is_refused_and_changes_nothing(tmp_path, meta, lacking):
    state = model_of(Logarithm, 3.0).state_dict()
    del state[lacking]
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    with torch.device("meta" if meta else "cpu"):
        model = model_of(Logarithm)
    kept = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(StateMismatchError, match=rf"not in the checkpoint: {lacking}"):
        load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, (tensor, values) in kept.items():
        if "1.weight" not in name:  # of which a state dict gives the logarithm
            assert own[name] is tensor
            assert meta or torch.equal(tensor, values)
    assert meta is own["1.weight"].is_meta
    assert meta or (own["1.weight"] == 1).all()


def test_not_strict_leaves_what_a_module_does_not_fill(tmp_path):
    state = model_of(Logarithm, 3.0).state_dict()
    del state["1.weight"]
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    with torch.device("meta"):
        model = model_of(Logarithm)
    with pytest.warns(UserWarning, match=r"1\.weight"):
        report = load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=False)
    assert report.missing == ("1.weight",)
    assert model[1].weight.is_meta
    assert model[1].steps == 3


@pytest.mark.parametrize("strict", [None, True, False])
def test_another_shape(tmp_path, strict):
    state = model_of(Logarithm, 3.0).state_dict()
    state["1.weight"] = torch.zeros(5)
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    model = model_of(Logarithm)
    before = model[0].weight.clone()
    if strict is False:
        with pytest.warns(UserWarning, match=r"size mismatch for 1\.weight"):
            load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=False)
    else:
        with pytest.raises(StateMismatchError, match=r"size mismatch for 1\.weight.*Nothing was changed"):
            load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=strict)
        assert torch.equal(model[0].weight, before)
    assert (model[1].weight == 1).all()
    assert model[1].steps == 1


def test_what_nobody_takes_is_unexpected(tmp_path):
    path = file_of(model_of(Logarithm, 3.0), tmp_path / "x.safetensors")
    save_file(
        {**torch.load(file_of(model_of(Logarithm, 3.0), tmp_path / "x.bin")), "1.other": torch.ones(2)}, path
    )
    with pytest.warns(UserWarning, match=r"1\.other"):
        assert load_checkpoint_in_model(model_of(Logarithm), path).unexpected == ("1.other",)
    with pytest.raises(StateMismatchError, match=r"1\.other"):
        load_checkpoint_in_model(model_of(Logarithm), path, strict=True)


def test_hooks_after_a_load_say_what_is_missing(tmp_path):
    seen = []

    class Forgiving(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_load_state_dict_post_hook(self._forgive)

        @staticmethod
        def _forgive(module, keys):
            seen.append(module.weight[0, 0].item())
            if "0.bias" in keys.missing_keys:
                keys.missing_keys.remove("0.bias")

    save_file({"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}, tmp_path / "x.safetensors")
    model = nn.Sequential(Forgiving(), nn.Linear(4, 4, bias=False))
    assert load_checkpoint_in_model(model, tmp_path / "x.safetensors").missing == ()
    assert seen == [1.0]
    with pytest.raises(StateMismatchError, match=r"1\.bias.*All that fits was loaded"):
        load_checkpoint_in_model(nn.Sequential(Forgiving(), nn.Linear(4, 4)), tmp_path / "x.safetensors")


@pytest.mark.parametrize("meta", [False, True])
def test_tied_to_an_ordinary_module(tmp_path, meta):
    def build():
        model = nn.ModuleList([nn.Linear(4, 4, bias=False), Transposed()])
        model[1].weight = model[0].weight
        return model

    trained = build()
    state = {"0.weight": trained[0].weight.detach(), "1.weight": trained[0].weight.detach().T.contiguous()}
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    with torch.device("meta" if meta else "cpu"):
        model = build()
    load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight, trained[0].weight)
    save_file({**state, "1.weight": state["1.weight"] + 1}, tmp_path / "x.safetensors", {"format": "pt"})
    with pytest.raises(StateMismatchError, match="other values than"):
        load_checkpoint_in_model(build(), tmp_path / "x.safetensors")


def test_weight_norm_files_of_the_old_form(tmp_path):
    old = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(old[0])
    path = file_of(old, tmp_path / "x.safetensors")
    for meta in (False, True):
        new = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        nn.utils.parametrizations.weight_norm(new[0])
        new = new.to("meta") if meta else new
        assert load_checkpoint_in_model(new, path, strict=True) is not None
        x = torch.randn(2, 4, 3)
        torch.testing.assert_close(new.eval()(x), old.eval()(x))


@pytest.mark.parametrize("meta", [False, True])
def test_batch_norm_of_before_it_counted(tmp_path, meta):
    trained = nn.Sequential(nn.BatchNorm1d(4))
    trained(torch.randn(3, 4))
    state = {name: value for name, value in trained.state_dict().items() if "tracked" not in name}
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(nn.BatchNorm1d(4))
    load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=True)
    reference = nn.Sequential(nn.BatchNorm1d(4))
    reference.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_ordinary_modules_beside_stay_views_of_the_file(tmp_path):
    path = file_of(model_of(Logarithm, 3.0), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Logarithm())
    load_checkpoint_in_model(model, path)
    assert mapped_file_of(model[0].weight) is not None
    assert mapped_file_of(model[1].weight) is None


def test_renamed_weights_stay_views_of_the_file(tmp_path):
    path = file_of(model_of(Renamed, 3.0), tmp_path / "x.safetensors", old_names=True)
    with torch.device("meta"):
        model = model_of(Renamed)
    load_checkpoint_in_model(model, path)
    assert mapped_file_of(model[1].new.weight) is not None


def test_only_a_load_tells_whether_it_fits(tmp_path):
    path = file_of(model_of(Renamed, 3.0), tmp_path / "x.safetensors", old_names=True)
    check_checkpoint_fits(model_of(Renamed), path)
    with pytest.raises(StateMismatchError, match="bias"):
        check_checkpoint_fits(nn.Sequential(nn.Linear(4, 4), Renamed(), nn.Linear(4, 4)), path)


class Int8(nn.Linear):
    """As bitsandbytes' Linear8bitLt keeps and loads its scales: as an attribute of the weight."""

    def __init__(self, scale=1.0):
        super().__init__(4, 4, bias=False)
        codes = torch.arange(16, dtype=torch.int8).reshape(4, 4)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.SCB = torch.full((4,), scale)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "SCB"] = self.weight.SCB
        destination[prefix + "weight_format"] = torch.tensor(0, dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        for name in [*unexpected]:
            if name == prefix + "SCB":
                self.weight.SCB.copy_(state_dict[name])
                unexpected.remove(name)
            elif name == prefix + "weight_format":
                unexpected.remove(name)

    def forward(self, x):
        return x @ (self.weight * self.weight.SCB[:, None] / 127).T


def test_scales_of_int8_layers(tmp_path):
    trained = nn.Sequential(nn.Linear(4, 4), Int8(2.5))
    save_model(trained, tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), Int8())
    load_checkpoint_in_model(model, tmp_path, strict=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), trained(x))


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("nested", [(), ("nested_absmax", "nested_quant_map")])
def test_scales_of_4_bit_layers_that_nothing_takes(tmp_path, strict, nested):
    parts = ["absmax", "quant_map", "quant_state.bitsandbytes__nf4", *nested]
    state = {f"0.weight.{part}": torch.ones(4) for part in parts}
    save_file({"0.weight": torch.ones(8, 1, dtype=torch.uint8), **state}, tmp_path / "x.safetensors")
    model = nn.Sequential(nn.Module())
    model[0].weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    if strict is False:
        with pytest.warns(UserWarning, match="load_and_quantize_model"):
            load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=False)
    else:
        with pytest.raises(
            StateMismatchError, match=r"0\.weight: quantised, in parts.*load_and_quantize_model"
        ):
            load_checkpoint_in_model(model, tmp_path / "x.safetensors", strict=strict)
    assert not model[0].weight.any()


def test_weights_that_rank_0_sends(tmp_path):
    trained = nn.Sequential(nn.Linear(4, 4), Logarithm(3.0), Renamed(2.0), Transposed(2.0))
    path = file_of(trained, tmp_path / "x.safetensors", old_names=True)

    def work(path):
        rank = PartialState().process_index
        with torch.device("meta" if rank else "cpu"):
            model = nn.Sequential(nn.Linear(4, 4), Logarithm(), Renamed(), Transposed())
        told = ""
        try:  # one rank's model refuses; both say so, and both can go on
            wrong = nn.Sequential(nn.Linear(4, 4), Logarithm(), Renamed(), Transposed(), nn.Linear(1, 1))
            load_checkpoint_in_model(wrong if rank else model, path, broadcast_from_rank0=True)
        except CheckpointError as error:
            told = str(error)
        load_checkpoint_in_model(model, path if rank == 0 else "none", broadcast_from_rank0=True, strict=True)
        return told, {name: p.detach() for name, p in model.named_parameters()}

    for told, found in worlds.run(work, 2, str(path)):
        assert "4.weight" in told
        torch.testing.assert_close(found, {name: p.detach() for name, p in trained.named_parameters()})
