"""Every tensor in exactly one shard, every shard within the limit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.saving.plan import (
    PlannedTensor,
    convert_file_size_to_int,
    divide,
    plan_shards,
    shard_file_names,
)
from accel_state.messages import readable_size

tensors = st.lists(st.tuples(st.integers(0, 200), st.none() | st.integers(0, 3))).map(
    lambda items: [PlannedTensor(f"t{i}", size, group) for i, (size, group) in enumerate(items)]
)


@given(tensors, st.integers(1, 300))
def test_every_tensor_once_and_sizes_within_the_limit(planned, limit):
    shards = plan_shards(planned, limit)
    assert sorted(name for shard in shards for name in shard.names) == sorted(t.name for t in planned)
    by_name = {t.name: t for t in planned}
    homes = {}
    for index, shard in enumerate(shards):
        counted = {}
        for name in shard.names:
            tensor = by_name[name]
            # The first of a group is the one that is counted, wherever the group is.
            counted.setdefault(name if tensor.storage is None else ("group", tensor.storage), tensor.nbytes)
            if tensor.storage is not None:
                assert homes.setdefault(tensor.storage, index) == index
        assert shard.nbytes == sum(counted.values())
        assert shard.nbytes <= limit or len(counted) == 1


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(100, 300))
def test_a_shard_is_closed_only_when_the_next_tensor_does_not_fit(sizes, limit):
    shards = plan_shards([PlannedTensor(str(i), size) for i, size in enumerate(sizes)], limit)
    for before, after in itertools.pairwise(shards):
        assert before.nbytes + sizes[int(after.names[0])] > limit


def test_no_tensors_make_one_empty_file():
    assert [shard.names for shard in plan_shards([], 10)] == [()]


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_must_be_positive(limit):
    with pytest.raises(ValueError, match=f"max_shard_size is {limit}"):
        plan_shards([], limit)


def test_file_names():
    assert shard_file_names(1, "model", "safetensors") == ("model.safetensors",)
    assert shard_file_names(2, "pytorch_model", "bin") == (
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 5), ("10GB", 10 * 10**9), ("1GiB", 2**30), ("5MB", 5 * 10**6), ("5MiB", 5 * 2**20), ("2KB", 2000),
        ("2KiB", 2048), ("8Gb", 10**9), ("8kb", 1000), ("0.5GB", 5 * 10**8), ("1TiB", 2**40), (" 3 MB ", 3 *
        10**6), ("1gib", 2**30), ("12B", 12), ("0MB", 0),
    ],
)  # fmt: skip
def test_sizes(size, expected):
    assert convert_file_size_to_int(size) == expected


@pytest.mark.parametrize("size", [-1, "-1GB", "5", "GB", "5XB", "", "1..5GB", "5 G", None, 1.5])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="size"):
        convert_file_size_to_int(size)


def test_sizes_are_written_in_the_units_in_which_they_are_read():
    found = [readable_size(size) for size in (0, 999, 1000, 1024, 600_000, 10**9, 5 * 10**15)]
    assert found == ["0 bytes", "999 bytes", "1.00 kB", "1.02 kB", "600.00 kB", "1.00 GB", "5000.00 TB"]
    assert [convert_file_size_to_int(text) for text in found[2:]] == [
        1000, 1020, 600_000, 10**9, 5 * 10**15,
    ]  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 100)),
    st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_each_thing_goes_to_one_worker_and_the_load_is_even(sizes, loads):
    shares = divide(sizes, loads)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    total = [load + sum(sizes[name] for name in share) for load, share in zip(loads, shares, strict=True)]
    busy = [t for t, share in zip(total, shares, strict=True) if share]
    # Whoever got something had least before its last, smallest piece came.
    assert all(
        t - min(sizes[n] for n in share) <= min(total)
        for t, share in zip(total, shares, strict=True)
        if share
    )
    assert not busy or max(busy) <= min(total) + max(sizes.values())
    assert divide(dict(reversed(sizes.items())), loads) == shares
