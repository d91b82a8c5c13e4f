"""What a training state holds besides weights: collected, read and checked, put back."""

import collections
import dataclasses
import decimal
import enum
import os
import warnings
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Manifest,
    StateMismatchError,
    UnsupportedValueError,
)
from accel_train import Accelerator, GradScalerKwargs
from accel_train.checkpoints import training_state
from accel_train.checkpoints.random_state import RandomStates
from accel_train.checkpoints.training_state import read
from testkit import worlds
from testkit.samples import Held
from testkit.small_run import build, snapshot, train


def test_nothing_is_changed_when_a_part_is_damaged(tmp_path):
    accelerator = Accelerator()
    parts = build(accelerator)
    accelerator.save_state(tmp_path / "state")
    train(accelerator, *parts)
    before = snapshot(*parts[:3])
    path = tmp_path / "state" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors"):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(before[0], snapshot(*parts[:3])[0], strict=True))


def pretend(accelerator, **shared):
    """Let the process seem to be another rank, or to be in another world."""
    before = dict(accelerator._process._shared_state)
    accelerator._process._shared_state.update(shared)
    return before


def random_state(saved):
    return next(taken for part, taken in saved.taken if isinstance(part, RandomStates))


def test_t7_a_missing_random_state_is_an_error_unless_allowed(tmp_path, monkeypatch):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(folder)  # as if node 1, with rank 1, had saved to a disk of its own
    monkeypatch.setattr(Manifest, "decode", lambda text, what: replace(manifest, world_size=2))
    before = pretend(accelerator, process_index=1, num_processes=2)
    try:
        with pytest.raises(CheckpointNotFoundError, match="rank 1"):
            read(accelerator._prepared, folder, allow_missing_rng=False, trust_custom_objects=False)
        saved = read(accelerator._prepared, folder, allow_missing_rng=True, trust_custom_objects=False)
        assert random_state(saved) is None
    finally:
        accelerator._process._shared_state.update(before)


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors"])
def test_t7_an_unreadable_random_state_is_an_error_even_if_it_may_be_missing(tmp_path, name):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    (folder / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        accelerator.load_state(folder, allow_missing_rng=True)


def test_t9_a_rank_that_is_new_derives_its_random_state(tmp_path, caplog):
    accelerator = Accelerator()
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    drawn = []
    for rank in (0, 1, 2, 1):
        before = pretend(accelerator, process_index=rank, num_processes=3)
        try:
            saved = read(accelerator._prepared, folder, allow_missing_rng=False, trust_custom_objects=False)
        finally:
            accelerator._process._shared_state.update(before)
        drawn.append(random_state(saved)["torch"])
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert "rank 1, 2 is new and derives its random state" in caplog.text


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_t25_a_trusted_pickle_needs_the_word_twice(tmp_path):
    accelerator = Accelerator()
    plain, rich = Held({"a": 1}), Held({"what": Fraction(1, 3), "tensor": torch.ones(2)})
    accelerator.register_for_checkpointing(plain, rich, trusted=True)
    folder = accelerator.save_state(tmp_path / "state")
    plain.state = rich.state = None
    with pytest.raises(
        ValueError, match=r"object 1 \(Held\) as a pickle.*load_state\(…, trust_custom_objects=True\)"
    ):
        accelerator.load_state(folder)
    assert plain.state is None, "nothing is changed"
    careless = Accelerator()
    careless.register_for_checkpointing(Held(), Held())
    with pytest.raises(ValueError, match=r"register_for_checkpointing\(…, trusted=True\)"):
        careless.load_state(folder, trust_custom_objects=True)
    accelerator.load_state(folder, trust_custom_objects=True)
    assert plain.state == {"a": 1}
    assert rich.state["what"] == Fraction(1, 3)
    assert torch.equal(rich.state["tensor"], torch.ones(2))


def test_t25_nothing_is_unpickled_without_it(tmp_path):
    accelerator = Accelerator()
    held = Held({"bomb": Bomb(tmp_path / "exploded")})
    accelerator.register_for_checkpointing(held, trusted=True)
    folder = accelerator.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="as a pickle"):
        accelerator.load_state(folder)
    assert not (tmp_path / "exploded").exists()
    accelerator.load_state(folder, trust_custom_objects=True)
    assert (tmp_path / "exploded").exists(), "the test's pickle does run code"


def test_a_skipping_loader_does_not_add_to_the_state(tmp_path):
    accelerator = Accelerator()
    *_, loader = build(accelerator)
    skipping = accelerator.skip_first_batches(loader, 2)
    iterator = iter(skipping)
    next(iterator)
    accelerator.save_state(tmp_path / "state")
    fresh = Accelerator()
    *_, loader = build(fresh)
    fresh.load_state(tmp_path / "state")
    assert loader.state_dict()["batches_yielded"] == 3


def test_an_update_of_the_loss_scale_that_is_due_is_saved_and_stays_due(tmp_path):
    def run(save, fresh):
        scaling = GradScalerKwargs(init_scale=8.0)
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
        model, optimizer, *_ = build(accelerator)
        scales = []
        for number in range(4):
            if number == 2 and fresh:
                accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
                model, optimizer, *_ = build(accelerator, seed=3)
                accelerator.load_state(tmp_path / "state")
            huge = 1e30 if number == 1 else 1.0  # overflows: the step is skipped, and the scale shrinks later
            accelerator.backward(model(torch.full((2, 4), 1.0)).sum() * huge)
            optimizer.step()
            scales.append((accelerator.scaler.get_scale(), optimizer.step_was_skipped))
            if number == 1 and save:
                accelerator.save_state(tmp_path / "state")
            optimizer.zero_grad()
        return scales, [p.detach().clone() for p in model.parameters()]

    alone, saving, resumed = run(False, False), run(True, False), run(True, True)
    assert alone[0] == saving[0] == resumed[0]
    assert [skipped for _, skipped in alone[0]] == [False, True, False, False]
    assert alone[0][2][0] < alone[0][1][0]
    for other in (saving, resumed):
        assert all(torch.equal(a, b) for a, b in zip(alone[1], other[1], strict=True))


@pytest.mark.parametrize("difference", ["shape", "name", "group", "optimizer"])
def test_nothing_is_changed_when_a_model_or_an_optimizer_does_not_fit(tmp_path, difference):
    def make(changed):
        accelerator = Accelerator()
        width = 3 if changed == "shape" else 2
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width, bias=changed != "name"))
        kind = torch.optim.SGD if changed == "optimizer" else torch.optim.AdamW
        optimizer = kind(model[1].parameters() if changed == "group" else model.parameters(), lr=0.1)
        return accelerator, *accelerator.prepare(model, optimizer)

    make(None)[0].save_state(tmp_path / "state")
    accelerator, model, optimizer = make(difference)
    before = [p.clone() for p in model.parameters()], optimizer.state_dict()
    with pytest.raises(StateMismatchError):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert optimizer.state_dict() == before[1]


def test_flags_and_counters_come_back(tmp_path):
    scaling = GradScalerKwargs(init_scale=8.0)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    model, optimizer, *_ = build(accelerator)
    accelerator.backward(model(torch.ones(2, 4)).sum() * 1e30)
    optimizer.step()
    accelerator.step = 11
    folder = accelerator.save_state(tmp_path / "state")
    other = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    _, restored, *_ = build(other)
    assert not restored.step_was_skipped
    other.load_state(folder)
    assert (restored.step_was_skipped, restored.gradients_spent) == (True, True)
    assert other.step == 11


@pytest.mark.parametrize("saved_with", ["no", "fp16"])
def test_a_scaler_that_only_one_side_has_is_named(tmp_path, saved_with):
    accelerator = Accelerator(mixed_precision=saved_with)
    build(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    other = Accelerator(mixed_precision="fp16" if saved_with == "no" else "no")
    build(other)
    message = "it lacks scaler" if saved_with == "no" else "nothing was prepared or registered for its scaler"
    with pytest.raises(StateMismatchError, match=message):
        other.load_state(folder)


def test_the_models_that_a_load_hook_left_are_paired_by_identity(tmp_path):
    accelerator = Accelerator()
    first, second = accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    folder = accelerator.save_state(tmp_path / "state")
    here = accelerator._prepared
    saved = read(here, folder, allow_missing_rng=False, trust_custom_objects=False)
    [(model, weights)] = training_state.fit(here, saved, [second], strict=True)
    assert model is second
    assert weights is saved.models[1]
    pairs = training_state.fit(here, saved, [second, first], strict=True)
    assert [model for model, _ in pairs] == [first, second], "in the order of preparation"


def test_replicas_that_drift_apart_are_named_when_they_are_saved(tmp_path):
    def work(folder, alike):
        torch.manual_seed(0)
        accelerator = Accelerator()
        plain = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1))
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
        inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(accelerator.process_index))
        for _ in range(2):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if not alike and accelerator.process_index == 1:  # as a script does that clips weights on one rank
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(0.5)
                    optimizer.state[parameter]["exp_avg"].mul_(0.5)
        said = []
        for asynchronous in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                handle = accelerator.save_state(folder, asynchronous=asynchronous)
                if asynchronous:
                    handle.result()
            said.append([str(warning.message) for warning in caught])
        return said

    assert worlds.run(work, 2, str(tmp_path / "same"), True) == [[[], []]] * 2
    for said, silent in zip(*worlds.run(work, 2, str(tmp_path / "other"), False), strict=True):
        weights, moments = said
        assert (
            "the replicas of model 0 (Sequential) have drifted apart: 0.weight (the first of 4 tensors)"
            in weights
        )
        assert "on rank 1 than on rank 0" in weights
        assert "optimizer_0.state.model_0.0.weight.exp_avg" in moments
        assert silent == []


class _Color(enum.Enum):
    RED = 1


_Pair = collections.namedtuple("_Pair", "first second")


@dataclasses.dataclass
class _Options:
    size: int = 1


@pytest.mark.parametrize(
    "value",
    [_Color.RED, decimal.Decimal("1.5"), _Pair(1, 2), _Options()],
    ids=lambda value: type(value).__name__,
)
def test_what_only_a_pickle_holds_names_the_option_that_saves_it(tmp_path, value):
    class Registered:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"inner": [self.value]}

        def load_state_dict(self, state):
            self.value = state["inner"][0]

    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Registered(value))
    told = rf"registered object 0 \(Registered\).*'inner'.*{type(value).__name__}.*trusted=True.*trust_custom_objects"
    with pytest.raises(UnsupportedValueError, match=told):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    trusting, kept = Accelerator(cpu=True), Registered(value)
    trusting.register_for_checkpointing(kept, trusted=True)
    trusting.save_state(tmp_path / "state")
    kept.value = None
    trusting.load_state(tmp_path / "state", trust_custom_objects=True)
    assert kept.value == value
