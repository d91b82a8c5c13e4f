"""What training loops do beside the usual steps, with a model that is divided into stages of a pipeline."""

from __future__ import annotations

import copy
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
FEATURES, ROWS = 6, 8
INSIDE = {"loss_function": nn.functional.mse_loss}
SCRIPT, FUSED = {"schedule": "gpipe"}, {"schedule": "1f1b", **INSIDE}
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"]
CHOSEN = [  # each schedule, kind of replica and window once
    ("gpipe", "dp_shard_size", 7, True), ("1f1b", "dp_shard_size", 7, False), ("1f1b", "dp_replicate_size", 1, False),
    ("1f1b", "dp_replicate_size", 7, True),
]  # fmt: skip
BOTH = pytest.mark.parametrize("handler", [SCRIPT, FUSED], ids=["gpipe", "1f1b"])


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.0), nn.Tanh()) for _ in range(6))
    ).double()


def rows_of(count: int = ROWS) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return tuple(torch.randn(count, FEATURES, dtype=torch.float64, generator=draws) for _ in range(2))


def accelerator_of(handler: dict[str, Any], degrees: dict[str, int] | None = None, **arguments: Any) -> Any:
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    parallelism = ParallelismConfig(
        pp_size=2, **(degrees or {}), pp_handler=PipelineParallelConfig(**handler)
    )
    return Accelerator(cpu=True, parallelism_config=parallelism, **arguments)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, inside: bool = False) -> Tensor:
    return model(x, target=y).loss if inside else nn.functional.mse_loss(model(x), y)


# Gradients


def dropped(handler: dict[str, Any], filled: str) -> tuple[bool, list[float]]:
    """Whether zeros are left, and the norms of a batch before and after gradients of another were dropped."""
    accelerator, model = accelerator_of(handler), chain()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (x, y), norms = rows_of(), []
    for rows in (slice(None), slice(2), slice(None)):
        if rows.stop is not None:
            accelerator.backward(loss_of(model, x[rows], y[rows], "loss_function" in handler))
        else:
            accelerator.backward(loss_of(model, x, y, "loss_function" in handler))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        (model if filled == "model" else optimizer).zero_grad(set_to_none=False)
    return all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters()), norms


@BOTH
@pytest.mark.parametrize("filled", ["model", "optimizer"])
def test_gradients_are_filled_with_zeros(handler: dict[str, Any], filled: str) -> None:
    model, (x, y) = chain(), rows_of()
    loss_of(model, x, y).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for zeros, norms in worlds.run(dropped, 2, handler, filled):
        assert zeros
        assert norms == pytest.approx([expected, expected], rel=1e-12)


def frozen_parts(kind: str, handler: dict[str, Any]) -> nn.Sequential:
    """A chain of which one of the two stages trains nothing."""
    model = chain()
    if kind.startswith("no parameters"):
        bare = [nn.Tanh(), nn.Identity()]
        model = nn.Sequential(
            *(bare if "first" in kind else []), *model[:2], *([] if "first" in kind else bare)
        )
        handler["cuts"] = ["2"]
    stopped = {"first": model[:3], "last": model[3:]}
    for parameter in stopped[kind].parameters() if kind in stopped else ():
        parameter.requires_grad_(False)
    return model


def train_partly(kind: str, handler: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    options = dict(handler or {})
    model = frozen_parts(kind, options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    accelerator = None
    if handler is not None:
        accelerator = accelerator_of(options)
        model, optimizer = accelerator.prepare(model, optimizer)
    (x, y), losses = rows_of(), []
    for _ in range(3):
        loss = loss_of(model, x, y, "loss_function" in options)
        accelerator.backward(loss) if accelerator else loss.backward()
        clip = accelerator.clip_grad_norm_ if accelerator else nn.utils.clip_grad_norm_
        clip(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(accelerator.get_state_dict(model) if accelerator else model.state_dict())


@BOTH
@pytest.mark.parametrize("kind", ["first", "last", "no parameters", "no parameters first"])
def test_stages_that_train_nothing(kind: str, handler: dict[str, Any]) -> None:
    losses, weights = train_partly(kind, None)
    for found, theirs in worlds.run(train_partly, 2, kind, handler):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(theirs, weights, rtol=1e-9, atol=1e-9)


# The model


def modes() -> list[set[bool]]:
    accelerator = accelerator_of(SCRIPT)
    model = accelerator.prepare(chain())
    found = []
    for call in (model.eval, model.train):
        call()
        modules = [*model.modules(), *accelerator.unwrap_model(model).modules()]
        found.append({module.training for module in modules})
    return found


def test_all_modules_train_or_evaluate() -> None:
    assert worlds.run(modes, 2) == [[{False}, {True}]] * 2


def own_state() -> tuple[list[str], list[str], bool]:
    """Names of this rank's state, what pickling it says, and whether it can be kept in memory and put back."""
    from accel_train import DividedTensorError

    accelerator = accelerator_of(SCRIPT)
    model = accelerator.prepare(chain())
    said = []
    for module in (model, accelerator.unwrap_model(model)):
        for state in (module.state_dict(), copy.deepcopy(module.state_dict())):
            try:
                torch.save(state, io.BytesIO())
            except DividedTensorError as error:
                said.append(str(error))
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(kept)
    restored = all(
        torch.equal(value, chain().state_dict()[name]) for name, value in model.state_dict().items()
    )
    whole = accelerator.get_state_dict(model)
    torch.save(whole, io.BytesIO())
    return list(kept), said, restored and list(whole) == list(chain().state_dict())


def test_half_a_model_is_not_pickled() -> None:
    ranks = worlds.run(own_state, 2)
    assert ranks[0][0] + ranks[1][0] == list(chain().state_dict())
    for _, said, restored in ranks:
        assert len(said) == 4
        assert all("of one of 2 ranks of a pipeline" in text and "get_state_dict" in text for text in said)
        assert restored


def generated() -> str:
    from accel_train import ArgumentTypeError

    model = accelerator_of(SCRIPT).prepare(chain())
    with pytest.raises(ArgumentTypeError) as caught:
        model.generate(rows_of()[0])
    return str(caught.value)


def test_a_pipeline_generates_nothing() -> None:
    assert all("Call accelerator.save_model() on all ranks" in text for text in worlds.run(generated, 2))


def stepped_afterwards() -> dict[str, Tensor]:
    accelerator = accelerator_of(SCRIPT)
    model = accelerator.prepare(chain())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, *rows_of()))
    optimizer.step()
    return dict(accelerator.get_state_dict(model))


def test_an_optimizer_that_is_built_afterwards() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, *rows_of()).backward()
    optimizer.step()
    for weights in worlds.run(stepped_afterwards, 2):
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-12, atol=1e-12)


# Batches of other sizes


def sizes(handler: dict[str, Any], evaluated: bool) -> tuple[list[Tensor], list[float]]:
    """Outputs of evaluation with batches of any size, first before any training, and losses of a short last batch."""
    accelerator, model = accelerator_of({**handler, "num_micro_batches": 4}), chain()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = rows_of(20)
    if evaluated:
        model.eval()
    with torch.no_grad():
        outputs = [model(x[:count]) for count in (5, 1, 20)]
    model.train()
    losses = []
    for count in (8, 8, 6):
        loss = loss_of(model, x[:count], y[:count], "loss_function" in handler)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return outputs, losses


@BOTH
@pytest.mark.parametrize("evaluated", [True, False], ids=["eval", "no_grad alone"])
def test_batches_of_other_sizes(handler: dict[str, Any], evaluated: bool) -> None:
    model, (x, y) = chain(), rows_of(20)
    expected = [model(x[:count]).detach() for count in (5, 1, 20)]
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for count in (8, 8, 6):
        loss = loss_of(model, x[:count], y[:count])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    for outputs, losses in worlds.run(sizes, 2, handler, evaluated):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        assert losses == pytest.approx(seen, rel=1e-9)


SHORT = (8, 8, 5, 1, 8, 7, 2)
"""Rows of batches, of which some are too few for a schedule, or divisible by one and themselves only."""


def cut_of_any_size(
    schedule: str | None, degrees: dict[str, int] | None, steps: int, each: bool = False
) -> tuple[int, list[float], dict[str, Tensor]]:
    """The number of the replica, sums of outputs and losses by batch, and the weights at the end.

    Args:
        schedule: None: plain PyTorch, and the losses are means over replicas.
        degrees: beside those of the pipeline, of which replicas get batches of different sizes; None: there is one.
        steps: batches of a window.
        each: gradients are reduced in each batch of a window.
    """
    from accel_train import GradientAccumulationPlugin

    model, accelerator, replica = chain(), None, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if schedule is not None:
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
        handler = {"schedule": schedule, **({} if schedule == "gpipe" else INSIDE)}
        accelerator = accelerator_of(handler, degrees, gradient_accumulation_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
        replica = accelerator.strategy.batch.index
    draws, found = torch.Generator().manual_seed(3), []
    for number, rows in enumerate(SHORT, 1):
        x = torch.randn(2, 8, FEATURES, dtype=torch.float64, generator=draws)
        parts = [x[0, :rows], x[1, : max(1, rows - 1)]]  # of the replicas
        if accelerator is None:
            losses = [loss_of(model, part, part) for part in (parts if degrees else parts[:1])]
            loss = sum(losses) / len(losses)
            (loss / steps).backward()
            if number % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        else:
            part = parts[replica]
            with accelerator.accumulate(model):
                loss = loss_of(model, part, part, schedule != "gpipe")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model(part)  # other ranks than the last have a part in it
        found.append(float(loss))
    return replica, found, dict(accelerator.get_state_dict(model) if accelerator else model.state_dict())


def check_any_size(ranks: int, schedule: str, degrees: dict[str, int] | None, steps: int, each: bool) -> None:
    _, losses, weights = cut_of_any_size(None, degrees, steps)
    found = worlds.run(cut_of_any_size, ranks, schedule, degrees, steps, each)
    replicas = {replica: theirs for replica, theirs, _ in found}
    means = [sum(each) / len(each) for each in zip(*replicas.values(), strict=True)]
    assert means == pytest.approx(losses, rel=1e-12)
    for _, _, theirs in found:
        torch.testing.assert_close(theirs, weights, rtol=1e-12, atol=1e-12)


@pytest.mark.wide(only=["*-1"])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_short_batches_of_all_schedules(schedule: str, steps: int) -> None:
    check_any_size(2, schedule, None, steps, each=False)


@pytest.mark.parametrize(
    ("schedule", "degrees", "steps", "each"),
    [
        pytest.param(
            *(schedule, degrees, steps, each),
            marks=() if (schedule, next(iter(degrees)), steps, each) in CHOSEN else pytest.mark.full,
            id=f"{schedule} {next(iter(degrees)).removesuffix('_size')} {steps}{' each' if each else ''}",
        )
        for schedule in SCHEDULES
        for degrees in ({"dp_replicate_size": 2}, {"dp_shard_size": 2})
        for steps, each in ((1, False), (7, False), (7, True))
    ],
)
def test_replicas_cut_their_batches_into_other_numbers(
    schedule: str, degrees: dict[str, int], steps: int, each: bool
) -> None:
    """FSDP gathers and reduces in the same order, however many micro-batches a replica has."""
    check_any_size(4, schedule, degrees, steps, each)


def weighted_error(output: Tensor, target: dict[str, Any]) -> Tensor:
    [values], weights = target["values"], target["weights"]
    return ((output - values).square().mean(1) * weights).mean()


def nested_target(schedule: str | None) -> tuple[float, float]:
    """The loss and the norm with a target of several tensors, in micro-batches of one row."""
    model, (x, y) = chain(), rows_of(4)
    target = {"values": (y,), "weights": torch.arange(4, dtype=torch.float64), "factor": 2}
    if schedule is None:
        loss = weighted_error(model(x), target)
        loss.backward()
        return loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    accelerator = accelerator_of({"schedule": schedule, "loss_function": weighted_error})
    model = accelerator.prepare(model)
    loss = model(x, target=target).loss
    accelerator.backward(loss)
    return loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1e9))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_target_of_several_tensors(schedule: str) -> None:
    for found in worlds.run(nested_target, 2, schedule):
        assert found == pytest.approx(nested_target(None), rel=1e-12)


KINDS = 6
CROSS_ENTROPY = nn.functional.cross_entropy
LOSSES: dict[str, Any] = {
    "cross entropy": CROSS_ENTROPY,
    "another index": nn.CrossEntropyLoss(ignore_index=5),
    "summed": partial(CROSS_ENTROPY, reduction="sum"),
    "weighted": nn.CrossEntropyLoss(weight=torch.arange(1.0, KINDS + 1, dtype=torch.float64)),
    "root": lambda output, target: CROSS_ENTROPY(output, target).sqrt(),
    "contrastive": lambda output, target: CROSS_ENTROPY(output @ output.T, torch.arange(len(output))),
}


def of_kinds(name: str, handler: dict[str, Any] | None, evaluated: bool = False) -> list[float] | str:
    """Losses and norms of two batches, of whose labels some do not count; or the error."""
    from accel_train import PrepareError

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, FEATURES) for _ in range(3)), nn.Linear(FEATURES, KINDS)
    ).double()
    x, labels = rows_of(16)[0], torch.arange(16) % KINDS
    ignored = 5 if name == "another index" else -100
    labels[[1, 4, 5, 6, 7, 10]] = ignored if name in ("cross entropy", "another index") else 2
    function, seen = LOSSES[name], []
    if handler is not None:
        accelerator = accelerator_of({**handler, "loss_function": function})
        model = accelerator.prepare(model)
    for rows in (slice(0, 8), slice(8, 16)):
        if handler is None:
            loss = function(model(x[rows]), labels[rows])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            try:
                if evaluated:
                    with torch.no_grad():
                        model(x[rows], target=labels[rows])
                loss = model(x[rows], target=labels[rows]).loss
            except PrepareError as error:
                return str(error)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        seen += [loss.item(), float(norm)]
        model.zero_grad()
    return seen


@pytest.mark.parametrize("evaluated", [False, True], ids=["trained", "evaluated"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["cross entropy", "another index"])
def test_a_loss_over_the_labels_that_count(name: str, schedule: str, evaluated: bool) -> None:
    for found in worlds.run(of_kinds, 2, name, {"schedule": schedule}, evaluated):
        assert found == pytest.approx(of_kinds(name, None), rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["summed", "weighted", "root", "contrastive"])
def test_a_loss_that_is_no_mean_is_refused_on_all_ranks(name: str, schedule: str) -> None:
    for found in worlds.run(of_kinds, 2, name, {"schedule": schedule}):
        assert re.search(
            r"^loss_function=\S+ is .* for two micro-batches together, and the mean of theirs", found
        )


@pytest.mark.parametrize("name", ["weighted", "root"])
def test_a_loss_of_one_micro_batch_may_be_any(name: str) -> None:
    handler = {"schedule": "gpipe", "num_micro_batches": 1}
    for found in worlds.run(of_kinds, 2, name, handler):
        assert found == pytest.approx(of_kinds(name, None), rel=1e-12)


def odd_after_evaluation() -> str:
    from accel_train import DataError

    accelerator = accelerator_of({**SCRIPT, "num_micro_batches": 4})
    model = accelerator.prepare(chain())
    x, y = rows_of(20)
    with torch.no_grad():
        model(x)
    with pytest.raises(DataError) as caught:
        loss_of(model, x[:6], y[:6])
    return str(caught.value)


def test_a_longer_batch_of_evaluation_makes_no_training_batch_the_short_one() -> None:
    assert all("num_micro_batches=4 does not divide" in text for text in worlds.run(odd_after_evaluation, 2))


# Windows


def windows_data(replicas: int) -> tuple[Tensor, Tensor]:
    """Seven batches; of one replica the last one is short, as loaders fill those of several."""
    return rows_of(6 * ROWS + 4 if replicas == 1 else replicas * 7 * ROWS)


def window_run(
    folder: Path, handler: dict[str, Any], degrees: dict[str, int], stop: int | None, resume: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """Seven batches in windows of three; a state is saved at the batch `stop`."""
    options = {**handler, "num_micro_batches": 4}
    accelerator = accelerator_of(options, degrees, gradient_accumulation_steps=3)
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicas = accelerator.strategy.batch.size
    data = torch.utils.data.TensorDataset(*windows_data(replicas))
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(folder / "state")
        assert stop is not None
        loader, stop = accelerator.skip_first_batches(loader, stop + 1), None
    losses = []
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, x, y, "loss_function" in handler)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if number == stop:
            accelerator.save_state(folder / "state")
            break
    return dict(accelerator.get_state_dict(model)), losses


def windows_of_one_process(replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, targets = windows_data(replicas)
    losses = []
    for first, last in ((0, 3), (3, 6), (6, 7)):
        for number in range(first, last):
            rows = slice(number * replicas * ROWS, (number + 1) * replicas * ROWS)
            loss = loss_of(model, inputs[rows], targets[rows])
            (loss / (last - first)).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), losses


@BOTH
@pytest.mark.parametrize(
    ("ranks", "degrees", "stop"),
    [
        (2, {}, 4),
        pytest.param(2, {}, 5, id="before a short batch", marks=pytest.mark.full),
        pytest.param(4, {"dp_replicate_size": 2}, 3, marks=pytest.mark.full),
    ],
)
def test_a_state_is_saved_inside_a_window(
    tmp_path: Path, handler: dict[str, Any], ranks: int, degrees: dict[str, int], stop: int
) -> None:
    weights, losses = windows_of_one_process(ranks // 2)
    first = worlds.run(window_run, ranks, tmp_path, handler, degrees, stop, False)
    second = worlds.run(window_run, ranks, tmp_path, handler, degrees, stop, True)
    for (_, before), (theirs, after) in zip(first, second, strict=True):
        assert before + after == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(theirs, weights, rtol=1e-9, atol=1e-9)


INTERLEAVED = {"schedule": "interleaved_1f1b", **INSIDE}
SHARDED = {"dp_shard_size": 2}


@pytest.mark.parametrize(
    ("ranks", "degrees", "handler", "stop"),
    [
        (4, SHARDED, SCRIPT, 4),
        pytest.param(4, SHARDED, FUSED, 4, marks=pytest.mark.full),
        pytest.param(4, SHARDED, FUSED, 3, id="first of a window", marks=pytest.mark.full),
        pytest.param(4, SHARDED, INTERLEAVED, 4, marks=pytest.mark.full),
        pytest.param(8, {**SHARDED, "dp_replicate_size": 2}, FUSED, 4, marks=pytest.mark.full),
    ],
)
def test_a_window_of_sharded_stages_goes_on_bit_for_bit(
    tmp_path: Path, ranks: int, degrees: dict[str, int], handler: dict[str, Any], stop: int
) -> None:
    weights, losses = windows_of_one_process(ranks // 2)
    whole = worlds.run(window_run, ranks, tmp_path, handler, degrees, None, False)
    worlds.run(window_run, ranks, tmp_path, handler, degrees, stop, False)
    resumed = worlds.run(window_run, ranks, tmp_path, handler, degrees, stop, True)
    for (theirs, every), (after, rest) in zip(whole, resumed, strict=True):
        assert every == pytest.approx(losses, rel=1e-9)
        assert rest == every[stop + 1 :]
        torch.testing.assert_close(theirs, weights, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after, theirs, rtol=0, atol=0)


def saved_after(folder: Path, handler: dict[str, Any], what: str) -> tuple[list[str], list[str]]:
    """Names of the states in a saved optimizer, and of what this rank's have no part of."""
    accelerator, model = accelerator_of(handler, SHARDED), chain()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    x, y = rows_of()
    inside = "loss_function" in handler
    accelerator.backward(loss_of(model, x, y, inside))
    optimizer.step()
    optimizer.zero_grad()
    if what == "evaluation":
        model.eval()
        with torch.no_grad():
            model(x)
    else:
        model(x)  # no backward follows
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    tree = accelerator.strategy.states.optimizer_state(optimizer.optimizer, [accelerator.unwrap_model(model)])
    return sorted(tree["state"]), sorted(chain().state_dict())


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        (SCRIPT, "evaluation"),
        pytest.param(FUSED, "evaluation", marks=pytest.mark.full),
        pytest.param(SCRIPT, "a forward alone", marks=pytest.mark.full),
    ],
)
def test_sharded_stages_are_saved_after(tmp_path: Path, handler: dict[str, Any], what: str) -> None:
    """The outermost unit of a stage stays gathered after a forward, and is no module of the script's model."""
    for names, expected in worlds.run(saved_after, 4, tmp_path, handler, what):
        assert [name.partition(".")[2] for name in names] == expected


# Several models


def shared_modules() -> nn.Sequential:
    """One activation in all stages, and one layer twice in the first."""
    torch.manual_seed(0)
    tanh, again = nn.Tanh(), nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(again, tanh, again, tanh, nn.Linear(FEATURES, FEATURES), tanh).double()


def with_shared_modules(handler: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    from accel_train import Accelerator

    stages = {**(handler or {}), "cuts": ["4"]}
    accelerator = Accelerator(cpu=True) if handler is None else accelerator_of(stages)
    model = shared_modules()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (x, y), seen = rows_of(), []
    for _ in range(3):
        loss = loss_of(model, x, y, "loss_function" in (handler or {}))
        accelerator.backward(loss)
        seen += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.1))]
        optimizer.step()
        optimizer.zero_grad()
    return seen, dict(accelerator.get_state_dict(model))


@BOTH
def test_one_module_in_several_places(handler: dict[str, Any]) -> None:
    [(seen, weights)] = worlds.run(with_shared_modules, 1, None)
    for found, theirs in worlds.run(with_shared_modules, 2, handler):
        assert found == pytest.approx(seen, rel=1e-10)
        torch.testing.assert_close(theirs, weights, rtol=1e-9, atol=1e-12)


def adapters() -> nn.Sequential:
    """Every second layer is frozen, on all stages; of the last one the bias is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(6))).double()
    for layer in (model[0], model[2], model[4]):
        layer.requires_grad_(False)
    model[5].weight.requires_grad_(False)
    return model


def adapted(
    degrees: dict[str, int] | None,
    handler: dict[str, Any],
    first: int,
    last: int,
    save: str = "",
    load: str = "",
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after some steps with adapters; and the files of a state without the frozen layers."""
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True) if degrees is None else accelerator_of(handler, degrees)
    model = adapters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))
    if load:
        accelerator.load_state(load)
    x, y = rows_of()
    for step in range(first, last):
        loss = loss_of(model, x * (step + 1), y, degrees is not None and "loss_function" in handler)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if save:
        accelerator.save_state(save, trainable_only=True)
    return accelerator.get_state_dict(model), sorted(map(str, Path(save).rglob("*"))) if save else []


@pytest.mark.parametrize("degrees", [{}, {"dp_shard_size": 2}], ids=["pp", "pp x fsdp2"])
def test_adapters_of_all_stages_are_saved_alone_and_go_on(tmp_path: Path, degrees: dict[str, int]) -> None:
    from accel_ckpt import load_state_dict

    ranks = 2 * degrees.get("dp_shard_size", 1)
    [wanted, *_] = worlds.run(adapted, 1, None, {}, 0, 4)
    worlds.run(adapted, ranks, degrees, FUSED, 0, 2, str(tmp_path / "state"))
    saved = {name for file in (tmp_path / "state").rglob("*.safetensors") for name in load_state_dict(file)}
    weights = {name.rpartition("/")[2] for name in saved if "exp_avg" not in name and "step" not in name}
    assert {name for name in weights if re.fullmatch(r"\d\.(weight|bias)", name)} <= set(
        adapters().state_dict()
    )
    assert not weights & {"0.weight", "2.weight", "4.bias", "5.weight"}
    for found, _ in worlds.run(adapted, ranks, degrees, SCRIPT, 2, 4, "", str(tmp_path / "state")):
        torch.testing.assert_close(dict(found), dict(wanted[0]), rtol=1e-9, atol=1e-12)
    [found, *_] = worlds.run(adapted, 1, None, {}, 2, 4, "", str(tmp_path / "state"))
    torch.testing.assert_close(dict(found[0]), dict(wanted[0]), rtol=1e-9, atol=1e-12)


class Critic(nn.Module):
    """No chain of modules, so it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, generator=draws, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def beside(folder: Path, degrees: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model in stages learns from a teacher, and a critic is trained beside it."""
    from accel_train import Accelerator

    accelerator, model, teacher, critic = accelerator_of(FUSED, degrees), chain(), Critic(), Critic()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    assert type(teacher) is Critic
    other = Accelerator(cpu=True)
    critic, second = other.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    ranks = accelerator.strategy.batch
    for step in range(3):
        x = rows_of(6 * ROWS)[0].chunk(3)[step].chunk(ranks.size)[ranks.index]
        with torch.no_grad():
            wanted = teacher(x)
        accelerator.backward(loss_of(model, x, wanted, inside=True))
        optimizer.step()
        optimizer.zero_grad()
        other.backward(nn.functional.mse_loss(critic(x), x))
        second.step()
        second.zero_grad()
    torch.testing.assert_close(accelerator.get_state_dict(teacher), Critic().state_dict(), rtol=0, atol=0)
    return dict(accelerator.get_state_dict(model)), dict(other.get_state_dict(critic))


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, {}), pytest.param(4, SHARDED, marks=pytest.mark.full, id="sharded")]
)
def test_models_that_stay_whole(tmp_path: Path, ranks: int, degrees: dict[str, int]) -> None:
    model, critic, teacher = chain(), Critic(), Critic()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic)]
    for x in rows_of(6 * ROWS)[0].chunk(3):
        nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
        nn.functional.mse_loss(critic(x), x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for theirs, critics in worlds.run(beside, ranks, tmp_path, degrees):
        torch.testing.assert_close(theirs, dict(model.state_dict()), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(critics, dict(critic.state_dict()), rtol=1e-9, atol=1e-9)


def not_cut(kind: str) -> tuple[str, bool]:
    """The error of a model that cannot be cut, and whether the other one is as it was."""
    from accel_train import PrepareError

    accelerator, model, second = accelerator_of(FUSED), chain(), Critic()
    before = dict(model.named_parameters())
    if kind == "frozen":
        second.requires_grad_(False)
    with pytest.raises(PrepareError) as caught:
        accelerator.prepare(*([] if kind in ("frozen", "alone") else [model]), second)
    return str(caught.value), dict(model.named_parameters()).keys() == before.keys()


@pytest.mark.parametrize("kind", ["second", "frozen", "alone"])
def test_a_model_that_cannot_be_cut(kind: str) -> None:
    for message, unchanged in worlds.run(not_cut, 2, kind):
        assert message.startswith("Critic is no nn.Sequential")
        assert ("evaluation_mode=True" in message) == (kind != "alone")
        assert unchanged
