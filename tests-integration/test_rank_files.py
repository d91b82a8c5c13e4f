"""Files of each FSDP rank, which Accelerate writes with ``use_dcp=False``, in other worlds and strategies."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from testkit import worlds
from testkit.rank_files import Net, written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MESHES = [(2,), (4,), (2, 2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the whole state of each mesh."""
    base = tmp_path_factory.mktemp("saved")
    return {mesh: (base / str(i), written(base / str(i), *mesh)) for i, mesh in enumerate(MESHES)}


def prepared(strategy):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    warnings.simplefilter("ignore")
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin if strategy == "fsdp2" else None)
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return plugin, accelerator, model, optimizer


def state(accelerator, model, optimizer):
    """The whole weights and the whole optimizer state by parameter name."""
    plain = accelerator.unwrap_model(model)
    whole = {
        name: {
            key: getattr(value, "full_tensor", lambda value=value: value)()
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in plain.named_parameters()
    }
    return {
        "model": dict(accelerator.get_state_dict(model)),
        "state": whole,
        "lr": optimizer.param_groups[0]["lr"],
    }


def load(folder, strategy):
    _, accelerator, model, optimizer = prepared(strategy)
    accelerator.load_state(folder, only=("models", "optimizers"))
    return state(accelerator, model, optimizer)


def assert_same(found, expected):
    torch.testing.assert_close(found["model"], dict(expected["model"]), rtol=0, atol=0)
    torch.testing.assert_close(found["state"], expected["optimizer"]["state"], rtol=0, atol=0)
    assert found["lr"] == 0.1


@pytest.mark.parametrize(
    ("mesh", "ranks", "strategy"),
    [
        ((4,), 1, "single"),
        ((2, 2), 2, "ddp"),
        ((2,), 3, "fsdp2"),
        ((4,), 2, "fsdp2"),
        pytest.param((2,), 1, "single", marks=pytest.mark.wide),
        pytest.param((4,), 3, "ddp", marks=pytest.mark.wide),
        pytest.param((2, 2), 3, "fsdp2", marks=pytest.mark.wide),
        pytest.param((4,), 3, "fsdp2", marks=pytest.mark.wide),
        pytest.param((2,), 2, "fsdp2", marks=pytest.mark.wide),
    ],
)
def test_any_world_continues(saved, mesh, ranks, strategy):
    folder, expected = saved[mesh]
    for found in worlds.run(load, ranks, str(folder), strategy):
        assert_same(found, expected)


def load_files(folder):
    from accel_train import load_fsdp_model, load_fsdp_optimizer

    plugin, accelerator, model, optimizer = prepared("fsdp2")
    missing = load_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=False)
    assert list(missing.missing_keys) == list(missing.unexpected_keys) == []
    return state(accelerator, model, optimizer)


def test_accelerates_functions_read_them(saved):
    folder, expected = saved[4,]
    for found in worlds.run(load_files, 3, str(folder)):
        assert_same(found, expected)


def fail_to_load(folder):
    from accel_ckpt import CheckpointError
    from accel_train import load_fsdp_model

    plugin, accelerator, model, optimizer = prepared("fsdp2")
    before, said = state(accelerator, model, optimizer), []
    for call in (
        lambda: accelerator.load_state(folder, only=("models", "optimizers")),
        lambda: load_fsdp_model(plugin, accelerator, model, folder, use_dcp=False),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        said.append(str(caught.value))
    after = state(accelerator, model, optimizer)
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    assert after["state"] == before["state"] == {name: {} for name in before["state"]}
    return said


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of what four ranks saved."""
    return Path(shutil.copytree(saved[4,][0], tmp_path / "checkpoint"))


def test_a_file_that_one_rank_needs_stops_all(folder):
    (folder / "pytorch_model_fsdp_0_rank3.bin").write_bytes(b"damaged")
    for said in worlds.run(fail_to_load, 2, str(folder)):
        assert all("pytorch_model_fsdp_0_rank3.bin" in text for text in said)


def test_another_model_is_refused(folder):
    for path in folder.glob("pytorch_model_fsdp_0_rank*.bin"):
        content = torch.load(path, weights_only=True)
        content["head.weight"] = content["body.weight"]
        torch.save(content, path)
    for said in worlds.run(fail_to_load, 2, str(folder)):
        assert all("head.weight" in text and "[7, 4] there and [1, 7] here" in text for text in said)


def of_another_shape(folder, strategy):
    from accel_ckpt import StateMismatchError

    _, accelerator, _, _ = prepared(strategy)
    with pytest.raises(StateMismatchError) as caught:
        accelerator.load_state(folder, only=("optimizers",))
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_an_optimizer_of_another_shape_is_refused(folder, strategy):
    for path in folder.glob("optimizer_0_rank*.bin"):
        content = torch.load(path, weights_only=True)
        states = content["state"]
        states["head.weight"]["exp_avg"] = states["body.weight"]["exp_avg"]
        torch.save(content, path)
    for said in worlds.run(of_another_shape, 1 if strategy == "single" else 2, str(folder), strategy):
        assert "shape [7, 4] as exp_avg of model_0.head.weight" in said
