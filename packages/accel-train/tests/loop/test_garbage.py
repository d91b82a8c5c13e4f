"""Collections at chosen steps, seen by the callbacks of Python's collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

from accel_train import Accelerator, OptionError
from testkit import worlds


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def collected():
    generations = []

    def note(phase, info):
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


def training():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.wide(but=["1"])
@pytest.mark.parametrize("generation", [1, 2])
def test_garbage_is_collected_at_the_chosen_steps_only(collected, generation):
    accelerator, model, optimizer = training()
    with accelerator.collect_garbage(every=3, generation=generation) as collector:
        assert not gc.isenabled()
        collected.clear()
        at = []
        for step in range(1, 11):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            [Cycle() for _ in range(2000)]  # more than the automatic collector would wait for
            optimizer.step()
            if len(collected) > len(at):
                at.append(step)
        assert at == [3, 6, 9]
        assert collected == [generation] * 3
        assert (collector.steps, collector.collections) == (10, 3)
    assert gc.isenabled()
    optimizer.step()
    assert collector.steps == 10


def test_cycles_are_freed_by_a_collection():
    accelerator, _, optimizer = training()
    with accelerator.collect_garbage(every=2):
        gone = weakref.ref(Cycle())
        optimizer.step()
        assert gone() is not None
        optimizer.step()
        assert gone() is None


@pytest.mark.wide
def test_after_an_error_collection_is_as_it_was_before():
    accelerator, _, _ = training()

    def fail():
        with accelerator.collect_garbage(5), accelerator.collect_garbage(7):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            fail()
        assert not gc.isenabled()
    finally:
        gc.enable()


def steps_of_collections():
    accelerator, model, optimizer = training()
    accelerator.guard_steps()
    at = []
    with accelerator.collect_garbage(2) as collector:
        for step in range(6):
            accelerator.backward(model(torch.ones(1, 1)).sum() * (float("nan") if step == 1 else 1))
            [Cycle() for _ in range(700 * (1 + accelerator.process_index))]
            before = collector.collections
            optimizer.step()
            optimizer.zero_grad()
            at += [step] * (collector.collections - before)
    return at


def test_ranks_collect_at_the_same_steps_skipped_ones_included():
    assert worlds.run(steps_of_collections, 2) == [[1, 3, 5]] * 2


def test_bad_numbers_are_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(OptionError, match=r"every=0"):
        accelerator.collect_garbage(0)
    with pytest.raises(OptionError, match=r"generation=3"):
        accelerator.collect_garbage(generation=3)
    assert gc.isenabled()
