"""Seeds, random states, and making them equal on all ranks."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.enums import RNGType
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError, DeviceError, StateError
from accel_state.seeding import (
    check_generator_states,
    check_rng_state,
    get_rng_state,
    set_rng_state,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accel_state.world.process import PartialState
from testkit import worlds


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The CPU, no state of other tests, and the global generators put back."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PartialState._reset_state()
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(pytorch)
    PartialState._reset_state()


def draw():
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        torch.randperm(7).tolist(),
    )


def test_the_generators_are_seeded_as_their_owners_seed_them():
    set_seed(1234)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    assert drawn == (
        random.Random(1234).random(),
        np.random.RandomState(1234).rand(),
        torch.rand(1, generator=torch.Generator().manual_seed(1234)).item(),
    )


def test_the_rank_is_added_before_the_world_is_joined_and_without_joining_it():
    with patch_environment(RANK=3, WORLD_SIZE=4):
        set_seed(10, device_specific=True)
    assert not PartialState._shared_state
    assert random.random() == random.Random(13).random()
    set_seed(10, device_specific=True)
    assert random.random() == random.Random(10).random()


def seeded():
    PartialState()
    set_seed(10, device_specific=True)
    return random.random()


def test_the_rank_is_added_in_a_world():
    assert worlds.run(seeded, 2) == [random.Random(10).random(), random.Random(11).random()]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_named(seed):
    with pytest.raises(ConfigError, match=f"seed {seed} is not between 0 and 4294967295"):
        set_seed(seed)
    with (
        patch_environment(RANK=1, WORLD_SIZE=2),
        pytest.raises(ConfigError, match=r"seed 4294967295 \+ rank 1 is not"),
    ):
        set_seed(2**32 - 1, device_specific=True)


def test_deterministic():
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_a_state_that_is_put_back_draws_the_same_numbers(seed, steps):
    set_seed(seed)
    for _ in range(steps):
        draw()
    random.gauss(0, 1)  # leaves a second number waiting in random and NumPy
    np.random.randn()
    state = get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()
    expected = draw()
    draw()
    set_rng_state(state)
    assert random.getstate() == python
    for ours, theirs in zip(np.random.get_state(), numpy, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert draw() == expected


def test_a_state_is_tensors_and_plain_data_only():
    def check(node):
        if isinstance(node, dict):
            assert all(type(key) is str for key in node)
            return {key: check(value) for key, value in node.items()}
        if isinstance(node, torch.Tensor):
            assert node.dtype in (torch.uint8, torch.int64)
            return node.tolist()
        assert type(node) in (int, float, str, type(None))
        return node

    random.gauss(0, 1)
    state = get_rng_state()
    assert set(state) == {"python", "numpy", "torch"}
    assert state["python"]["internal"].shape == (625,)
    json.dumps(check(state))


@pytest.mark.parametrize("name", ["PCG64", "Philox", "SFC64"])
def test_numpys_other_generators_round_trip(name):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, name)(5))
        np.random.randn(3)
        state = get_rng_state()
        expected = np.random.rand(5).tolist()
        np.random.rand(2)
        set_rng_state(state)
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(StateError, match=f"{name}.*MT19937"):
        set_rng_state(state)


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_missing_part_is_named_and_nothing_is_changed(part):
    state = get_rng_state()
    del state[part]
    draw()
    python, pytorch = random.getstate(), torch.get_rng_state()
    with pytest.raises(StateError, match=f"lacks {part};"):
        set_rng_state(state)
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_a_state_of_a_device_that_is_not_here():
    state = get_rng_state() | {"device": {"type": "cuda", "states": [torch.zeros(16, dtype=torch.uint8)]}}
    after = random.getstate()
    with pytest.raises(StateError, match="saved on cuda, but this process runs without one"):
        set_rng_state(state)
    assert random.getstate() == after


def shared(kinds):
    state = PartialState()
    set_seed(state.process_index)
    generator = torch.Generator().manual_seed(100 + state.process_index)
    synchronize_rng_states(kinds, generator)
    return torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist(), random.random()


@pytest.mark.parametrize("kinds", [["torch"], ["generator"], [RNGType.TORCH, RNGType.GENERATOR]])
def test_states_are_rank_0s_on_all_ranks(kinds):
    results = worlds.run(shared, 3, kinds)
    names = [str(kind) for kind in kinds]
    for rank, (torchs, generators, pythons) in enumerate(results):
        own = 0 if "torch" in names else rank
        assert torchs == torch.rand(2, generator=torch.Generator().manual_seed(own)).tolist()
        own = 0 if "generator" in names else rank
        assert generators == torch.rand(2, generator=torch.Generator().manual_seed(100 + own)).tolist()
        assert pythons == random.Random(rank).random()


def test_alone_nothing_changes():
    before = torch.get_rng_state()
    synchronize_rng_state("torch")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["numpy", None, 3])
def test_unknown_types_are_named(kind):
    with pytest.raises(ConfigError, match=r"is not a type of random number generator; use one of \['torch'"):
        synchronize_rng_state(kind)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"'generator' needs a torch\.Generator"):
        synchronize_rng_state("generator")
    with pytest.raises(DeviceError, match="no xla device"):
        synchronize_rng_state("xla")
    absent = "cuda" if not torch.cuda.is_available() else "xpu"
    with pytest.raises(DeviceError, match=f"no {absent} device"):
        synchronize_rng_state(absent)


@pytest.fixture
def kind(monkeypatch):
    """The type of the accelerator, whose devices belong to this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    return torch.accelerator.current_accelerator().type


@pytest.mark.gpu
def test_the_devices_state_is_part_of_it(kind):
    state = get_rng_state()
    expected = torch.rand(4, device=kind)
    set_rng_state(state)
    assert torch.equal(torch.rand(4, device=kind), expected)


@pytest.mark.gpu
def test_states_of_more_devices_than_are_here(kind):
    """One process saved all devices of its machine; now it has fewer, or is one of several with one each."""
    state = get_rng_state()
    expected = torch.rand(4, device=kind)
    here = state["device"]["states"]
    many = state | {"device": {"type": kind, "states": [*here, *here]}}
    with pytest.warns(
        UserWarning, match=f"is that of {2 * len(here)} {kind} devices, but this process has {len(here)}"
    ):
        set_rng_state(many)
    assert torch.equal(torch.rand(4, device=kind), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.zeros(3, dtype=torch.uint8), r"\(3,\) of torch.uint8"), ("no state", "'no state'")],
)
def test_a_damaged_state_of_a_device_changes_nothing(kind, value, said):
    state = get_rng_state()
    random.random()
    before = random.getstate()
    damaged = state | {"device": {"type": kind, "states": [value]}}
    with pytest.raises(StateError, match=rf"is {said}, where .* was expected"):
        set_rng_state(damaged)
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("left", "following", "seeded"),
    [(624, 624, 1), (624, 2, 1), (2, 624, 1), (0, 0, 1), (-1, 0, 1), (1, 0, 0)],
)
def test_a_state_of_torch_s_generator_that_would_read_behind_its_memory(left, following, seeded):
    torch.rand(3)
    before = get_rng_state()
    state = get_rng_state()
    bad = bytearray(state["torch"].tolist())
    bad[8:24] = struct.pack("<iiQ", left, seeded, following)
    state["torch"] = torch.tensor(list(bad), dtype=torch.uint8)
    for refuse in (check_rng_state, set_rng_state):
        with pytest.raises(StateError, match=r"words left|cannot be restored"):
            refuse(state)
    assert torch.equal(get_rng_state()["torch"], before["torch"])


def test_every_state_of_torch_s_generator_is_taken():
    generator = torch.Generator().manual_seed(3)
    for count in (0, 1, 2, 620, 1, 1, 1, 3, 624, 7):
        torch.rand(count, generator=generator)
        torch.randn(1, generator=generator)
        check_generator_states({"a": [generator.get_state()]})
