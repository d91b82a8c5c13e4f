"""Collectives on tensors, nested data and objects, against what the data of the ranks say."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch

from accel_state.errors import CollectiveMismatchError, ConfigError
from accel_state.operations import collectives
from accel_state.operations.scatter import scatter
from accel_state.world.process import PartialState
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
Pair = namedtuple("Pair", "a b")


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


MODES = ["on", "off"]


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What ``rank`` holds; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 4).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() and a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)


def start(mode: str = "auto") -> tuple[int, int]:
    state = PartialState()
    collectives.set_collective_checks(mode)
    return state.process_index, state.num_processes


def errors_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def test_the_default_device_of_the_process_does_not_matter():
    def work():
        rank, _ = start("on")
        with torch.device("meta"):  # as a test can have it; programs set "cuda"
            assert collectives.gather_object([rank]) == [0, 1]
            name, message = errors_of(collectives.gather, torch.ones(rank + 1, device="cpu"))
        assert (name, "rank 1" in message) == ("CollectiveMismatchError", True)

    worlds.run(work, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 3])
def test_gather_equals_concatenation(mode, world):
    def body():
        rank, ranks = start(mode)
        for dtype in DTYPES:
            got = collectives.gather(data(rank, 3, 2, dtype=dtype))
            assert same(got, torch.cat([data(r, 3, 2, dtype=dtype) for r in range(ranks)])), dtype
        scalar = collectives.gather(data(rank))
        assert same(scalar, torch.stack([data(r) for r in range(ranks)]))
        for shape in [(0, 3), (1,), (5, 1, 2), (700, 3), (300_000,)]:
            got = collectives.gather(data(rank, *shape))
            assert same(got, torch.cat([data(r, *shape) for r in range(ranks)])), shape
        turned = data(rank, 4, 6).t()[::2]
        assert not turned.is_contiguous()
        assert same(collectives.gather(turned), torch.cat([data(r, 4, 6).t()[::2] for r in range(ranks)]))
        conjugate = data(rank, 4, dtype=torch.complex64).conj()
        assert conjugate.is_conj()
        expected = torch.cat([data(r, 4, dtype=torch.complex64).conj() for r in range(ranks)])
        assert torch.equal(collectives.gather(conjugate), expected)
        parameter = torch.nn.Parameter(data(rank, 2))
        assert not collectives.gather(parameter).requires_grad

    worlds.run(body, world)


@pytest.mark.parametrize("mode", MODES)
def test_gather_of_nested_structures(mode):
    def body():
        rank, ranks = start(mode)

        def tree(r):
            return {
                "list": [data(r, 2), data(r, 1, 3, dtype=torch.int32, seed=1)],
                "pair": Pair(data(r), (data(r, 400_000, seed=2), data(r, 3, dtype=torch.bool))),
                "record": Record(data(r, 3, dtype=torch.bfloat16), data(r, 1)),
                "user": UserDict(k=data(r, 2, 2)),
                "ordered": OrderedDict(z=data(r, 5, dtype=torch.int8), a=data(r, 2)),
                "empty": [],
            }

        mine = tree(rank)
        kept = tree(rank)
        got = collectives.gather(mine)
        every = [tree(r) for r in range(ranks)]
        assert type(got["pair"]) is Pair
        assert type(got["record"]) is Record
        assert type(got["user"]) is UserDict
        assert list(got["ordered"]) == ["z", "a"]
        assert got["empty"] == []
        assert same(got["list"][1], torch.cat([t["list"][1] for t in every]))
        assert same(got["pair"].a, torch.stack([t["pair"].a for t in every]))
        assert same(got["pair"].b[0], torch.cat([t["pair"].b[0] for t in every]))
        assert same(got["pair"].b[1], torch.cat([t["pair"].b[1] for t in every]))
        assert same(got["record"].x, torch.cat([t["record"].x for t in every]))
        assert same(got["user"]["k"], torch.cat([t["user"]["k"] for t in every]))
        assert same(got["ordered"]["z"], torch.cat([t["ordered"]["z"] for t in every]))
        assert same(mine["list"][0], kept["list"][0])
        assert collectives.gather([]) == []

    worlds.run(body, 2)


@pytest.mark.parametrize("mode", MODES)
def test_ragged_gather(mode):
    def body():
        rank, ranks = start(mode)

        def tree(r):
            rows = [3, 0, 5][r]
            return [
                data(r, rows, 2),
                {"b": data(r, rows, dtype=torch.bfloat16)},
                data(r, 1000 * rows),
                data(r),
            ]

        got = collectives.gather(tree(rank), ragged=True)
        every = [tree(r) for r in range(ranks)]
        assert same(got[0], torch.cat([t[0] for t in every]))
        assert same(got[1]["b"], torch.cat([t[1]["b"] for t in every]))
        assert same(got[2], torch.cat([t[2] for t in every]))
        assert same(got[3], torch.stack([t[3] for t in every]))
        tiny = collectives.gather(torch.full((rank + 1,), rank, dtype=torch.int8), ragged=True)
        assert tiny.tolist() == [0, 1, 1, 2, 2, 2]
        assert collectives.gather({}, ragged=True) == {}
        name, text = errors_of(collectives.gather, torch.zeros(2, 1 + (rank == 2)), ragged=True)
        assert name == "CollectiveMismatchError"
        assert "rank 2: gather" in text
        assert "float32[2, 2]" in text

    worlds.run(body, 3)


@pytest.mark.parametrize("mode", MODES)
def test_reduce_equals_plain_arithmetic(mode):
    def body():
        rank, ranks = start(mode)
        for shape in [(), (3, 2), (0,), (5000,), (140_000,)]:
            every = torch.stack([data(r, *shape, dtype=torch.float64) for r in range(ranks)])
            mine = data(rank, *shape, dtype=torch.float64)
            kept = mine.clone()
            expected = {
                "mean": every.mean(0), "sum": every.sum(0), "max": every.amax(0) if mine.numel() else mine,
                "min": every.amin(0) if mine.numel() else mine, "none": mine,
            }  # fmt: skip
            for reduction, value in expected.items():
                torch.testing.assert_close(collectives.reduce(mine, reduction), value)
            torch.testing.assert_close(collectives.reduce(mine, "sum", scale=0.5), every.sum(0) * 0.5)
            torch.testing.assert_close(collectives.reduce(mine), every.mean(0))
            assert torch.equal(mine, kept)
        tree = Pair({"x": data(rank, 2, 3).t()}, [data(rank, 4, dtype=torch.int64), data(rank, 2_000)])
        got = collectives.reduce(tree, "sum")
        assert type(got) is Pair
        torch.testing.assert_close(got.a["x"], sum(data(r, 2, 3).t() for r in range(ranks)))
        assert torch.equal(got.b[0], sum(data(r, 4, dtype=torch.int64) for r in range(ranks)))
        torch.testing.assert_close(got.b[1], sum(data(r, 2_000) for r in range(ranks)))

    worlds.run(body, 3)


@pytest.mark.parametrize("mode", MODES)
def test_reduce_dtypes(mode):
    def body():
        rank, ranks = start(mode)
        for size in (3, 5000):
            for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
                every = torch.stack([data(r, size, dtype=dtype).float() for r in range(ranks)])
                for reduction, value in {
                    "sum": every.sum(0),
                    "mean": every.mean(0),
                    "max": every.amax(0),
                }.items():
                    assert same(collectives.reduce(data(rank, size, dtype=dtype), reduction), value.to(dtype))
            for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
                every = torch.stack([data(r, size, dtype=dtype) for r in range(ranks)])
                for reduction in ("sum", "max", "min"):
                    method = {"sum": "sum", "max": "amax", "min": "amin"}[reduction]
                    value = getattr(every, method)(0).to(dtype)
                    assert same(collectives.reduce(data(rank, size, dtype=dtype), reduction), value), dtype
            flags = torch.stack([data(r, size) > 0 for r in range(ranks)])
            assert same(collectives.reduce(data(rank, size) > 0, "max"), flags.any(0))
            assert same(collectives.reduce(data(rank, size) > 0, "min"), flags.all(0))
            complex_sum = sum(data(r, size, dtype=torch.complex64) for r in range(ranks))
            torch.testing.assert_close(
                collectives.reduce(data(rank, size, dtype=torch.complex64), "sum"), complex_sum
            )
        large = torch.full((4,), 60_000.0, dtype=torch.float16)
        assert collectives.reduce(large, "mean").tolist() == [60_000.0] * 4  # the sum does not fit float16

    worlds.run(body, 2)


def wrong_reductions() -> list[tuple[str, str]]:
    return [
        errors_of(collectives.reduce, torch.zeros(2), "median"),
        errors_of(collectives.reduce, torch.zeros(2, dtype=torch.int32), "mean"),
        errors_of(collectives.reduce, torch.zeros(2, dtype=torch.bool), "sum"),
        errors_of(collectives.reduce, torch.zeros(2, dtype=torch.complex64), "max"),
        errors_of(collectives.reduce, torch.zeros(2, dtype=torch.int64), "sum", 0.5),
        errors_of(collectives.reduce, ["s"], "sum"),
    ]


def test_reduce_refuses_what_has_no_meaning():
    def body():
        start()
        wrong = wrong_reductions()
        assert torch.equal(collectives.reduce(torch.ones(1), "sum"), torch.full((1,), 2.0))
        return wrong

    for found in [*worlds.run(body, 2), wrong_reductions()]:
        assert [name for name, _ in found] == ["ConfigError"] * 5 + ["TypeError"]
        assert "mean, sum, max, min" in found[0][1]
        assert "int32" in found[1][1]
        assert "bool" in found[2][1]
        assert "complex64" in found[3][1]
        assert "0.5" in found[4][1]
    assert issubclass(ConfigError, ValueError)


def test_t26_scale_is_honoured_everywhere():
    tensor = torch.tensor([1.0, 2.0])

    def body():
        start()
        return [
            collectives.reduce(tensor, reduction, scale=3.0).tolist() for reduction in ("sum", "mean", "max")
        ]

    for got in worlds.run(body, 2):
        assert got == [[6.0, 12.0], [3.0, 6.0], [3.0, 6.0]]
    assert collectives.reduce(tensor, "sum", scale=3.0).tolist() == [3.0, 6.0]
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_is_in_place(mode):
    def body():
        rank, ranks = start(mode)
        for source in range(ranks):
            for dtype in DTYPES:
                mine = data(rank, 3, dtype=dtype)
                got = collectives.broadcast([mine], from_process=source)
                assert got[0] is mine
                assert same(mine, data(source, 3, dtype=dtype)), dtype
            scalar, big = data(rank), data(rank, 400_000)
            turned = data(rank, 3, 4).t()
            big_turned = data(rank, 600, 600).t()
            parameter = torch.nn.Parameter(data(rank, 2_000))
            tree = {"s": scalar, "b": (big, turned), "p": parameter, "t": big_turned, "e": data(rank, 0)}
            collectives.broadcast(tree, from_process=source)
            assert same(scalar, data(source))
            assert same(big, data(source, 400_000))
            assert same(turned, data(source, 3, 4).t())
            assert same(big_turned, data(source, 600, 600).t())
            assert torch.equal(parameter.detach(), data(source, 2_000))
        assert errors_of(collectives.broadcast, torch.zeros(1), 9)[0] == "ConfigError"

    worlds.run(body, 2)


def test_objects():
    def body():
        rank, ranks = start()
        assert collectives.gather_object([rank, {"r": rank}]) == [0, {"r": 0}, 1, {"r": 1}, 2, {"r": 2}]
        assert collectives.gather_object([]) == []
        uneven = collectives.gather_object(["x" * 10_000 * rank] * rank)
        assert uneven == ["x" * 10_000] + ["x" * 20_000] * 2
        for source in range(ranks):
            items = [rank, "a" * rank, None]
            got = collectives.broadcast_object_list(items, from_process=source)
            assert got is items
            assert items == [source, "a" * source, None]
            long = ["b" * 50_000 if rank == source else "", rank]
            collectives.broadcast_object_list(long, from_process=source)
            assert long == ["b" * 50_000, source]
        return [
            errors_of(collectives.gather_object, "word" if rank == 1 else ["word"]),
            errors_of(collectives.gather_object, [lambda: 0] if rank == 2 else []),
            errors_of(collectives.broadcast_object_list, [lambda: 0], 0),
            errors_of(collectives.broadcast_object_list, [1] * (rank + 1)),
            errors_of(collectives.broadcast_object_list, (1,)),
        ]

    found = worlds.run(body, 3)
    mismatch = "CollectiveMismatchError"
    assert [row[0][0] for row in found] == [mismatch, "TypeError", mismatch]
    assert "rank 1: gather_object" in found[0][0][1]
    assert "str" in found[0][0][1]
    assert [row[1][0] for row in found] == [mismatch, mismatch, "TypeError"]
    assert [row[2][0] for row in found] == ["TypeError", mismatch, mismatch]
    assert [row[3][0] for row in found] == [mismatch] * 3
    assert "2 objects" in found[0][3][1]
    assert [row[4][0] for row in found] == ["TypeError"] * 3


@pytest.mark.parametrize("world", [1, 2])
def test_padding_refuses_what_is_no_tensor_on_any_number_of_ranks(world):
    def body():
        start()
        return errors_of(collectives.pad_across_processes, {"x": torch.zeros(2), "name": "a"})

    for name, text in worlds.run(body, world):
        assert name == "TypeError"
        assert "found str at ['name']. gather_object and broadcast_object_list send other objects" in text


def test_pad_across_processes():
    def body():
        rank, _ = start()
        rows = [2, 5, 3][rank]
        x = data(rank, rows, 4)
        got = collectives.pad_across_processes(
            {"x": x, "s": data(rank), "b": [data(rank, rows) > 0]}, pad_index=1
        )
        assert got["x"].shape == (5, 4)
        assert torch.equal(got["x"][:rows], x)
        assert (got["x"][rows:] == 1).all()
        assert got["s"].shape == ()
        assert got["b"][0].shape == (5,)
        assert got["b"][0][rows:].all()
        first = collectives.pad_across_processes(x.t().contiguous(), dim=-1, pad_index=-7, pad_first=True)
        assert first.shape == (4, 5)
        assert torch.equal(first[:, 5 - rows :], x.t())
        assert (first[:, : 5 - rows] == -7).all()
        assert collectives.pad_across_processes(x, dim=2) is x
        assert collectives.pad_across_processes(x, dim=1) is x
        assert collectives.pad_across_processes(()) == ()
        for dtype in DTYPES:
            padded = collectives.pad_across_processes(data(rank, rows, dtype=dtype))
            assert padded.shape == (5,)
            assert same(padded[:rows], data(rank, rows, dtype=dtype))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nested = torch.nested.nested_tensor([torch.zeros(rank + 1), torch.zeros(2)])
            assert collectives.pad_across_processes(nested) is nested
        assert collectives.CannotPadNestedTensorWarning in [w.category for w in caught]
        return errors_of(collectives.pad_across_processes, torch.zeros([1] * (rank + 1)))

    for name, text in worlds.run(body, 3):
        assert name == "CollectiveMismatchError"
        assert "rank 2: pad_across_processes" in text
        assert "float32[1, 1, 1]" in text


def test_copy_tensor_to_devices():
    def body():
        rank, _ = start()
        for dtype in DTYPES:
            got = collectives.copy_tensor_to_devices(data(1, 3, 2, dtype=dtype) if rank == 1 else None)
            assert same(got, data(1, 3, 2, dtype=dtype))
        assert same(
            collectives.copy_tensor_to_devices(data(0, 2, 3).t() if rank == 0 else None), data(0, 2, 3).t()
        )
        assert same(collectives.copy_tensor_to_devices(data(0, 0) if rank == 0 else None), data(0, 0))
        return [
            errors_of(collectives.copy_tensor_to_devices),
            errors_of(collectives.copy_tensor_to_devices, torch.zeros(1)),
        ]

    for none, both in worlds.run(body, 2):
        assert none[0] == both[0] == "CollectiveMismatchError"
        assert "none passed one" in none[1]
        assert "[0, 1]" in both[1]


def test_groups():
    def body():
        import torch.distributed as dist

        rank, _ = start()
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        group, members = (odd, [1, 3]) if rank % 2 else (even, [0, 2])
        assert same(collectives.gather(data(rank, 2), group=group), torch.cat([data(r, 2) for r in members]))
        assert collectives.gather_object([rank], group=group) == members
        torch.testing.assert_close(
            collectives.reduce(data(rank, 2), "sum", group=group), sum(data(r, 2) for r in members)
        )
        mine = [data(rank, 2), data(rank, 300_000)]
        collectives.broadcast(mine, from_process=members[1], group=group)
        assert same(mine[0], data(members[1], 2))
        assert same(mine[1], data(members[1], 300_000))
        assert "ranks of this group are" in errors_of(collectives.broadcast, mine, rank ^ 1, group=group)[1]
        alone = [dist.new_group([r]) for r in range(4)]
        assert collectives.gather(mine, group=alone[rank]) is mine
        assert errors_of(collectives.gather, mine, group=alone[rank ^ 1])[0] == "ConfigError"
        assert same(collectives.gather(data(rank, 1)), torch.cat([data(r, 1) for r in range(4)]))

    worlds.run(body, 4)


def test_one_process_sends_nothing():
    x = torch.arange(3.0)
    tree = {"x": x}
    assert collectives.gather(tree) is tree
    assert collectives.gather(tree, ragged=True) is tree
    assert collectives.broadcast(tree) is tree
    assert collectives.pad_across_processes(tree) is tree
    objects = ["a"]
    assert collectives.gather_object(objects) is objects
    assert collectives.broadcast_object_list(objects) is objects
    reduced = collectives.reduce(tree, "sum")
    assert torch.equal(reduced["x"], x)
    assert reduced["x"].data_ptr() != x.data_ptr()
    assert torch.equal(collectives.copy_tensor_to_devices(x), x)
    with pytest.raises(ConfigError, match="the only rank"):
        collectives.copy_tensor_to_devices()
    with pytest.raises(ConfigError, match="sometimes"):
        collectives.set_collective_checks("sometimes")


def _views(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that are parts of other ones, whose strides are not those of their shapes."""
    values = torch.arange(24.0, dtype=torch.float64) + 100 * rank
    return {
        "column of one row": values[:6].view(1, 6)[:, 0],
        "one column of one row": values[:6].view(1, 6)[:, :1],
        "column of rows": values[:12].view(2, 6)[:, 1],
        "column of no rows": values.new_empty(0, 6)[:, 0],
        "expanded": values[:3].view(1, 3).expand(4, 3),
        "channels last": values.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "transposed": values.view(4, 6).t(),
        "steps": values[::5],
        "negative": torch.complex(values, values).conj().imag,
    }


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_views_of_any_strides(mode):
    def body():
        collectives.set_collective_checks(mode)
        rank = PartialState().process_index
        views = _views(rank)
        gathered = collectives.gather(views)
        ragged = collectives.gather(
            {name: view[: view.shape[0] - rank] for name, view in views.items()}, ragged=True
        )
        summed = collectives.reduce(views, "sum")
        padded = collectives.pad_across_processes(views)
        own = {name: view for name, view in _views(rank).items() if name != "expanded"}
        sent = collectives.broadcast(own)
        copies = {
            name: collectives.copy_tensor_to_devices(view if rank == 1 else None)
            for name, view in views.items()
        }
        parts = scatter([views] * 2 if rank == 0 else None)
        return gathered, ragged, summed, padded, sent, copies, parts

    views = [_views(rank) for rank in range(2)]
    for gathered, ragged, summed, padded, sent, copies, parts in worlds.run(body, 2):
        for name, (first, second) in {name: (views[0][name], views[1][name]) for name in views[0]}.items():
            assert torch.equal(gathered[name], torch.cat([first, second])), name
            assert torch.equal(ragged[name], torch.cat([first, second[: max(0, second.shape[0] - 1)]])), name
            assert torch.equal(summed[name], first + second), name
            assert padded[name].shape == first.shape
            assert torch.equal(copies[name], second), name
            assert torch.equal(parts[name], first), name
            assert name == "expanded" or torch.equal(sent[name], first), name


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_broadcast_does_not_write_into_elements_that_share_memory(size):
    def body():
        with pytest.raises((TypeError, CollectiveMismatchError), match=r"share memory.*strides \[0, 1\]"):
            collectives.broadcast(torch.ones(1, size).expand(4, size))
        return collectives.gather(torch.tensor([PartialState().process_index])).tolist()

    assert worlds.run(body, 2) == [[0, 1]] * 2


def test_one_process_says_that_nested_tensors_are_not_padded():
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.warns(collectives.CannotPadNestedTensorWarning):
        assert collectives.pad_across_processes([nested])[0] is nested
