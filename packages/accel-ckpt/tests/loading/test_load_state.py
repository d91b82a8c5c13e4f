"""Training states: trees in, trees out, and nothing else."""

import collections
import json
import math
import os
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointVersionError,
    CorruptCheckpointError,
    MissingPartError,
    UnsupportedValueError,
    open_training_state,
    save_training_state,
)


def save(directory, models=(), shared=None, per_rank=None, **options):
    return save_training_state(
        directory, models=models, shared=shared or {}, per_rank=per_rank or {}, **options
    )


def test_layout_and_round_trip(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other = nn.Linear(2, 2)
    shared = {"optimizer_0": {"state": {"model_0.0.weight": {"exp_avg": torch.randn(4, 3)}}}, "step": 7}
    rng = {"python": (3, (1, 2, 3), None), "torch": torch.get_rng_state()}
    path = save(tmp_path / "checkpoint_3", [model.state_dict(), other.state_dict()], shared, {"rng": rng})

    assert sorted(os.listdir(path)) == [
        "manifest.json", "model.safetensors", "model_1.safetensors",
        "rank-00000.json", "rank-00000.safetensors", "state.json", "state.safetensors",
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["checkpoint_3"]

    loaded = open_training_state(path)
    assert len(loaded.models) == 2
    for saved, found in zip((model, other), loaded.models, strict=True):
        assert found.keys() == saved.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in saved.state_dict().items())
    assert torch.equal(
        loaded.shared["optimizer_0"]["state"]["model_0.0.weight"]["exp_avg"],
        shared["optimizer_0"]["state"]["model_0.0.weight"]["exp_avg"],
    )
    assert loaded.shared["step"] == 7
    assert loaded.per_rank(0)["rng"]["python"] == (3, (1, 2, 3), None)
    assert torch.equal(loaded.per_rank(0)["rng"]["torch"], rng["torch"])

    # The safetensors library is the oracle of the files themselves.
    tensors = safetensors.torch.load_file(path / "state.safetensors")
    assert list(tensors) == ["optimizer_0.state.model_0.0.weight.exp_avg"]
    assert safetensors.torch.load_file(path / "model_1.safetensors").keys() == other.state_dict().keys()


def test_trees_without_the_values_of_tensors(tmp_path, monkeypatch):
    trees = {"a": {"x": torch.ones(3), "n": 1}, "b": 2}
    save_training_state(tmp_path / "c", models=[], shared=trees, per_rank={"own": torch.zeros(2)})
    checkpoint = open_training_state(tmp_path / "c")
    assert checkpoint.lazy_trees(names=["b"]) == {"b": 2}
    with monkeypatch.context() as patch:
        patch.setattr("accel_ckpt.format.saved_tensors.read_boxes", None)
        shared, own = checkpoint.lazy_trees(), checkpoint.lazy_trees(0)
    assert (shared["a"]["n"], shared["a"]["x"].shape, own["own"].dtype) == (1, (3,), torch.float32)
    assert torch.equal(shared["a"]["x"].read(), torch.ones(3))


def test_loaded_tensors_are_writable_and_independent_of_the_file(tmp_path):
    path = save(tmp_path / "c", [{"w": torch.ones(3)}], {"s": {"t": torch.zeros(3)}})
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    checkpoint = open_training_state(path)
    model, tree = checkpoint.models[0], checkpoint.shared["s"]
    (path / "model.safetensors").write_bytes(b"\0" * len(before["model.safetensors"]))
    (path / "state.safetensors").write_bytes(b"\0" * len(before["state.safetensors"]))
    assert torch.equal(model["w"], torch.ones(3))
    model["w"] += 1
    tree["t"] += 1
    assert model["w"].untyped_storage().nbytes() == 12


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_models(tmp_path, safe):
    weights = {f"layer{i}.weight": torch.randn(10, 10) for i in range(5)}
    path = save(tmp_path / "c", [weights, weights], safe_serialization=safe, max_shard_size="1KB")
    suffix = "safetensors" if safe else "bin"
    stem = "model" if safe else "pytorch_model"
    assert (path / f"{stem}-00001-of-00003.{suffix}").is_file()
    assert (path / f"{stem}_1.{suffix}.index.json").is_file()
    found = open_training_state(path).models[1]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("safe", [True, False])
def test_t32_tied_names_stay_tied(tmp_path, safe):
    tied = torch.randn(4, 2)
    path = save(tmp_path / "c", [{"embed.weight": tied, "head.weight": tied}], safe_serialization=safe)
    found = open_training_state(path).models[0]
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert torch.equal(found["head.weight"], tied)
    assert sum(f.stat().st_size for f in path.glob("*model*")) < 2500


def test_extra_state_that_is_not_a_tensor(tmp_path):
    path = save(
        tmp_path / "c", [{"w": torch.ones(1), "layer._extra_state": {"scale": (1.5, None)}}], {"x": 1}
    )
    checkpoint = open_training_state(path)
    assert checkpoint.models[0]["layer._extra_state"] == {"scale": (1.5, None)}
    assert list(checkpoint.shared) == ["x"]


def test_keys_that_join_to_one_name_do_not_collide(tmp_path):
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    found = open_training_state(save(tmp_path / "c", shared={"t": tree})).shared["t"]
    assert found["a.b"].item() == 0
    assert found["a"]["b"].item() == 1


def test_one_tensor_in_two_places_is_stored_once(tmp_path):
    tensor = torch.randn(100)
    path = save(tmp_path / "c", shared={"a": {"x": tensor}, "b": [tensor]})
    assert (path / "state.safetensors").stat().st_size < 700
    shared = open_training_state(path).shared
    assert shared["a"]["x"] is shared["b"][0]


def test_dtypes_that_safetensors_lacks(tmp_path):
    tree = {"z": torch.randn(3, 2, dtype=torch.complex128), "s": torch.tensor(1.5, dtype=torch.complex128)}
    found = open_training_state(save(tmp_path / "c", shared={"t": tree})).shared["t"]
    assert torch.equal(found["z"], tree["z"])
    assert found["s"].shape == ()


def test_odd_tensors(tmp_path):
    base = torch.arange(12.0)
    tree = {
        "transposed": base.view(3, 4).t(),
        "slice": base[2:4],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "parameter": nn.Parameter(torch.ones(2)),
        "expanded": torch.ones(1).expand(4),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    found = open_training_state(save(tmp_path / "c", shared={"t": tree})).shared["t"]
    for name, tensor in tree.items():
        assert torch.equal(found[name], tensor.detach()), name
        assert found[name].dtype == tensor.dtype


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.PolynomialLR(o)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_states_of_torch_schedulers(tmp_path, name):
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(scheduler):
        scheduler.step(*([1.0] if name == "plateau" else []))

    optimizer, scheduler = make()
    for _ in range(3):
        step(scheduler)
    path = save(tmp_path / "c", shared={"scheduler_0": scheduler.state_dict()})
    optimizer_2, scheduler_2 = make()
    scheduler_2.load_state_dict(open_training_state(path).shared["scheduler_0"])
    optimizer_2.load_state_dict(optimizer.state_dict())
    for _ in range(4):
        step(scheduler)
        step(scheduler_2)
        assert optimizer.param_groups[0]["lr"] == optimizer_2.param_groups[0]["lr"]


def test_scaler_and_plain_data(tmp_path):
    scaler = torch.amp.GradScaler("cpu")
    tree = {
        "scaler": scaler.state_dict(),
        "counts": collections.Counter("abca"),
        "nan": math.nan,
        "array": np.arange(5000, dtype=">i4").reshape(50, 100),
        "blob": bytes(range(256)) * 40,
        (1, "k"): {2: None},
    }
    path = save(tmp_path / "c", shared={"t": tree})
    found = open_training_state(path).shared["t"]
    assert math.isnan(found.pop("nan"))
    array = found.pop("array")
    assert array.dtype == tree["array"].dtype
    assert np.array_equal(array, tree["array"])
    assert found == {k: v for k, v in tree.items() if k not in ("nan", "array")}
    assert (path / "state.json").stat().st_size < 2000  # large arrays and bytes are not in the JSON


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": Custom()}]}, r"\['thing'\]\['a'\]\[1\]\['b'\]"),
        ({"f": print}, r"\['thing'\]\['f'\]"),
        ({Custom(): 1}, r"\['thing'\]\[key "),
        ({"o": np.array([object()])}, r"\['thing'\]\['o'\]"),
    ],
)
def test_t25_what_would_need_pickle_fails_at_save(tmp_path, value, path):
    previous = save(tmp_path / "c", shared={"x": 1})
    with pytest.raises(UnsupportedValueError, match=path):
        save(tmp_path / "c", shared={"thing": value})
    assert open_training_state(previous).shared["x"] == 1
    assert os.listdir(tmp_path) == ["c"]


def test_t25_nothing_in_a_checkpoint_names_code(tmp_path):
    path = save(tmp_path / "c", [{"w": torch.ones(1)}], {"t": {"a": (1, 2)}}, {"rng": (3,)})
    content = json.loads((path / "state.json").read_text())
    content["t"]["a"]["!"] = "builtins.eval"
    (path / "state.json").write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match=r"state\.json.*has .* bytes, but the manifest"):
        open_training_state(path)
    for name in path.iterdir():
        assert name.suffix in (".json", ".safetensors")


def test_t7_a_missing_rank_is_an_error_with_an_explicit_opt_out(tmp_path):
    path = save(tmp_path / "c", per_rank={"rng": {"python": 1}})
    checkpoint = open_training_state(path)
    with pytest.raises(CheckpointNotFoundError, match=r"no state of rank 1: it was saved by 1 ranks"):
        checkpoint.per_rank(1)
    assert checkpoint.per_rank(1, allow_missing=True) is None


def test_t7_a_missing_part_of_a_rank_is_an_error_that_names_what_is_there(tmp_path):
    checkpoint = open_training_state(save(tmp_path / "c", shared={"a": 1}, per_rank={"loader_0": {}}))
    with pytest.raises(MissingPartError, match=r"the state of rank 0 .* no part 'rng'; it has loader_0"):
        checkpoint.per_rank(0)["rng"]
    with pytest.raises(MissingPartError, match=r"no part 'optimizer_0'; it has a"):
        checkpoint.shared["optimizer_0"]
    assert "rng" not in checkpoint.per_rank(0)
    assert checkpoint.per_rank(0).get("rng") is None


def test_t7_an_unreadable_rank_file_is_an_error(tmp_path):
    path = save(tmp_path / "c", per_rank={"rng": {"torch": torch.get_rng_state()}})
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors is missing"):
        open_training_state(path)


@pytest.mark.parametrize("safe", [True, False])
def test_a_file_that_vanishes_while_the_checkpoint_is_read_is_not_called_corrupt(tmp_path, safe):
    """Another process may prune a checkpoint that this one has opened."""
    path = save(
        tmp_path / "c",
        [nn.Linear(2, 2).state_dict()],
        {"moment": torch.ones(3)},
        {"rng": torch.ones(2)},
        safe_serialization=safe,
    )
    for name in sorted(set(os.listdir(path)) - {"manifest.json"}):
        checkpoint = open_training_state(path)
        os.rename(path / name, tmp_path / "away")
        with pytest.raises(FileNotFoundError, match=name):
            _ = (checkpoint.models[0], checkpoint.shared, checkpoint.per_rank(0))
        os.rename(tmp_path / "away", path / name)


def test_hooks_may_add_files(tmp_path):
    def hook(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "notes.txt").write_text("hello")

    path = save(tmp_path / "c", before_write=hook)
    assert (path / "sub" / "notes.txt").read_text() == "hello"
    assert open_training_state(path).manifest.files["sub/notes.txt"].size == 5
    (path / "sub" / "notes.txt").write_text("HELLO")
    with pytest.raises(CorruptCheckpointError, match=r"notes\.txt has the checksum"):
        open_training_state(path).verify()


def test_a_hook_that_fails_fails_the_save(tmp_path):
    previous = save(tmp_path / "c", shared={"x": 1})

    def hook(folder):
        raise ZeroDivisionError("in the hook")

    with pytest.raises(ZeroDivisionError, match="in the hook"):
        save(tmp_path / "c", shared={"x": 2}, before_write=hook)
    assert open_training_state(previous).shared["x"] == 1
    assert os.listdir(tmp_path) == ["c"]


def _flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def _read_everything(path):
    checkpoint = open_training_state(path)
    return [*checkpoint.models], dict(checkpoint.shared), dict(checkpoint.per_rank(0))


@pytest.mark.parametrize("safe", [True, False])
def test_one_flipped_bit_in_each_file_is_found(tmp_path, safe):
    path = save(
        tmp_path / "c",
        [{"w": torch.randn(5)}],
        {"s": {"t": torch.randn(4), "n": 3}},
        {"rng": {"t": torch.randn(9)}},
        safe_serialization=safe,
    )
    files = sorted(p for p in path.iterdir())
    assert len(files) == 6
    random = np.random.default_rng(0)
    for file in files:
        whole = file.read_bytes()
        for position in {0, len(whole) - 1, *random.integers(0, len(whole), 20).tolist()}:
            _flip(file, position, int(random.integers(0, 8)))
            with pytest.raises((CorruptCheckpointError, CheckpointVersionError)) as error:
                _read_everything(path)
            assert file.name in str(error.value)
            file.write_bytes(whole)
    _read_everything(path)


def test_a_truncated_file_is_found(tmp_path):
    path = save(tmp_path / "c", [{"w": torch.randn(50)}], {"s": {"t": torch.randn(40)}}, {"rng": {"a": 1}})
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for size in (0, 5, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(CorruptCheckpointError) as error:
                open_training_state(path)
            assert file.name in str(error.value)
        file.write_bytes(whole)


def test_verification_can_be_left_out(tmp_path):
    path = save(tmp_path / "c", [{"w": torch.zeros(4)}])
    _flip(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1, 0)
    with pytest.raises(CorruptCheckpointError, match="has the checksum"):
        open_training_state(path).models[0]
    assert open_training_state(path, verify=False).models[0]["w"].shape == (4,)


def test_a_wrong_path_names_the_newest_checkpoint_nearby(tmp_path):
    runs = tmp_path / "runs"
    for age, name in ((30, "step_20"), (20, "step_40"), (10, "damaged")):
        manifest = save(runs / name, [{"w": torch.zeros(4)}]) / "manifest.json"
        os.utime(manifest, (time.time() - age,) * 2)
    (runs / "damaged" / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=f"folder {runs / 'nothing'}; the newest .* in {runs} is step_40$"
    ):
        open_training_state(runs / "nothing")
    with pytest.raises(CheckpointNotFoundError, match=f"not complete; the newest .* in {runs} is step_40$"):
        open_training_state(runs)
    with pytest.raises(
        CheckpointNotFoundError, match=f"the newest complete checkpoint in {runs} is step_40$"
    ):
        open_training_state(runs / "step_20x" / "y")
    with pytest.raises(CheckpointNotFoundError, match=f"; the nearest folder that exists is {tmp_path}$"):
        open_training_state(tmp_path / "rnus" / "step_20")
    with pytest.raises(CheckpointNotFoundError, match=r"folder .*gone$"):
        open_training_state(tmp_path / "gone")


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint folder"):
        open_training_state(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError, match="is a file; pass the folder of the checkpoint"):
        open_training_state(tmp_path / "file")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no manifest\.json"):
        open_training_state(tmp_path)


def test_a_model_index_out_of_range(tmp_path):
    with pytest.raises(IndexError, match="holds 1 models; 1 was asked for"):
        open_training_state(save(tmp_path / "c", [{"w": torch.ones(1)}])).models[1]


def test_odd_names_of_tensors(tmp_path):
    tree = {"__metadata__": torch.ones(1), "\ud800": torch.ones(2)}
    path = save(tmp_path / "c", shared={"__metadata__": torch.ones(3), "t": tree})
    found = open_training_state(path).shared
    assert found["__metadata__"].shape == (3,)
    assert {name: tensor.tolist() for name, tensor in found["t"].items()} == {
        "__metadata__": [1], "\ud800": [1, 1]
    }  # fmt: skip


def test_what_is_nested_too_deeply_is_refused(tmp_path):
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(UnsupportedValueError, match="'deep' of the training state is nested too deeply"):
        save(tmp_path / "c", shared={"deep": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_tensors_that_are_not_plain_values_are_refused_with_their_path(tmp_path):
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    }
    for name, tensor in odd.items():
        with pytest.raises(UnsupportedValueError, match=rf"the tensor at \['t'\]\['{name}'\] (has|is)"):
            save(tmp_path / "c", shared={"t": {name: tensor}})


def test_reading_a_model_leaves_the_optimizer_s_file_alone(tmp_path):
    """Its tensors can be twice as large as the model."""
    path = save(tmp_path / "c", models=[{"w": torch.ones(2)}], shared={"o": torch.ones(3)})
    checkpoint = open_training_state(path)
    (path / "state.safetensors").unlink()
    assert torch.equal(checkpoint.models[0]["w"], torch.ones(2))


def test_a_model_to_copy_from(tmp_path):
    from accel_ckpt import CorruptCheckpointError

    weights = {
        "a": torch.randn(30, 40),
        "b": torch.randn(3).bfloat16(),
        "c": torch.empty(0),
        "d": torch.tensor(True),
    }
    weights["tied"] = weights["a"]
    for safe in (True, False):
        folder = save_training_state(
            tmp_path / "c", models=[weights], shared={}, per_rank={}, safe_serialization=safe
        )
        mapped = open_training_state(folder).mapped_model(0)
        assert mapped.keys() == weights.keys()
        assert all(torch.equal(mapped[name], weights[name]) for name in weights)
    folder = save_training_state(tmp_path / "c", models=[weights], shared={}, per_rank={})
    mapped = open_training_state(folder).mapped_model(0)
    mapped["a"].zero_()  # never reaches the file
    raw = bytearray((folder / "model.safetensors").read_bytes())
    open_training_state(folder).verify()
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors has the checksum"):
        open_training_state(folder).mapped_model(0)
