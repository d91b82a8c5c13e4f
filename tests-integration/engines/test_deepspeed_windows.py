"""States saved inside an accumulation window under DeepSpeed, against runs that nothing has interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

WIDTH, STEPS, MICRO_BATCHES, SAVED_AFTER = 8, 4, 12, 5
FULL = pytest.mark.full


class Net(nn.Module):
    """A layer is used in the first two micro-batches of a window only, and one in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.early = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.frozen = nn.Linear(3 * WIDTH, 3 * WIDTH).requires_grad_(False)
        self.late = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.head = nn.Linear(3 * WIDTH, 5)

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        if place < 2:
            x = x + torch.tanh(self.early(x))
        if place == STEPS - 1:
            x = x + torch.tanh(self.late(x))
        return self.head(x)


def begin(stage: int | None, precision: str = "no", offload: bool = False, sums: bool = False) -> Any:
    """An accelerator, and a prepared model with its optimizer; without a stage, under ddp or on one process.

    Args:
        stage: of ZeRO.
        precision: that the engine computes in.
        offload: optimizer states, and in stage 3 parameters, are in host memory.
        sums: gradients are added up in float32.
    """
    from accel_train import (
        Accelerator,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
    )

    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
    }
    if sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    accelerator = Accelerator(
        deepspeed_plugin=None if stage is None else DeepSpeedPlugin(hf_ds_config=config),
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=STEPS, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(TensorDataset(torch.zeros(8, WIDTH)), batch_size=2)  # tells the engine the batch size
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer


def train(
    kind: dict[str, Any],
    *,
    first: int = 0,
    save: Any = None,
    load: Any = None,
    end: int = MICRO_BATCHES,
    items: bool = False,
) -> list[Any]:
    """The weights after every step from micro-batch number `first` on."""
    accelerator, model, optimizer = begin(**kind)
    if load is not None:
        accelerator.load_state(load)
    weights = []
    for number in range(first, end):
        generator = torch.Generator().manual_seed(number)
        ranks = accelerator.strategy.batch
        x = torch.randn(8, WIDTH, generator=generator).chunk(ranks.size)[ranks.index]
        with accelerator.accumulate(model):
            loss = model(x, number % STEPS).square()
            if items:
                accelerator.backward(loss.sum(), num_items=loss.numel())
            else:
                accelerator.backward(loss.mean())
            optimizer.step()
            optimizer.zero_grad()
        if save is not None and number == SAVED_AFTER:
            accelerator.save_state(save)
        if accelerator.sync_gradients:
            state = accelerator.get_state_dict(model)
            weights.append({name: value.clone() for name, value in state.items()})
    return weights


def interrupted(kind: dict[str, Any], folder: Any, items: bool) -> None:
    """Compare a run that saves, and one that goes on from there, with one that does neither."""
    whole = train(kind, items=items)
    saving = train(kind, save=folder, items=items)
    resumed = train(kind, load=folder, first=SAVED_AFTER + 1, items=items)
    assert len(whole) == MICRO_BATCHES // STEPS
    for name in ("first.weight", "early.weight", "late.weight"):
        assert not torch.equal(whole[0][name], whole[1][name]), name
    torch.testing.assert_close(saving, whole, rtol=0, atol=0)
    torch.testing.assert_close(resumed, whole[1:], rtol=0, atol=0)


CASES: dict[str, dict[str, Any]] = {
    f"{stage}{' bf16' * (precision == 'bf16')}{' offload' * offload}{' sums' * sums}": {
        "stage": stage,
        "precision": precision,
        "offload": offload,
        "sums": sums,
    }
    for stage in range(4)
    for precision in ("no", "bf16")
    for offload in (False, True)
    for sums in (False, True)
    # In float32 there are no other sums; without ZeRO nothing is in host memory, and DeepSpeed refuses such sums.
    if not (sums and precision == "no") and not ((offload or sums) and stage == 0)
}


@pytest.mark.parametrize("items", [False, True], ids=["means", "items"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_ranks_go_on_inside_a_window(tmp_path, name, items):
    worlds.run(interrupted, 2, CASES[name], tmp_path / "state", items)


def saved(kind, folder):
    train(kind, save=folder, end=SAVED_AFTER + 1)


def saved_after_a_step(kind, folder):
    accelerator, model, optimizer = begin(**kind)
    for number in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, WIDTH), number).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)


def resumed(kind, folder):
    return train(kind, load=folder, first=SAVED_AFTER + 1)


PLAIN = {"stage": None}


@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        (CASES["1"], 2, PLAIN, 1),
        (PLAIN, 1, CASES["1"], 2),
        (CASES["0"], 2, CASES["1 offload"], 2),
    ],
)
def test_gradients_up_to_stage_1_are_those_of_plain_pytorch(tmp_path, before, ranks, after, others):
    [wanted] = worlds.run(train, 1, PLAIN)
    worlds.run(saved, ranks, before, tmp_path / "state")
    for found in worlds.run(resumed, others, after, tmp_path / "state"):
        torch.testing.assert_close(found, wanted[1:], rtol=1e-4, atol=1e-5)


def refused(kind, folder, cause):
    from accel_ckpt import StateMismatchError

    accelerator, model, _ = begin(**kind)
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with pytest.raises(StateMismatchError, match=cause):
        accelerator.load_state(folder)
    torch.testing.assert_close(accelerator.get_state_dict(model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("before", "after", "others", "cause"),
    [
        (
            "2",
            "3",
            2,
            "in 'partitions of stage 2' of the engine, and here they wait in 'partitions of stage 3'",
        ),
        ("2", "1", 2, "in 'partitions of stage 2' of the engine, and here they wait in 'parameters'"),
        ("1", "2", 2, "in 'parameters' of the engine, and here they wait in 'partitions of stage 2'"),
        (
            "3",
            "3",
            1,
            "form of the strategy 'deepspeed'; the strategy 'deepspeed' cannot continue .* another number",
        ),
        ("3", None, 2, "form of the strategy 'deepspeed'; the strategy 'ddp' cannot continue with them"),
    ],
)
def test_other_stages_and_ranks_are_refused_from_stage_2_on(tmp_path, before, after, others, cause):
    worlds.run(saved, 2, CASES[before], tmp_path / "state")
    worlds.run(refused, others, PLAIN if after is None else CASES[after], tmp_path / "state", cause)


def save_with_noted_changes(folder):
    from accel_train import AccumulationError

    accelerator, model, optimizer = begin(stage=2)
    for number in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, WIDTH), number).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                with pytest.raises(
                    AccumulationError, match=r"complete, or their .* Save after optimizer\.step"
                ):
                    accelerator.save_state(folder)
            optimizer.step()
            optimizer.zero_grad()
    return folder.exists()


def test_clipped_gradients_are_saved_only_after_their_step(tmp_path):
    assert worlds.run(save_with_noted_changes, 2, tmp_path / "state") == [False, False]


def loaded_inside(kind, folder):
    """Weights of a window after a load in the middle of another one, and after a load by itself."""
    found = []
    for micro_batches in (2, 0):
        accelerator, model, optimizer = begin(**kind)
        for number in range(100, 100 + micro_batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, WIDTH), number % STEPS).square().mean())
                optimizer.step()
        accelerator.load_state(folder)
        windows = []
        for number in range(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, WIDTH) * number, number % STEPS).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state = accelerator.get_state_dict(model)
                windows.append({name: value.clone() for name, value in state.items()})
        found.append(windows)
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("2", 1),
        ("3", 1),
        pytest.param("0 bf16", 1, marks=FULL),
        pytest.param("1", 1, marks=FULL),
        pytest.param("1 bf16 sums", 1, marks=FULL),
        pytest.param("2", 2, marks=FULL),
        pytest.param("2 offload", 1, marks=FULL),
        pytest.param("2 bf16 sums", 1, marks=FULL),
        pytest.param("2 bf16 offload sums", 1, marks=FULL),
        pytest.param("3 bf16 offload", 1, marks=FULL),
    ],
)
def test_a_load_inside_a_window_drops_its_gradients(tmp_path, kind, ranks):
    """The state is saved after a step, also by another number of ranks."""
    worlds.run(saved_after_a_step, ranks, CASES[kind], tmp_path / "state")
    for inside, alone in worlds.run(loaded_inside, 2, CASES[kind], tmp_path / "state"):
        assert len(alone) == 2
        torch.testing.assert_close(inside, alone, rtol=0, atol=0)
