"""Every registered strategy holds what the seam promises; a class in the registry brings its tests.

`hatch run conformance` prints strategy x property. How outside packages run it: ``testkit.pytest_conformance``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from accel_state.host.available import is_torchao_available
from accel_train.precision.registry import PRECISIONS
from accel_train.setup.resolve import module_of
from accel_train.strategies.base import Strategy
from accel_train.strategies.registry import STRATEGIES
from accel_train.strategies.window_gradients import WindowGradients
from testkit import worlds
from testkit.conformance import (
    EXPERTS,
    FLOAT32_ONLY,
    MESHES,
    VARIANTS,
    Case,
    Record,
    Samples,
    cloned,
    gather,
    load_and_train,
    make_model,
    make_optimizer,
    mesh_strategy,
    offer_weights,
    oracle,
    prepare_apart,
    save_whole_model,
    strategies_installed,
    train,
    train_and_save,
    train_two,
    uneven,
    unwrapped,
)

with strategies_installed():
    FOUND = {name: STRATEGIES.get(name) for name in STRATEGIES.names()}


def installed(member: type[Strategy]) -> bool:
    """Whether the packages that a member requires can be imported here."""
    return all(
        importlib.util.find_spec(module_of(package)) is not None for package in member.capabilities.requires
    )


OWN_SUITE = {"megatron": "tests-integration/engines/test_megatron.py"}
"""Members that train models of transformers alone, not those of this suite, and where they are tested."""

MEMBERS = {name: member for name, member in FOUND.items() if installed(member) and name not in OWN_SUITE}
MEMBERS |= {name: MEMBERS[strategy] for name, (strategy, _) in VARIANTS.items() if strategy in MEMBERS}
if not any(member.capabilities.requires for member in MEMBERS.values()):  # an engine starts once in a process
    pytestmark = pytest.mark.usefixtures("kept_ranks")
EXACT = 1e-12  # in float64; a precision says how far it is from that
SINGLE = 1e-6  # of members that compute in float32


AVAILABLE = [name for name in PRECISIONS.names() if name != "fp8" or is_torchao_available()]
"""Precisions that can be computed here; `hatch run engines:fp8` runs fp8 where torchao is installed."""


def bound_of(case: Case) -> float:
    return max(SINGLE if case.is_single else EXACT, PRECISIONS.get(case.precision).tolerance)


def strategy_of(name: str) -> str:
    """The strategy's name, which messages have."""
    return MEMBERS[name].name


def ranks_of(name: str) -> list[int]:
    if name == "xla":
        return [2, 1]
    if name in VARIANTS.keys() & {"hsdp", "groups", *MESHES}:
        return [4]  # two replicas, each of two ranks
    return [1] if name == "single" else [2, 4]


def strategies_of(name: str) -> list[type[Strategy]]:
    """The strategy of a member, and that of its stages if it is a pipeline whose stages are divided."""
    inner = {key: size for key, size in MESHES.get(name, {}).items() if key != "pp_size"}
    divided = "pp_size" in MESHES.get(name, {}) and inner
    return [MEMBERS[name], *([STRATEGIES.get(mesh_strategy(inner))] if divided else [])]


def declared_precisions(name: str) -> frozenset[str] | None:
    """None: all."""
    found = [strategy.capabilities.precisions_for("cpu") for strategy in strategies_of(name)]
    limited = [precisions for precisions in found if precisions is not None]
    return frozenset.intersection(*limited) if limited else None


def precisions_of(name: str) -> list[str]:
    declared = declared_precisions(name)
    return [precision for precision in AVAILABLE if declared is None or precision in declared]


ENGINE_LIMITS = {
    # Without ZeRO the engine sums gradients in bfloat16 and makes its float32 weights from rounded ones:
    # test_deepspeed.py shows that it computes the same when it is driven by hand.
    ("zero0", "bf16"): 0.2,
}
"""Cells in which an engine is less exact than the others, and how much."""


REFUSED = "refused"
"""In the table: the capabilities say no, and the error says so."""


CELLS = [(name, ranks) for name in MEMBERS for ranks in ranks_of(name)]
REGISTERED = [(name, ranks) for name, ranks in CELLS if name not in VARIANTS]


def parameters(found: list[tuple[str, int]], quick: Collection[str] = ()) -> pytest.MarkDecorator:
    """Variants of a strategy, and worlds that are not its smallest, are for the long run.

    Args:
        found: the cells.
        quick: the members that are not for the long run; by default all.
    """

    def is_long(name: str, ranks: int) -> bool:
        return name in VARIANTS or ranks != ranks_of(name)[0] or bool(quick and name not in quick)

    return pytest.mark.parametrize(
        ("name", "ranks"),
        [pytest.param(*cell, marks=[pytest.mark.full] if is_long(*cell) else []) for cell in found],
    )


cells = parameters(CELLS)
smallest = parameters([(name, ranks_of(name)[0]) for name in MEMBERS])


def run(case: Case, ranks: int) -> tuple[list[Record], Record]:
    records = worlds.run(train, ranks, case)
    return records, oracle(case, records)


def check(case: Case, records: list[Record], expected: Record) -> None:
    """Losses, weights after every step, and norms, on every rank."""
    bound = ENGINE_LIMITS.get((case.strategy, case.precision), bound_of(case))
    for record in records:
        index, size = record.batch
        torch.testing.assert_close(record.losses, expected.losses[index::size], rtol=bound, atol=bound)
        torch.testing.assert_close(record.norms, expected.norms, rtol=bound, atol=bound)
        assert len(record.weights) == len(expected.weights) > 0
        for here, there in zip(record.weights, expected.weights, strict=True):
            # An engine may give out weights in the dtype that it computes in.
            torch.testing.assert_close(here, there, rtol=bound, atol=bound, check_dtype=False)


@cells
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training(name, ranks, accumulation, record_property):
    record_property("shown", " ".join(sorted(precisions_of(name))))
    for precision in precisions_of(name):
        case = Case(name, precision, accumulation)
        check(case, *run(case, ranks))


@smallest
def test_short_window(name, ranks):
    """5 batches in windows of 4: the second window holds one."""
    case = Case(name, accumulation=4, optimizer="SGD")
    records, expected = run(case, ranks)
    assert [len(window) for window in records[0].windows] == [4, 1, 4, 1]
    check(case, records, expected)


@cells
@pytest.mark.parametrize("accumulation", [1, 3])
def test_items(name, ranks, accumulation, record_property):
    case = Case(name, accumulation=accumulation, items=True)
    if MEMBERS[name].capabilities.num_items:
        check(case, *run(case, ranks))
    else:
        record_property("shown", REFUSED)
        with pytest.raises(
            worlds.RankError, match=f"AccumulationError.*{strategy_of(name)}.*cannot weigh micro-batches"
        ):
            worlds.run(train, ranks, case)


@smallest
def test_clip_norm(name, ranks):
    case = Case(name, accumulation=2, clip_norm=0.3)
    records, expected = run(case, ranks)
    assert max(expected.norms) > 0.3, "something is clipped"
    check(case, records, expected)


@smallest
def test_t34_clipping_of_several_optimizers(name, ranks, record_property):
    """Gradients are unscaled once for each optimizer and step, and clipped by the norm of all of them."""
    precision = "fp16" if "fp16" in precisions_of(name) else "no"
    case = Case(name, precision, accumulation=2, clip_norm=0.3, optimizers=2)
    if MEMBERS[name].capabilities.prepares_together:
        record_property("shown", REFUSED)
        with pytest.raises(worlds.RankError, match=r"PrepareError.*two optimizers"):
            worlds.run(train, ranks, case)
        return
    records, expected = run(case, ranks)
    assert max(expected.norms) > 0.3, "something is clipped"
    check(case, records, expected)


@smallest
def test_clip_value(name, ranks):
    case = Case(name, accumulation=2, clip_value=0.02, optimizer="SGD")
    check(case, *run(case, ranks))


@pytest.mark.parametrize("name", [name for name in FOUND if name not in MEMBERS])
def test_not_installed(name):
    """Members that cannot run here; `hatch run engines:all` runs them where they are installed."""
    if name in OWN_SUITE:
        pytest.skip(f"strategy {name!r} trains models of transformers alone: {OWN_SUITE[name]}")
    pytest.skip(f"strategy {name!r} needs {', '.join(FOUND[name].capabilities.requires)}, not installed here")


@smallest
def test_frozen(name, ranks):
    case = Case(name, accumulation=2, frozen=True)
    records, expected = run(case, ranks)
    check(case, records, expected)
    first, last = records[0].weights[0], records[0].weights[-1]
    assert torch.equal(first["first.weight"], last["first.weight"])


@smallest
def test_two_forwards_of_one_backward(name, ranks):
    """As in contrastive losses: a unit of a divided model is reduced once for each of its forwards."""
    case = Case(name, accumulation=2, forwards=2)
    check(case, *run(case, ranks))


@smallest
def test_evaluation(name, ranks):
    """An evaluation inside an epoch changes nothing in it; as with plain loaders, it moves torch's generator."""
    case = Case(name, accumulation=2, evaluate=True, epochs=1)
    records, expected = run(case, ranks)
    check(case, records, expected)
    plain = worlds.run(train, ranks, dataclasses.replace(case, evaluate=False))
    torch.testing.assert_close(records[0].weights, plain[0].weights, rtol=0, atol=0)


@cells
def test_shuffling(name, ranks):
    """Ranks with one batch index read and draw the same, all others read different samples."""
    case = Case(name, dropout=True)
    records = worlds.run(train, ranks, case)
    readers: dict[int, list[Record]] = {}
    for record in records:
        readers.setdefault(record.batch[0], []).append(record)
    assert len(readers) == records[0].batch[1]
    seen: list[int] = []
    for alike in readers.values():
        for record in alike:
            assert record.windows == alike[0].windows
            torch.testing.assert_close(record.masks, alike[0].masks, rtol=0, atol=0)
        first_epoch = [micro for window in alike[0].windows for micro in window][: case.rounds]
        seen += [sample for micro in first_epoch for sample in micro]
    assert sorted(seen) == list(range(case.rounds * case.batch * len(readers)))


@smallest
def test_two_models(name, ranks):
    case = Case(name, accumulation=2, rounds=4)
    found = worlds.run(train_two, ranks, case)
    for number in range(2):
        records = [pair[number] for pair in found]
        check(case, records, oracle(case, records, seed=number))


@smallest
@pytest.mark.parametrize("order", ["model first", "optimizer first", "with state"])
def test_t45_optimizers_follow_replaced_parameters(name, ranks, order, record_property):
    case = Case(name)
    if MEMBERS[name].capabilities.prepares_together:
        record_property("shown", REFUSED)
        with pytest.raises(worlds.RankError, match=r"PrepareError.*(in one|Pass both to one) call"):
            worlds.run(prepare_apart, ranks, case, order)
        return
    # Their state is divided already, in another way.
    if order == "with state" and name in ("fake", "dp_shard x tp", "ep x tp"):
        with pytest.raises(worlds.RankError, match=r"PrepareError.*already has state of shape"):
            worlds.run(prepare_apart, ranks, case, order)
        return
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data = Samples(4, case.dtype)
    expected = []
    if order == "with state":
        model(data.x).sum().backward()
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        ((model(data.x) - data.y) ** 2).mean().backward()
        optimizer.step()
        expected.append(cloned(model.state_dict()))
    for weights in worlds.run(prepare_apart, ranks, case, order):
        bound = bound_of(case)
        torch.testing.assert_close(weights, expected, rtol=bound, atol=bound)


@cells
@pytest.mark.parametrize("use_objects", [False, True])
def test_gather_for_metrics(name, ranks, use_objects):
    """Every sample once, on every rank, although the last round is padded."""
    case = Case(name)
    for seen, readers in worlds.run(gather, ranks, case, 11, use_objects):
        assert sorted(seen) == list(range(11)), readers


@smallest
def test_uneven(name, ranks, record_property):
    """A rank without data counts as a gradient of zero, or the strategy refuses."""
    case = Case(name, optimizer="SGD", rounds=3)
    if ranks > 1 and not MEMBERS[name].capabilities.separate_steps:
        record_property("shown", REFUSED)
        with pytest.raises(
            worlds.RankError, match=f"IncompatibleOptionsError.*{strategy_of(name)}.*even_batches=True"
        ):
            worlds.run(uneven, ranks, case)
        return
    found = worlds.run(uneven, ranks, case)
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data = Samples(case.rounds * case.batch * ranks - case.batch, case.dtype)
    batches = [range(start, start + case.batch) for start in range(0, len(data), case.batch)]
    for first in range(0, len(batches), ranks):
        losses = [
            ((model(data.x[rows]) - data.y[rows]) ** 2).mean() for rows in batches[first : first + ranks]
        ]
        optimizer.zero_grad()
        (sum(losses) / ranks).backward()
        optimizer.step()
    assert len({len(losses) for losses, _, _ in found}) == min(ranks, 2), (
        "ranks had different numbers of batches"
    )
    for _, weights, _ in found:
        bound = bound_of(case)
        torch.testing.assert_close(weights, cloned(model.state_dict()), rtol=bound, atol=bound)


@smallest
def test_unwrap(name, ranks):
    for same, names, gathered in worlds.run(unwrapped, ranks, Case(name)):
        assert same
        assert gathered == names


@smallest
def test_undeclared_precisions_are_refused(name, ranks):
    declared = declared_precisions(name)
    names = "|".join(strategy.name for strategy in strategies_of(name))
    refused = set() if declared is None else set(PRECISIONS.names()) - declared
    for precision in sorted(refused):
        pattern = f"IncompatibleOptionsError.*'({names})'.*cannot compute with mixed_precision='{precision}'"
        with pytest.raises(worlds.RankError, match=pattern):
            worlds.run(train, ranks, Case(name, precision))
    assert refused or declared is None


@smallest
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume(tmp_path, name, ranks, accumulation):
    """Continuing after a kill is bit for bit what would have happened, inside an epoch and between two steps."""
    case = Case(name, accumulation=accumulation, dropout=True)
    whole = worlds.run(train_and_save, ranks, case, str(tmp_path / "none"))
    first = worlds.run(train_and_save, ranks, case, str(tmp_path / "state"), 2)
    second = worlds.run(load_and_train, ranks, case, str(tmp_path / "state"))
    for uninterrupted, before, after in zip(whole, first, second, strict=True):
        assert before.windows + after.windows == uninterrupted.windows
        assert before.losses + after.losses == uninterrupted.losses
        for part in ("weights", "masks"):
            seen = getattr(before, part) + getattr(after, part)[1 if part == "weights" else 0 :]
            torch.testing.assert_close(seen, getattr(uninterrupted, part), rtol=0, atol=0)


@smallest
def test_resume_inside_a_window(tmp_path, name, ranks, record_property):
    case = Case(name, accumulation=3)
    if not MEMBERS[name].capabilities.saves_windows:
        record_property("shown", REFUSED)
        with pytest.raises(
            worlds.RankError, match=rf"{strategy_of(name)}.*cannot save them\. Save after optimizer\.step"
        ):
            worlds.run(train_and_save, ranks, case, str(tmp_path / "state"), 2)
        assert not (tmp_path / "state").exists()
        return
    whole = worlds.run(train_and_save, ranks, case, str(tmp_path / "none"))
    worlds.run(train_and_save, ranks, case, str(tmp_path / "state"), 2)
    second = worlds.run(load_and_train, ranks, case, str(tmp_path / "state"))
    for uninterrupted, after in zip(whole, second, strict=True):
        count = len(after.weights) - 1
        torch.testing.assert_close(after.weights[1:], uninterrupted.weights[-count:], rtol=0, atol=0)


def saves_hidden_gradients(name: str) -> bool:
    adapter, capabilities = MEMBERS[name].adapter, MEMBERS[name].capabilities
    whole = (  # gradients may be plain PyTorch's, with which other strategies continue
        adapter.window_gradients.unreduced is not WindowGradients.unreduced
        or adapter.window_gradients.are_plain is not WindowGradients.are_plain
    )
    divides = "pp" in capabilities.dimensions  # other ranks have the gradients of other stages
    return capabilities.hides_gradients and capabilities.saves_windows and (divides or not whole)


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks_of(name)[0]) for name in MEMBERS if saves_hidden_gradients(name)]
)
def test_a_window_of_one_engine_is_refused_by_another(tmp_path, name, ranks):
    worlds.run(train_and_save, ranks, Case(name, accumulation=3, samples=40), str(tmp_path / "state"), 2)
    with pytest.raises(
        worlds.RankError, match=rf"gradients have the form of the strategy '{strategy_of(name)}'"
    ):
        worlds.run(load_and_train, ranks, Case("ddp", accumulation=3, samples=40), str(tmp_path / "state"))


def continued(case: Case, folder: str, ranks: int) -> list[Record]:
    return worlds.run(load_and_train, ranks, case, folder, follow=True)


@parameters(CELLS, quick={"fsdp2"})
def test_mobility(tmp_path, name, ranks):
    """What a strategy saves, every other one loads on any number of ranks, and trains on as it would have.

    The weights after a next step, which has the same samples everywhere, are those of the run that was saved, so the
    optimizer's state is too.
    """
    single = any(MEMBERS[other].name in FLOAT32_ONLY for other, _ in REGISTERED)
    case = Case(name, samples=48, epochs=1, single=single, experts=EXPERTS.get(name))
    folder = str(tmp_path / "state")
    before = worlds.run(train_and_save, ranks, case, folder, samples=16, follow=True)[0]
    saved, bound = before.weights[-1], bound_of(case)
    assert not torch.equal(saved["head.weight"], before.following["head.weight"])
    reference: set[int] = set()
    for other, others in REGISTERED:
        if others == 4 and ranks == 4 and other != name:
            continue  # covered by the others; four ranks are slow on two cores
        target = dataclasses.replace(case, strategy=other)
        records = continued(target, folder, others)
        for record in records:
            torch.testing.assert_close(record.weights[0], saved, rtol=0, atol=0)
            torch.testing.assert_close(record.following, before.following, rtol=bound, atol=bound)
            torch.testing.assert_close(record.weights[-1], records[0].weights[-1], rtol=0, atol=0)
        read = {
            sample for record in records for window in record.windows for micro in window for sample in micro
        }
        assert len(read) == 32, "the rest of the epoch, each sample once"
        reference = reference or read
        assert read == reference, "the next samples are the same"


@smallest
def test_save_model(tmp_path, name, ranks):
    from safetensors.torch import load_file

    folder = tmp_path / "model"
    weights = worlds.run(save_whole_model, ranks, Case(name), str(folder))
    saved = load_file(folder / "model.safetensors")
    for here in weights:
        torch.testing.assert_close(saved, here, rtol=0, atol=0)


@smallest
def test_weight_source(name, ranks):
    """All ranks together offer every element of the current weights once, by the names of the whole model."""
    answers = worlds.run(offer_weights, ranks, Case(name))
    _, about, aliases, weights = answers[0]
    assert all(answer[1:3] == (about, aliases) for answer in answers)
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: info.shape for name, info in about.items()
    }
    found = {name: torch.full(info.shape, torch.nan, dtype=info.dtype) for name, info in about.items()}
    given = [weight for own, *_ in answers for weight in own]
    for name, box, tensor in given:
        found[name][box.slices] = tensor
    assert sum(box.volume for _, box, _ in given) == sum(
        value.numel() for name, value in found.items() if name not in aliases
    )
    for name, value in weights.items():
        torch.testing.assert_close(found[aliases.get(name, name)], value, rtol=0, atol=0)


@pytest.mark.full
@smallest
def test_an_error_on_one_rank_ends_all(name, ranks):
    """The others are inside a collective by then; nobody waits for a time-out."""
    tools = Path(__file__).parents[1]
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", str(ranks)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(tools / "testkit" / "failing.py"), name, str(ranks - 1)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tools), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode not in (0, 75)
    assert f"ValueError: rank {ranks - 1} fails on purpose" in done.stdout + done.stderr
    assert time.monotonic() - began < 90
