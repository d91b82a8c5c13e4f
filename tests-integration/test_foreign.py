"""Training states that the real Accelerate 1.15 wrote continue here as they would have continued there.

The folders in ``packages/accel-ckpt/tests/fixtures/accelerate-1.15`` were made by ``make_accelerate.py`` beside
them. ``continued.safetensors`` are the weights of the run that Accelerate went on with, without stopping.
"""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsafeCheckpointError,
)
from accel_state.environment import patch_environment
from accel_state.errors import NotAvailableError
from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from testkit import worlds

FIXTURES = Path(__file__).parent.parent / "packages" / "accel-ckpt" / "tests" / "fixtures"
FOLDERS = FIXTURES / "accelerate-1.15"


def recipe():
    spec = importlib.util.spec_from_file_location("foreign_recipe", FIXTURES / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quiet_load(accelerator, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerator.load_state(folder, **options)


class Run:
    """The script of the fixtures, with our imports. Everything begins with other numbers than were saved."""

    def __init__(self, folder, seed=11, stateful=True, **options):
        torch.manual_seed(seed)
        self.recipe = recipe()
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful),
            **options,
        )
        model, other = self.recipe.Net(), nn.Linear(4, 1)
        optimizer, second = (
            self.recipe.optimizer_of(model),
            torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        )
        scheduler = self.recipe.scheduler_of(optimizer)
        self.notes = self.recipe.Notes()
        prepared = self.accelerator.prepare(model, other, optimizer, second, scheduler, self.recipe.loader())
        self.model, self.other, self.optimizer, self.second, self.scheduler, self.data = prepared
        self.accelerator.register_for_checkpointing(self.notes)
        if folder is not None:
            quiet_load(self.accelerator, folder)

    def step(self, x):
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean() + self.other(x).square().mean()
            self.accelerator.backward(loss)
            for each in (self.optimizer, self.second):
                each.step()
                each.zero_grad()
            self.scheduler.step()
        self.notes.seen += 1

    def finish(self):
        """The rest of the interrupted epoch, and one more."""
        for data in (self.data, self.data):
            for (x,) in data:
                self.step(x)
        plain = [self.accelerator.unwrap_model(each).state_dict() for each in (self.model, self.other)]
        return {
            f"{i}.{name}": value.clone() for i, state in enumerate(plain) for name, value in state.items()
        }


def assert_same(found, folder):
    expected = load_file(folder / "continued.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # The fixtures were computed on another processor, whose kernels round otherwise, which Adam enlarges: the most
        # that was seen is a twentieth of this. A moment, the step, the seed or the scheduler that was not taken over
        # makes 100 to 10,000 times as much.
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_one_process_goes_on_where_accelerate_stopped():
    run = Run(FOLDERS / "single" / "checkpoint")
    assert run.notes.seen == run.recipe.STOP
    assert len(run.notes.losses) == run.recipe.STOP
    found = run.finish()
    assert run.notes.seen == 2 * len(run.recipe.loader())
    assert_same(found, FOLDERS / "single")


def test_two_ranks_go_on_where_accelerate_stopped():
    first, second = worlds.run(_finish, 2, FOLDERS / "ddp" / "checkpoint")
    assert_same(first, FOLDERS / "ddp")
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name)


def _finish(folder):
    return Run(folder).finish()


def fsdp_run(folder, rank=0, world=1):
    parts = recipe()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(13)
    model = parts.Small()
    optimizer = parts.optimizer_of(model)
    scheduler = parts.scheduler_of(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    scheduler.step_with_optimizer = (
        False  # the raw loop of the fixture stepped once, whatever the number of ranks
    )
    quiet_load(accelerator, folder)
    assert accelerator.step == parts.STOP
    for x in (parts.small_batches(rank, world) * 2)[parts.STOP :]:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = accelerator.get_state_dict(model)
    return {f"0.{name}": value.clone() for name, value in state.items()}


def _fsdp_rank(folder):
    state = Accelerator(cpu=True)
    return fsdp_run(folder, state.process_index, state.num_processes)


@pytest.mark.parametrize("layout", ["fsdp_full", "fsdp_sharded"])
def test_two_ranks_go_on_from_fsdp(layout):
    for found in worlds.run(_fsdp_rank, 2, FOLDERS / layout / "checkpoint"):
        assert_same(found, FOLDERS / layout)


@pytest.mark.parametrize("layout", ["fsdp_full", "fsdp_sharded"])
def test_one_process_reads_fsdp(layout):
    parts = recipe()
    accelerator = Accelerator(cpu=True)
    model = parts.Small()
    optimizer = parts.optimizer_of(model)
    model, optimizer, _ = accelerator.prepare(model, optimizer, parts.scheduler_of(optimizer))
    quiet_load(accelerator, FOLDERS / layout / "checkpoint")
    full = torch.load(FOLDERS / "fsdp_full" / "checkpoint" / "pytorch_model_fsdp.bin", weights_only=True)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in full.items()
    }
    saved = torch.load(FOLDERS / "fsdp_full" / "checkpoint" / "optimizer.bin", weights_only=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], saved["state"][names[id(parameter)]]["exp_avg"])
        assert state["step"] == parts.STOP
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]


@pytest.mark.parametrize(("shuffle", "warned"), [(True, 1), (False, 0)])
def test_a_state_from_inside_an_epoch_says_that_its_order_is_lost(shuffle, warned, tmp_path):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(13)
    parts = recipe()
    model = parts.Small()
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=shuffle)
    optimizer = parts.optimizer_of(model)
    accelerator.prepare(model, optimizer, parts.scheduler_of(optimizer), loader)
    with pytest.warns(UserWarning, match="was written by Accelerate") as told:
        accelerator.load_state(FOLDERS / "fsdp_full" / "checkpoint", allow_missing_rng=True)
    assert str(told[0].message).count(f"saved inside an epoch, after {parts.STOP} micro-batches") == warned


def test_what_was_recognised_is_said_once():
    run = Run(None)
    with pytest.warns(UserWarning, match="was written by Accelerate") as caught:
        run.accelerator.load_state(FOLDERS / "single" / "checkpoint")
    [text] = [str(warning.message) for warning in caught]
    assert "single process or DDP, 1 ranks; 2 models, 2 optimizers, 1 schedulers, 1 custom objects" in text
    assert "complete" in text


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(FOLDERS / "single" / "checkpoint", tmp_path / "checkpoint_4")
    return tmp_path / "checkpoint_4"


def parameters(run):
    return [p.detach().clone() for p in (*run.model.parameters(), *run.other.parameters())]


def refuses(run, folder, error, match, **options):
    """It raises, and nothing was changed."""
    before, random = parameters(run), torch.get_rng_state()
    with pytest.raises(error, match=match):
        quiet_load(run.accelerator, folder, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_t7_a_missing_random_state_is_an_error_unless_allowed(copy):
    (copy / "random_states_0.pkl").unlink()
    run = Run(None)
    refuses(run, copy, CheckpointNotFoundError, r"no random_states_0\.pkl.*allow_missing_rng=True")
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match="random state of rank 0 stays as it is"):
        run.accelerator.load_state(copy, allow_missing_rng=True)
    assert torch.equal(random, torch.get_rng_state())
    assert run.notes.seen == run.recipe.STOP


@pytest.mark.parametrize("damage", ["truncated", "wrong"])
def test_t7_an_unreadable_random_state_is_an_error_unless_allowed(copy, damage):
    path = copy / "random_states_0.pkl"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        torch.save({"step": 3}, path)
    run = Run(None)
    refuses(run, copy, CorruptCheckpointError, r"random_states_0\.pkl.*allow_missing_rng=True")
    quiet_load(run.accelerator, copy, allow_missing_rng=True)
    assert run.notes.seen == run.recipe.STOP


def test_a_rank_that_was_not_there_needs_leave():
    with pytest.raises(worlds.RankError, match=r"random_states_1\.pkl.*allow_missing_rng"):
        worlds.run(_finish, 2, FOLDERS / "single" / "checkpoint")


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    "name",
    ["custom_checkpoint_0.pkl", "optimizer.bin", "scheduler.bin", "dl_state_dict.bin", "random_states_0.pkl"],
)
def test_nothing_in_the_files_is_executed(copy, name, capsys):
    torch.save({"x": Evil()}, copy / name)
    refuses(Run(None), copy, UnsafeCheckpointError, name.replace(".", r"\."))
    assert "executed" not in capsys.readouterr().out


def test_a_plain_pickle_is_not_executed(copy, capsys):
    (copy / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Evil()))
    refuses(Run(None), copy, UnsafeCheckpointError, r"custom_checkpoint_0\.pkl.*trust_custom_objects=True")
    assert "executed" not in capsys.readouterr().out


class Best:
    def __init__(self, loss):
        self.loss = loss


def test_objects_of_other_classes_need_trust(copy):
    torch.save({"seen": 3, "losses": Best(0.5)}, copy / "custom_checkpoint_0.pkl")
    run = Run(None)
    refuses(run, copy, UnsafeCheckpointError, r"it refers to .*Best.*trust_custom_objects=True")
    quiet_load(run.accelerator, copy, trust_custom_objects=True)
    assert run.notes.losses.loss == 0.5


def test_other_objects_than_were_saved(copy):
    run = Run(None)
    run.accelerator.register_for_checkpointing(run.recipe.Notes())
    refuses(run, copy, StateMismatchError, "1 custom objects, and here are 2")
    other = Run(None, mixed_precision="fp16")
    refuses(other, copy, StateMismatchError, "0 scalers, and here are 1")


def test_models_that_hooks_saved_themselves(copy):
    """As scripts do that save adapters or pipelines: the save hook drops the weights, the load hook brings them."""
    files = ("model.safetensors", "model_1.safetensors")
    for name in files:
        (copy / name).rename(copy / f"mine-{name}")
    run = Run(None)
    refuses(run, copy, StateMismatchError, "0 models, and here are 2")

    def load_mine(models, folder):
        for name in files:
            models.pop(0).load_state_dict(load_file(f"{folder}/mine-{name}"), strict=False)

    run.accelerator.register_load_state_pre_hook(load_mine)
    quiet_load(run.accelerator, copy)
    assert_same(run.finish(), FOLDERS / "single")


def test_a_scaler_is_restored(copy):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.save(scaler.state_dict(), copy / "scaler.pt")
    run = Run(copy, mixed_precision="fp16")
    assert run.accelerator.scaler.get_scale() == 64.0


def test_an_optimizer_with_other_groups(copy):
    saved = torch.load(copy / "optimizer.bin")
    saved["param_groups"][1]["params"].append(9)
    torch.save(saved, copy / "optimizer.bin")
    refuses(Run(None), copy, StateMismatchError, r"optimizer\.bin does not fit optimizer 0: .*\[1, 3\]")


def project(tmp_path):
    return ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)


def test_the_newest_of_both_kinds_is_found_without_a_name(tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(FOLDERS / "single" / "checkpoint", folder / "checkpoint_9")
    (folder / "checkpoint_12").mkdir()  # of a save that was cut off before its first file
    run = Run(None, project_config=project(tmp_path))
    with pytest.warns(
        UserWarning, match="checkpoint_9 was written by Accelerate.*complete save from one that was"
    ):
        assert run.accelerator.load_state().name == "checkpoint_9"
    assert run.accelerator.save_iteration == 13
    run.accelerator.save_state()
    run.notes.seen = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.accelerator.load_state().name == "checkpoint_13"
    assert run.notes.seen == run.recipe.STOP


def test_a_run_that_is_started_again_goes_on_from_it(tmp_path):
    shutil.copytree(FOLDERS / "single" / "checkpoint", tmp_path / "checkpoints" / "checkpoint_9")
    run = Run(None, project_config=project(tmp_path))
    with (
        patch_environment(accelerate_resume="true"),
        pytest.warns(UserWarning, match="written by Accelerate"),
    ):
        assert run.accelerator.resume() is True
    assert run.notes.seen == run.recipe.STOP
    run.accelerator.save_state()
    run.notes.seen = 0
    with patch_environment(accelerate_resume="true"):
        assert run.accelerator.resume() is True
    assert run.notes.seen == run.recipe.STOP


def test_with_one_number_ours_is_preferred(tmp_path):
    run = Run(None, project_config=project(tmp_path))
    saved = run.accelerator.save_state()
    shutil.copy(FOLDERS / "single" / "checkpoint" / "optimizer.bin", saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.accelerator.load_state() == saved
    assert run.notes.seen == 0


def test_other_engines_are_named(tmp_path):
    folder = tmp_path / "megatron"
    shutil.copytree(FOLDERS / "single" / "checkpoint", folder)
    (folder / "latest_checkpointed_iteration.txt").touch()
    with pytest.raises(NotAvailableError, match="written by Megatron-LM"):
        quiet_load(Run(None).accelerator, folder)
    flat = tmp_path / "flat"
    shutil.copytree(FOLDERS / "fsdp_full" / "checkpoint", flat)
    (flat / "pytorch_model_fsdp_rank0.bin").touch()
    with pytest.raises(NotAvailableError, match="one flat file per rank"):
        quiet_load(Run(None).accelerator, flat)
