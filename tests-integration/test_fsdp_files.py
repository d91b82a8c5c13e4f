"""Files of a model under FSDP as Accelerate names them, read by PyTorch itself and by this library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def prepared(kind, seed):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return plugin, accelerator, model, optimizer


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.arange(8.0).reshape(2, 4) / 8).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()


def save(folder, kind):
    from accel_train import save_fsdp_model, save_fsdp_optimizer

    plugin, accelerator, model, optimizer = prepared(kind, 0)
    step(accelerator, model, optimizer)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    saved = accelerator.get_state_dict(model)
    step(accelerator, model, optimizer)
    return saved, accelerator.get_state_dict(model)


def load(folder, kind):
    from accel_train import load_fsdp_model, load_fsdp_optimizer

    plugin, accelerator, model, optimizer = prepared(kind, 1)
    found = load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    loaded = accelerator.get_state_dict(model)
    step(accelerator, model, optimizer)
    return list(found.missing_keys), loaded, accelerator.get_state_dict(model)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(2, 2, marks=pytest.mark.full), (2, 3), pytest.param(3, 2, marks=pytest.mark.full)],
)
def test_training_continues_from_the_files(tmp_path, kind, before, after):
    folder = str(tmp_path / "checkpoint")
    saved, following = worlds.run(save, before, folder, kind)[0]
    names = sorted(path.name for path in Path(folder).iterdir())
    if kind == "FULL_STATE_DICT":
        assert names == ["optimizer.bin", "pytorch_model_fsdp.bin"]
        weights = torch.load(f"{folder}/pytorch_model_fsdp.bin", weights_only=True)
    else:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        assert names == ["optimizer_0", "pytorch_model_fsdp_0"]
        dcp_to_torch_save(f"{folder}/pytorch_model_fsdp_0", str(tmp_path / "whole.bin"))
        weights = torch.load(tmp_path / "whole.bin", weights_only=True)["model"]
    torch.testing.assert_close(dict(weights), saved, rtol=0, atol=0)
    for missing, loaded, continued in worlds.run(load, after, folder, kind):
        assert missing == []
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        torch.testing.assert_close(continued, following, rtol=1e-6, atol=1e-7)


def wrong(folder, kind):
    from accel_ckpt import CheckpointNotFoundError
    from accel_train import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model
    from accel_train.errors import OptionError

    plugin, accelerator, model, optimizer = prepared(kind, 0)
    said = []
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_fsdp_model(plugin, accelerator, model, folder)
    said.append(str(caught.value))
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    said.append(str(caught.value))
    with pytest.raises(OptionError) as refused:
        save_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
    return [*said, str(refused.value)]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_files_that_are_not_there_are_named_on_all_ranks(tmp_path, kind):
    (tmp_path / "notes.txt").write_text("")
    first, second = worlds.run(wrong, 2, str(tmp_path), kind)
    assert first == second
    names = (
        ("pytorch_model_fsdp.bin", "optimizer.bin")
        if kind[0] == "F"
        else ("pytorch_model_fsdp_0", "optimizer_0")
    )
    for said, name in zip(first, names, strict=False):
        assert str(tmp_path / name) in said
        assert f"state_dict_type={kind}" in said
        assert "has notes.txt" in said
    assert "use_dcp=False" in first[2]
