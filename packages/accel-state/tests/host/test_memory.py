"""Batch sizes that fit, and memory that is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accel_state.errors import ConfigError, NoExecutableBatchSizeError
from accel_state.host.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

OUT_OF_MEMORY = "CUDA out of memory."
SIZES = [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8]


@pytest.mark.full
def test_the_sizes_that_are_tried():
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size):
        """Trains."""
        tried.append(batch_size)
        if batch_size != 8:
            raise RuntimeError(OUT_OF_MEMORY)
        return "done"

    assert train() == "done"
    assert tried == SIZES
    assert train.__doc__ == "Trains."
    assert train() == "done"
    assert tried == [*SIZES, 8]  # what worked is kept


def test_arguments_are_passed_on():
    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size, a, *rest, b=2):
        if batch_size > 14:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return batch_size, a, rest, b

    assert train(1, 5, 6, b=3) == (14, 1, (5, 6), 3)


def test_without_arguments_and_as_a_plain_call():
    @find_executable_batch_size
    def train(batch_size):
        return batch_size

    assert train() == 128
    assert find_executable_batch_size(lambda batch_size: batch_size, 7)() == 7
    assert find_executable_batch_size(lambda batch_size: batch_size, starting_batch_size=7)() == 7


@pytest.mark.wide(but=["of nothing"])
@pytest.mark.parametrize("backoff", ["of nothing", "of the size"])
def test_another_backoff(backoff):
    sizes = iter([40, 20, 10])
    reduce = (lambda: next(sizes)) if backoff == "of nothing" else (lambda size: size // 2)
    tried = []

    @find_executable_batch_size(starting_batch_size=80, reduce_batch_size_fn=reduce)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 10:
            raise RuntimeError(OUT_OF_MEMORY)

    train()
    assert tried == [80, 40, 20, 10]


@pytest.mark.wide(but=["100"])
@pytest.mark.parametrize("returned", [80, 100, 7.5, None])
def test_a_backoff_that_does_not_reduce_is_named(returned):
    @find_executable_batch_size(starting_batch_size=80, reduce_batch_size_fn=lambda size: returned)
    def train(batch_size):
        raise RuntimeError(OUT_OF_MEMORY)

    with pytest.raises(ConfigError, match=f"returned {returned} after 80 ran out of memory; .*below 80"):
        train()


@pytest.mark.parametrize("start", [0, 3])
def test_no_size_fits(start):
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size):
        raise RuntimeError(OUT_OF_MEMORY)

    with pytest.raises(
        NoExecutableBatchSizeError, match=r"No executable batch size found, reached zero\."
    ) as caught:
        train()
    assert isinstance(caught.value, RuntimeError)


def test_other_errors_are_raised_at_once():
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        tried.append(batch_size)
        raise ValueError("Oops, we had an error!")

    with pytest.raises(ValueError, match="Oops"):
        train()
    assert tried == [16]


@pytest.mark.parametrize(("args", "kwargs"), [((128, "hello", "world"), {}), ((), {"batch_size": 8})])
def test_passing_the_batch_size_is_an_error_that_shows_the_call(args, kwargs):
    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size, arg1, arg2):
        raise AssertionError("must not run")

    with pytest.raises(TypeError, match=r"train\(\) gets its batch size") as caught:
        train(*args, **kwargs)
    if args:
        assert "train(arg1='hello', arg2='world')" in str(caught.value)


def test_the_tensors_of_a_failed_attempt_are_gone_before_the_next():
    alive = []

    @find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda size: size - 1)
    def train(batch_size):
        if batch_size == 1:
            return [ref() for ref in alive]
        big = torch.zeros(10)
        alive.append(weakref.ref(big))
        raise RuntimeError(OUT_OF_MEMORY)

    assert train() == [None]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2 GiB",
        "XPU out of memory. Tried",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size",
        "MPS backend out of memory (MPS allocated: 1 GB)",
    ],
)
def test_what_says_that_memory_ran_out(message):
    assert should_reduce_batch_size(RuntimeError(message))
    assert not should_reduce_batch_size(ValueError(message))
    assert not should_reduce_batch_size(RuntimeError(message, "and more"))


def test_torch_s_own_error_is_known_by_its_type():
    assert should_reduce_batch_size(torch.OutOfMemoryError("in other words", "and more"))


def test_what_does_not():
    assert not should_reduce_batch_size(RuntimeError("shapes do not match"))
    assert not should_reduce_batch_size(RuntimeError())
    assert not should_reduce_batch_size(RuntimeError(3))


def test_a_real_allocation_failure_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def test_released_objects_are_gone():
    first, second = torch.zeros(3), torch.zeros(3)
    gone = weakref.ref(first)
    first, second = release_memory(first, second)
    assert (first, second) == (None, None)
    assert gone() is None
    assert release_memory() == []


def test_garbage_is_collected_on_request():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself = cycle
    gone = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        clear_device_cache()
        assert gone() is not None
        clear_device_cache(garbage_collection=True)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_the_devices_memory_comes_back():
    kind = torch.accelerator.current_accelerator().type
    clear_device_cache(
        garbage_collection=True
    )  # what other tests left: garbage, and blocks that could be split
    before = torch.accelerator.memory_allocated()
    big = torch.zeros(2**24, device=kind)
    assert torch.accelerator.memory_allocated() >= before + big.nbytes
    reserved = torch.accelerator.memory_reserved()
    (big,) = release_memory(big)
    assert torch.accelerator.memory_allocated() == before
    clear_device_cache()  # the variable referred to the tensor until release_memory had returned
    assert torch.accelerator.memory_reserved() < reserved
