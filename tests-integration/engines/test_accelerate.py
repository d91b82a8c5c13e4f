"""The real Accelerate 1.15 and this library read each other's training states. Run with `hatch run engines:accelerate`.

One script, run with the imports of either. Its oracle is the run that was never interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from testkit import rank_files, worlds

accelerate = pytest.importorskip("accelerate", reason="hatch run engines:accelerate installs it")

FIXTURES = Path(__file__).parents[2] / "packages" / "accel-ckpt" / "tests" / "fixtures"
STOP = 4


def recipe():
    spec = importlib.util.spec_from_file_location("foreign_recipe", FIXTURES / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(library, folder, resume, *, workers=0, stateful=True, dropout=True, seedable=False):
    """Train two epochs. Either save after STOP batches and go on, or load that state and go on.

    Returns the weights at the end, and the order of the samples after the stop.
    """
    warnings.simplefilter("ignore")
    lib = importlib.import_module(library)
    utils = importlib.import_module("accelerate.utils") if library == "accelerate" else lib
    parts = recipe()
    utils.set_seed(99 if resume else 4)
    options = {"use_stateful_dataloader": stateful}
    if seedable:
        options |= {"use_seedable_sampler": True, "data_seed": 5}
    accelerator = lib.Accelerator(cpu=True, dataloader_config=utils.DataLoaderConfiguration(**options))
    model = parts.Small()
    model.drop.p = 0.5 if dropout else 0.0
    other = nn.Linear(4, 1)
    optimizer = parts.optimizer_of(model)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = DataLoader(parts.loader().dataset, batch_size=2, shuffle=seedable, num_workers=workers)
    model, other, optimizer, second, scheduler, data = accelerator.prepare(
        model, other, optimizer, second, scheduler, data
    )
    notes = parts.Notes()
    accelerator.register_for_checkpointing(notes)
    seen = []

    def epoch(batches, begin=0):
        for index, (x,) in enumerate(batches, begin):
            if index >= STOP or begin or notes.seen > STOP:
                seen.append(x[:, 0].tolist())
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean() + other(x).square().mean())
                for each in (optimizer, second):
                    each.step()
                    each.zero_grad()
                scheduler.step()
            notes.seen += 1
            if not resume and notes.seen == STOP:
                accelerator.save_state(folder)

    if resume:
        accelerator.load_state(folder)
        assert notes.seen == STOP
        epoch(data if stateful and resume != "skip" else lib.skip_first_batches(data, STOP), STOP)
    else:
        epoch(data)
    if hasattr(data, "set_epoch"):
        data.set_epoch(1)
    epoch(data)
    weights = [accelerator.unwrap_model(each).state_dict() for each in (model, other)]
    return [{name: value.clone() for name, value in each.items()} for each in weights], seen


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name
    assert found[1] == expected[1]


def run(ranks, *args, **options):
    """In processes of their own: each library has its own idea of the process group."""
    return worlds.run(script, ranks, *args, timeout=120, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_states_of_accelerate_continue_here_bit_for_bit(ranks, workers, tmp_path):
    straight = run(ranks, "accelerate", tmp_path / "state", False, workers=workers)
    resumed = run(ranks, "accel_train", tmp_path / "state", True, workers=workers)
    for found, expected in zip(resumed, straight, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_seeded_order_goes_on(ranks, tmp_path):
    straight = run(ranks, "accelerate", tmp_path / "state", False, seedable=True)
    resumed = run(ranks, "accel_train", tmp_path / "state", True, seedable=True)
    for found, expected in zip(resumed, straight, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_skipping_batches_does_what_it_does_there(ranks, tmp_path):
    run(ranks, "accelerate", tmp_path / "state", False, stateful=False)
    theirs = run(ranks, "accelerate", tmp_path / "state", "skip", stateful=False)
    ours = run(ranks, "accel_train", tmp_path / "state", "skip", stateful=False)
    for found, expected in zip(ours, theirs, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_exported_states_continue_there(ranks, tmp_path):
    straight = run(ranks, "accel_train", tmp_path / "state", False, stateful=False, dropout=False)
    command = [sys.executable, "-m", "accel_cli", "merge-weights", "--accelerate_state"]
    done = subprocess.run(
        [*command, str(tmp_path / "state"), str(tmp_path / "exported")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"skip_first_batches(loader, {STOP})" in done.stdout
    resumed = run(ranks, "accelerate", tmp_path / "exported", "skip", stateful=False, dropout=False)
    for found, expected in zip(resumed, straight, strict=True):
        assert_same(found, expected)


def _random_states(library, folder):
    lib = importlib.import_module(library)
    accelerator = lib.Accelerator(cpu=True)
    if library == "accel_train":
        torch.manual_seed(6 + accelerator.process_index)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    import random

    import numpy as np

    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()


def test_exported_random_states_are_those_of_every_rank(tmp_path):
    import accel_ckpt

    ours = worlds.run(_random_states, 2, "accel_train", tmp_path / "state")
    assert accel_ckpt.export_to_accelerate(tmp_path / "state", tmp_path / "exported") == ()
    assert worlds.run(_random_states, 2, "accelerate", tmp_path / "exported") == ours
    assert ours[0] != ours[1]


def test_weights_merged_here_equal_those_merged_there(tmp_path):
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    import accel_ckpt

    source = FIXTURES / "accelerate-1.15" / "fsdp_sharded" / "checkpoint" / "pytorch_model_fsdp_0"
    merge_fsdp_weights(str(source), str(tmp_path / "theirs"))
    accel_ckpt.merge_fsdp_weights(str(source), str(tmp_path / "ours"))
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def _files_of_each_rank(folder):
    """Accelerate runs FSDP only on GPUs; here its own functions save what torch has divided on the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

    model, optimizer = rank_files.trained((2,))
    PartialState(cpu=True)  # for its logger
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=fsdp.StateDictType.SHARDED_STATE_DICT,
        state_dict_config=fsdp.ShardedStateDictConfig(),
        optim_state_dict_config=fsdp.ShardedOptimStateDictConfig(),
    )
    rank = torch.distributed.get_rank()
    stand_in = SimpleNamespace(num_processes=2, process_index=rank, is_fsdp2=True)
    save_fsdp_model(plugin, stand_in, model, folder, use_dcp=False)
    save_fsdp_optimizer(plugin, stand_in, optimizer, model, folder, use_dcp=False)
    return rank_files.whole(model, optimizer)


def test_files_of_each_rank_are_read_whole(tmp_path):
    import accel_ckpt

    expected, _ = worlds.run(_files_of_each_rank, 2, str(tmp_path / "theirs"))
    rank_files.written(tmp_path / "ours", 2)
    names = [sorted(path.name for path in (tmp_path / who).iterdir()) for who in ("theirs", "ours")]
    assert names[0] == names[1]
    checkpoint = accel_ckpt.AccelerateCheckpoint(tmp_path / "theirs")
    model = rank_files.Net()
    model.load_state_dict(checkpoint.model(0))
    assert all(torch.equal(value, expected["model"][name]) for name, value in model.state_dict().items())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accel_ckpt.load_optimizer_state(optimizer, checkpoint.optimizer(0, [], [model]), [model])
    for name, parameter in model.named_parameters():
        for key, value in expected["optimizer"]["state"][name].items():
            assert torch.equal(optimizer.state[parameter][key], value)
