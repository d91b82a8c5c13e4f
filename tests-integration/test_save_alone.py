"""`save_state` on the main process alone, while the other ranks wait for it somewhere else."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import conformance
from testkit.worlds import run

pytestmark = pytest.mark.usefixtures("kept_ranks")
BATCHES = 6  # of each rank


def accelerator_of(**arguments: Any) -> Any:
    from accel_train import Accelerator, DataLoaderConfiguration

    return Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), **arguments)


def build(accelerator: Any, seed: int, norm: bool = False) -> Any:
    torch.manual_seed(seed)
    width = 4
    layers = [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Linear(width, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(7)
    samples = BATCHES * 2 * accelerator.num_processes
    data = TensorDataset(
        torch.arange(samples), torch.randn(samples, width, generator=generator, dtype=torch.float64)
    )
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(data, batch_size=2, shuffle=True))


def cloned(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}


def as_diffusers_does(
    folder: str,
    *,
    every: int = 0,
    load: str | None = None,
    accumulation: int = 1,
    gathers: bool = True,
    norm: bool = False,
    epochs: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    """Train; every few steps the main process saves, and nobody waits for it on purpose."""
    accelerator = accelerator_of(gradient_accumulation_steps=accumulation, **arguments)
    model, optimizer, scheduler, loader = build(accelerator, 9 if load else 0, norm)
    torch.manual_seed(3)
    begin, step = 0, 0
    record: dict[str, Any] = {"weights": {}, "samples": {}, "saves": [], "said": []}
    if load is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.load_state(load)
        begin, step = loader.iteration, accelerator.step
    seen: list[int] = []
    for _ in range(begin, epochs):
        for index, x in loader:
            with accelerator.accumulate(model):
                loss = model(x).pow(2).mean()
                if gathers:
                    accelerator.gather(loss.detach().repeat(2))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen += index.tolist()
            if accelerator.sync_gradients:
                step += 1
                accelerator.step = step
                record["weights"][step] = cloned(accelerator, model)
                record["samples"][step], seen = seen, []
                if every and accelerator.is_main_process and step % every == 0:
                    began = time.monotonic()
                    accelerator.save_state(f"{folder}/step-{step}")
                    record["saves"].append(time.monotonic() - began)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/last")
    accelerator.end_training()
    record["random"] = torch.rand(3)
    return record


@pytest.mark.wide(but=["2-False-False-2"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("accumulation", "gathers", "norm"), [(1, True, False), (2, False, False), (1, False, True)]
)
def test_training_continues_exactly_from_what_the_main_process_saved(
    tmp_path: Path, ranks: int, accumulation: int, gathers: bool, norm: bool
) -> None:
    options: dict[str, Any] = {"accumulation": accumulation, "gathers": gathers, "norm": norm}
    oracle = run(as_diffusers_does, ranks, str(tmp_path / "oracle"), **options)
    saving = run(as_diffusers_does, ranks, str(tmp_path), every=2, **options)
    steps = sorted(oracle[0]["weights"])
    for rank in range(ranks):
        assert sorted(saving[rank]["weights"]) == steps
        for step in steps:  # saving changes nothing
            for name, value in oracle[rank]["weights"][step].items():
                assert torch.equal(saving[rank]["weights"][step][name], value)
    stopped = steps[-1] // 2 - steps[-1] // 2 % 2
    resumed = run(
        as_diffusers_does, ranks, str(tmp_path / "resumed"), load=str(tmp_path / f"step-{stopped}"), **options
    )
    for rank in range(ranks):
        assert sorted(resumed[rank]["weights"]) == [step for step in steps if step > stopped]
        for step, weights in resumed[rank]["weights"].items():
            assert resumed[rank]["samples"][step] == oracle[rank]["samples"][step]
            for name, value in oracle[rank]["weights"][step].items():
                assert torch.equal(weights[name], value), (rank, step, name)


def repeatedly(folder: str) -> Any:
    """Automatic names: the main process alone, all, alone, all."""
    from accel_train import ProjectConfiguration

    accelerator = accelerator_of(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3)
    )
    model, optimizer, *_ = build(accelerator, 0)
    hooked = []
    accelerator.register_save_state_pre_hook(lambda models, weights, where: hooked.append(where))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
        optimizer.step()
        optimizer.zero_grad()

    saved = []
    train()
    for turn in range(2):
        if accelerator.is_main_process:
            accelerator.save_state()  # two in a row
            saved.append(accelerator.save_state().name)
            accelerator.save_model(model, f"{folder}/model-{turn}")
        train()
        saved.append(accelerator.save_state().name)
        train()
    accelerator.wait_for_everyone()
    return saved, len(hooked), accelerator.load_state().name, accelerator.save_state().name


@pytest.mark.wide(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_numbers_stay_the_same_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    main, *others = run(repeatedly, ranks, str(tmp_path))
    assert main == (
        ["checkpoint_1", "checkpoint_2", "checkpoint_4", "checkpoint_5"],
        6,
        "checkpoint_5",
        "checkpoint_6",
    )
    for other in others:
        assert other == (["checkpoint_2", "checkpoint_5"], 2, "checkpoint_5", "checkpoint_6")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_4", "checkpoint_5", "checkpoint_6"]


def random_states(folder: str, load: bool) -> tuple[list[float], str]:
    import io
    import logging

    accelerator = accelerator_of()
    build(accelerator, 0)
    said = io.StringIO()
    logging.getLogger("accel_train").addHandler(logging.StreamHandler(said))
    torch.manual_seed(100 + accelerator.process_index)
    if load:
        accelerator.load_state(folder)
    elif accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    return torch.rand(3).tolist(), said.getvalue()


@pytest.mark.wide(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_states_of_the_others_are_derived_and_it_is_logged_once(tmp_path: Path, ranks: int) -> None:
    folder = str(tmp_path / "state")
    before = run(random_states, 2, folder, load=False)
    after = run(random_states, ranks, folder, load=True)
    again = run(random_states, ranks, folder, load=True)
    assert after == again
    assert after[0][0] == before[0][0]
    assert len({tuple(numbers) for numbers, _ in [*after, before[1]]}) == ranks + 1
    messages = [said for _, said in after if said]
    assert len(messages) == 1
    assert "was saved by the main process alone; rank 1" in messages[0]


def during_asynchronous(folder: str) -> list[str]:
    accelerator = accelerator_of()
    build(accelerator, 0)
    handle = accelerator.save_state(f"{folder}/background", asynchronous=True)
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/alone")
        assert handle.done()
        with pytest.raises(ValueError, match="needs all processes"):
            accelerator.save_state(f"{folder}/refused", asynchronous=True)
    else:
        from accel_state import CollectiveMismatchError

        with pytest.raises(CollectiveMismatchError, match="OptionError: save_state"):
            accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}/all", asynchronous=True).result()
    return sorted(path.name for path in Path(folder).iterdir())


def test_saves_in_the_background_need_all(tmp_path: Path) -> None:
    assert run(during_asynchronous, 2, str(tmp_path)) == [["all", "alone", "background"]] * 2


def unfinished(folder: str) -> str:
    from accel_ckpt import CheckpointSaveError

    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer, _, loader = build(accelerator, 0)
    error = ""
    for number, (_, x) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        if number == 2 and accelerator.is_main_process:
            with pytest.raises(CheckpointSaveError) as caught:
                accelerator.save_state(folder)
            error = str(caught.value)
    accelerator.wait_for_everyone()
    return error


def test_an_unfinished_window_is_refused_and_training_may_continue(tmp_path: Path) -> None:
    error, _ = run(unfinished, 2, str(tmp_path / "state"))
    assert "inside an accumulation window" in error
    assert not (tmp_path / "state").exists()


def divided(folder: str, waits: bool) -> tuple[str, float]:
    from accel_ckpt import CheckpointSaveError
    from accel_state import CollectiveMismatchError

    case = conformance.Case("fsdp2")
    accelerator = conformance.make_accelerator(case)
    model = conformance.make_model(case)
    model, optimizer = accelerator.prepare(model, conformance.make_optimizer(case, model))
    x = torch.ones(2, conformance.DIM, dtype=case.dtype)
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.wait_for_everyone()
    began = time.monotonic()
    error = ""
    if accelerator.is_main_process:
        with pytest.raises(CheckpointSaveError) as caught:
            accelerator.save_state(folder)
        error = str(caught.value)
    elif waits:
        with pytest.raises(CollectiveMismatchError) as mismatch:
            accelerator.wait_for_everyone()
        error = str(mismatch.value)
    if not waits:
        model(x)  # the others wait here, in a collective of FSDP
    took = time.monotonic() - began
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    return error, took


@pytest.mark.wide(but=["True"])
@pytest.mark.parametrize("waits", [True, False])
def test_divided_models_need_all_ranks(tmp_path: Path, waits: bool) -> None:
    main, *others = run(divided, 3, str(tmp_path / "state"), waits)
    assert "the strategy 'fsdp2' divides the model" in main[0]
    assert "Call save_state() on all processes" in main[0]
    assert main[1] < 15
    for error, took in others:
        assert not waits or "rank 0: save_state at " in error
        assert not waits or "CheckpointSaveError: save_state() was called on the main process only" in error
        assert took < 15
    assert (tmp_path / "state" / "manifest.json").is_file()


def only_some(folder: str, saving: list[int]) -> str:
    from accel_state import CollectiveMismatchError

    accelerator = accelerator_of()
    build(accelerator, 0)
    saves = accelerator.process_index in saving
    with pytest.raises(CollectiveMismatchError) as caught:
        accelerator.save_state(folder) if saves else accelerator.gather(torch.ones(2))
    return str(caught.value)


@pytest.mark.wide(but=["two"])
@pytest.mark.parametrize("saving", [[1], [0, 1], [1, 2]], ids=["another", "two", "others"])
def test_any_other_mismatch_stays_an_error_on_all_ranks(tmp_path: Path, saving: list[int]) -> None:
    for text in run(only_some, 3, str(tmp_path / "state"), saving):
        assert "save_state" in text
        assert re.search(r"gather( \(#1\))? at ", text)
        assert "Call save_state() on all processes, or" in text or "Every rank must call the same" in text
        assert not any(line.endswith(" ") for line in text.splitlines())
    assert not (tmp_path / "state").exists()


def never_comes(folder: str) -> str:
    from accel_state import set_collective_checks

    accelerator = accelerator_of()
    build(accelerator, 0)
    set_collective_checks(report_after=0.5)
    if accelerator.is_main_process:
        import contextlib
        import io

        with contextlib.redirect_stderr(io.StringIO()) as said:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        return said.getvalue()
    time.sleep(2.5)  # so far nobody knows whether this rank comes
    accelerator.wait_for_everyone()
    return ""


@pytest.mark.wide
def test_a_save_that_waits_for_a_busy_rank_is_reported(tmp_path: Path) -> None:
    report, _ = run(never_comes, 2, str(tmp_path / "state"))
    assert "rank 0 has been waiting for" in report
    assert "save_state at " in report
    assert "not arrived: rank 1" in report
    assert (tmp_path / "state" / "manifest.json").is_file()
