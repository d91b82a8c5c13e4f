"""Folders in DeepSpeed's layout; tests-integration/engines/test_deepspeed_folders.py reads real ones."""

import enum
import math
import os
import re
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from accel_ckpt.convert.accelerate import AccelerateCheckpoint, is_accelerate_checkpoint
from accel_ckpt.foreign.deepspeed import DeepSpeedFolder, tagged_folder
from accel_state.errors import NotAvailableError


@pytest.fixture
def engine_classes():
    """Classes that real files name, while files are written."""

    class ZeroStageEnum(int, enum.Enum):
        two = 2
        three = 3

    class LossScaler:
        def __init__(self):
            self.cur_scale = 1.0

    modules = {}
    for cls, module in ((ZeroStageEnum, "runtime.zero.config"), (LossScaler, "runtime.fp16.loss_scaler")):
        cls.__module__, cls.__qualname__ = f"deepspeed.{module}", cls.__name__
        parts = cls.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, ModuleType(name))
        setattr(modules[cls.__module__], cls.__name__, cls)
    sys.modules.update(modules)
    yield ZeroStageEnum, LossScaler
    for name in modules:
        del sys.modules[name]


SHAPES = [{"up.weight": (3, 5), "down.weight": (2, 3)}, {"up.bias": (3,), "scale": ()}]
FROZEN = {"frozen": (7,)}


def weights_of(shapes=SHAPES):
    count = 0
    found = {}
    for name, shape in [*(item for group in shapes for item in group.items()), *FROZEN.items()]:
        found[name] = torch.arange(count, count + math.prod(shape), dtype=torch.float32).view(shape)
        count += math.prod(shape)
    return found


def shares(tensors, ranks, stage):
    """Flat parts of each rank, with the padding of real ones."""
    if stage == 3:
        found = [[] for _ in range(ranks)]
        for tensor in tensors:
            share = -(-tensor.numel() // ranks)
            padded = torch.cat([tensor.reshape(-1), torch.full((share * ranks - tensor.numel(),), -1.0)])
            for rank, part in enumerate(padded.split(share) if share else [padded] * ranks):
                found[rank].append(part)
        return [torch.cat(parts) for parts in found]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    share = -(-flat.numel() // ranks)
    return [flat[rank * share : (rank + 1) * share] for rank in range(ranks)]


def write(directory, stage, ranks, classes=None, shapes=SHAPES):
    folder = directory / "tag"
    folder.mkdir(parents=True)
    (directory / "latest").write_text("tag")
    weights = weights_of(shapes)
    parts = [shares([weights[name] for name in group], ranks, stage) for group in shapes]
    kind, scaler = (int, dict) if classes is None else classes
    groups = [{"lr": 0.1 * (i + 1), "betas": (0.9, 0.99), "params": [i]} for i in range(len(shapes))]
    for rank in range(ranks):
        own = [group[rank] for group in parts]
        state = {
            i: {"step": torch.tensor(4.0), "exp_avg": part * 10, "exp_avg_sq": part * 100}
            for i, part in enumerate(own)
        }
        base = {"state": state, "param_groups": groups}
        saved = {"zero_stage": kind(stage), "loss_scaler": scaler()}
        if stage == 3:
            saved |= {"partition_count": ranks, "fp32_flat_groups": own, "optimizer_state_dict": base}
        else:
            counts = [ranks] * len(shapes)
            saved |= {"partition_count": counts, "single_partition_of_fp32_groups": own}
            saved |= {"base_optimizer_state": base}
        torch.save(
            {"optimizer_state_dict": saved, "ds_version": "0.19.8"},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if rank and stage < 3:
            continue
        module = {
            name: (torch.empty(0) if stage == 3 else value.bfloat16()) for name, value in weights.items()
        }
        frozen = [shares([weights[name]], ranks, 3)[rank] for name in FROZEN]
        model = {
            "module": {**module, "counter": torch.tensor(3), "tied": module["up.weight"]},
            "buffer_names": ["counter"],
            "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
            "frozen_param_shapes": {n: torch.Size(s) for n, s in FROZEN.items()} if stage == 3 else None,
            "frozen_param_fragments": dict(zip(FROZEN, frozen, strict=True)) if stage == 3 else None,
            "shared_params": {"tied": "up.weight"},
            "lr_scheduler": {"last_batch_iteration": 4},
        }
        name = (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        )
        torch.save(model, folder / name)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_become_whole_tensors(tmp_path, engine_classes, stage, ranks):
    write(tmp_path, stage, ranks, engine_classes if stage > 1 else None)
    folder = DeepSpeedFolder(tagged_folder(tmp_path))
    assert folder.stage == stage
    found = folder.weights()
    for name, value in weights_of().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, check_dtype=name != "frozen")
    assert torch.equal(found["tied"], found["up.weight"])
    assert found["counter"] == 3
    state = folder.optimizer()
    assert [group["params"] for group in state["param_groups"]] == [list(group) for group in SHAPES]
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.2]
    for name in (name for group in SHAPES for name in group):
        assert state["state"][name]["step"] == 4
        assert torch.equal(state["state"][name]["exp_avg"], found[name] * 10)
        assert torch.equal(state["state"][name]["exp_avg_sq"], found[name] * 100)
    assert folder.scheduler == {"last_batch_iteration": 4}


shapes = st.lists(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4), min_size=1, max_size=3
)


@settings(max_examples=25, deadline=None)
@given(groups=shapes, ranks=st.integers(1, 4), stage=st.sampled_from([1, 3]))
def test_any_shapes(tmp_path_factory, groups, ranks, stage):
    named = [{f"{i}.{j}": tuple(shape) for j, shape in enumerate(group)} for i, group in enumerate(groups)]
    named[0]["up.weight"] = (2, 2)
    folder = DeepSpeedFolder(write(tmp_path_factory.mktemp("any"), stage, ranks, shapes=named))
    found = folder.weights()
    for name, value in weights_of(named).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, check_dtype=name != "frozen")


def test_as_a_state_of_accelerate(tmp_path):
    write(tmp_path, 2, 2)
    assert is_accelerate_checkpoint(tmp_path)
    checkpoint = AccelerateCheckpoint(tmp_path)
    assert checkpoint.kind == "DeepSpeed, ZeRO stage 2"
    assert checkpoint.parts() == {
        "models": 1,
        "optimizers": 1,
        "schedulers": 1,
        "scalers": 0,
        "custom objects": 0,
    }
    assert torch.equal(checkpoint.model(0)["up.weight"], weights_of()["up.weight"])
    assert checkpoint.scheduler(0) == {"last_batch_iteration": 4}
    (tmp_path / "latest").unlink()
    (tmp_path / "tag").rename(tmp_path / "pytorch_model")
    assert AccelerateCheckpoint(tmp_path).kind == "DeepSpeed, ZeRO stage 2"


def test_without_zero(tmp_path):
    """Float32 copies have no names; tied weights are stored once."""
    copies = [torch.full((2, 2), 1.001), torch.full((2,), 0.5004)]
    rounded = [copy.bfloat16() for copy in copies]
    state = {"state": {0: {"step": 1}}, "param_groups": [{"params": [0, 1]}]}
    (tmp_path / "tag").mkdir()
    torch.save(
        {
            "module": {"bias": rounded[1], "w": rounded[0], "tied": rounded[0], "frozen": torch.ones(2, 2)},
            "optimizer": {"fp32_groups": [copies], "optimizer_state_dict": state},
        },
        tmp_path / "tag" / "mp_rank_00_model_states.pt",
    )
    folder = DeepSpeedFolder(tmp_path / "tag")
    found = folder.weights()
    assert torch.equal(found["w"], copies[0])
    assert torch.equal(found["tied"], copies[0])
    assert torch.equal(found["bias"], copies[1])
    assert folder.stage == 0
    assert folder.optimizer() == state


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_no_code_is_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, 2, 2)
    torch.save({"module": Evil(), "optimizer_state_dict": Evil()}, folder / name)
    with pytest.raises(UnsafeCheckpointError, match=name.split("_mp_")[0]):
        DeepSpeedFolder(folder).weights()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", "", "a/b", "C:x"])
def test_a_tag_names_a_folder_beside_it(tmp_path, tag):
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CorruptCheckpointError, match="can only name one beside it"):
        AccelerateCheckpoint(tmp_path)


def test_a_tag_that_is_gone(tmp_path):
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointNotFoundError, match=r"'global_step7'.*holds no"):
        AccelerateCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "a pipeline"),
        ("layer_1_expert_0_mp_rank_00_model_states.pt", "a mixture of experts"),
    ],
)
def test_other_layouts_are_named(tmp_path, name, what):
    folder = write(tmp_path, 2, 2)
    (folder / name).touch()
    with pytest.raises(NotAvailableError, match=f"with {what}.*plain weights"):
        DeepSpeedFolder(folder)


def change(path, how):
    content = torch.load(path, weights_only=True)
    how(content)
    torch.save(content, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_that_are_missing_or_damaged_are_named(tmp_path, stage):
    folder = write(tmp_path, stage, 3)
    rank = folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    whole = rank.read_bytes()
    rank.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"by 3 ranks, and the optim_states of rank 2"):
        DeepSpeedFolder(folder).weights()
    rank.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match="zero_pp_rank_2"):
        DeepSpeedFolder(folder).weights()
    rank.write_bytes(whole)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def shorten(content):
        parts = content["optimizer_state_dict"][key]
        parts[0] = parts[0][:-2].clone()

    change(rank, shorten)
    with pytest.raises(CorruptCheckpointError, match=r"does not hold all of .*are too short"):
        DeepSpeedFolder(folder).weights()
    change(rank, lambda content: content["optimizer_state_dict"].pop(key))
    with pytest.raises(CorruptCheckpointError, match=f"holds no {key} for group 0"):
        DeepSpeedFolder(folder).weights()
    model = next(folder.glob("*_model_states.pt"))
    torch.save([1], sorted(folder.glob("*_model_states.pt"))[0])
    with pytest.raises(CorruptCheckpointError, match=rf"{model.name[:2]}.*has no 'module'"):
        DeepSpeedFolder(folder).weights()


@pytest.mark.timeout(20)
def test_more_ranks_than_any_machine_has_end_at_the_first_that_is_missing(tmp_path):
    folder = write(tmp_path, 2, 2)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=True)
    content["optimizer_state_dict"]["partition_count"] = [2**64 - 1]
    torch.save(content, path)
    with pytest.raises(CheckpointNotFoundError, match=r"by 18446744073709551615 ranks, and .* of rank 2 "):
        DeepSpeedFolder(folder).weights()


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        *(("param_shapes", odd) for odd in (3, {"up.weight": "x"}, [[1]], [{"up.weight": (-1, "a")}])),
        *(("shared_params", odd) for odd in (3, [{}], [[1]])),
        *(("module", odd) for odd in (3, [], [{}])),
    ],
)
def test_odd_content_is_an_error_that_names_the_folder(tmp_path, key, odd):
    folder = write(tmp_path, 2, 2)
    change(folder / "mp_rank_00_model_states.pt", lambda content: content.update({key: odd}))
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(folder))):
        DeepSpeedFolder(folder).weights()


def test_a_part_of_a_frozen_parameter_is_missing(tmp_path):
    folder = write(tmp_path, 3, 2)
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"the model_states of rank 1"):
        DeepSpeedFolder(folder).weights()


def test_no_optimizer_and_elastic_states(tmp_path):
    (tmp_path / "tag").mkdir()
    torch.save({"module": {}, "optimizer": None}, tmp_path / "tag" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointNotFoundError, match="no state of an optimizer"):
        DeepSpeedFolder(tmp_path / "tag").optimizer()
    folder = write(tmp_path / "elastic", 2, 1)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    change(path, lambda content: content["optimizer_state_dict"].update(base_optimizer_state=[{}]))
    with pytest.raises(NotAvailableError, match=r"elastic form.*elastic_checkpoint"):
        DeepSpeedFolder(folder).optimizer()
