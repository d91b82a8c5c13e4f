"""The first message of every collective: values bit for bit, one message per call, mismatches in groups of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state.communication import blocks as blocks_module
from accel_state.communication.blocks import Blocks
from accel_state.communication.torch_collectives import counters
from accel_state.errors import CollectiveMismatchError
from accel_state.operations import collectives
from accel_state.world.process import PartialState
from testkit import worlds

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist()


def noise(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, and so NaN of every kind among the numbers."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(100 + rank)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def variants(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    plain = noise(rank, dtype, 4, 6)
    return {
        "plain": plain,
        "turned": plain.t(),
        "every other row": plain[::2],
        "one column": plain[:, 1:2],
        "one element": plain[:1, 0],
        "no dimension": plain[2, 3],
        "empty": plain[:0],
        "no columns": plain[:, :0],
        "shared": plain[:1].expand(3, 6),
    }


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_bits_of_every_dtype_and_layout_arrive(ranks: int) -> None:
    def body() -> None:
        state = PartialState()
        rank, ranks = state.process_index, state.num_processes
        for dtype in DTYPES if ranks < 9 else (torch.bool, torch.bfloat16, torch.int64):
            everyone = [variants(other, dtype) for other in range(ranks)]
            mine = everyone[rank]
            together: dict[str, torch.Tensor] = collectives.gather(mine)
            for name, leaf in mine.items():
                whole = collectives.gather(leaf)
                right = torch.cat(
                    [one[name].reshape(1) if one[name].dim() == 0 else one[name] for one in everyone]
                )
                for found in (whole, together[name]):
                    assert found.shape == right.shape, (dtype, name)
                    assert found.dtype == dtype
                    assert bits(found) == bits(right), (dtype, name)
                writable = leaf.clone()
                collectives.broadcast(writable, ranks - 1)
                assert bits(writable) == bits(everyone[-1][name]), (dtype, name)

    worlds.run(body, ranks)


def test_reductions_are_those_of_torch_bit_for_bit() -> None:
    """With two ranks, where there is one order to add in."""

    def body() -> None:
        rank = PartialState().process_index
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
            for size in (1, 2, 63, 500, 5000):
                mine = torch.randn(size, generator=torch.Generator().manual_seed(rank)).mul(99).to(dtype)
                for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX),
                                        ("min", dist.ReduceOp.MIN)):  # fmt: skip
                    right = mine.clone()
                    dist.all_reduce(right, operation)
                    assert bits(collectives.reduce(mine, name)) == bits(right), (dtype, size, name)
                    if name == "sum" and dtype.is_floating_point:
                        assert bits(collectives.reduce(mine)) == bits(right / 2), (dtype, size)

    worlds.run(body, 2)


def test_numbers_that_are_views_of_their_conjugates_arrive() -> None:
    def body() -> None:
        ranks = PartialState().num_processes
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        assert collectives.gather(numbers.conj()).tolist() == [1 - 2j, 3 + 4j] * ranks
        assert collectives.gather(numbers.conj().imag).tolist() == [-2.0, 4.0] * ranks
        assert collectives.reduce(numbers.conj(), "sum").tolist() == [2 - 4j, 6 + 8j]
        assert collectives.reduce(numbers.to(torch.complex32), "sum").tolist() == [2 + 4j, 6 - 8j]

    worlds.run(body, 2)


def test_results_are_memory_of_their_own_and_have_no_gradient() -> None:
    def body() -> None:
        rank = PartialState().process_index
        for shape in ((), (1,), (2, 2), (0,)):
            mine = torch.full(shape, 1.0 + rank, requires_grad=True)
            results = [collectives.gather(mine), collectives.reduce(mine), collectives.reduce(mine, "max")]
            kept = [result.clone() for result in results]
            assert not any(result.requires_grad for result in results)
            other = torch.full(shape, 50.0)
            collectives.gather(other)
            collectives.reduce(other)
            assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True)), shape
            assert torch.equal(mine, torch.full(shape, 1.0 + rank))

    worlds.run(body, 2)


def test_a_small_call_is_one_message_and_plans_are_few() -> None:
    def body() -> list[int]:
        channel = PartialState().channel()
        assert channel is not None
        tree = {"a": torch.ones(3), "b": [torch.ones(2, dtype=torch.int64), torch.tensor(True)]}

        def messages(call: Any, *args: Any) -> int:
            [counter] = counters(channel.wire)
            before = counter._get_sequence_number_for_group()
            call(*args)
            return counter._get_sequence_number_for_group() - before

        sent = [
            messages(collectives.gather, tree),
            messages(collectives.reduce, torch.ones(100)),
            messages(collectives.broadcast, tree),
            messages(collectives.gather_object, ["a"]),
            messages(PartialState().wait_for_everyone),
            messages(collectives.gather, torch.ones(5000)),
        ]
        for size in range(600):
            collectives.gather(torch.ones(size))
        assert 0 < len(channel.plans) <= 256
        return sent

    assert worlds.run(body, 2) == [[1, 1, 1, 1, 1, 2]] * 2


@pytest.mark.parametrize("ranks", [4, 9])
def test_a_rank_that_calls_something_else_is_named_on_every_rank(ranks: int) -> None:
    def body() -> list[str]:
        state = PartialState()
        odd = state.process_index == state.num_processes - 1
        x = torch.ones(2)
        wrong = [
            (lambda: collectives.reduce(x), lambda: collectives.gather(x)),
            (lambda: collectives.gather(x), lambda: collectives.broadcast(x)),
            (lambda: collectives.reduce(x), lambda: collectives.reduce(x.double())),
            (lambda: collectives.reduce(x), lambda: collectives.reduce(torch.ones(2000))),
            (lambda: collectives.gather(x), state.wait_for_everyone),
            (lambda: collectives.gather_object([1]), lambda: collectives.gather(x)),
        ]
        found = []
        for usual, other in wrong:
            with pytest.raises(CollectiveMismatchError) as caught:
                (other if odd else usual)()
            found.append(str(caught.value))
        assert collectives.reduce(torch.ones(1), "sum").item() == state.num_processes
        return found

    for found in worlds.run(body, ranks):
        for text, names in zip(found, (("reduce", "gather"), ("gather", "broadcast"), ("float32[2]", "float64[2]"),
                                       ("float32[2]", "float32[2000]"), ("gather", "wait_for_everyone"),
                                       ("gather_object", "gather")), strict=True):  # fmt: skip
            [line] = [line for line in text.splitlines() if f"rank {ranks - 1}:" in line]
            assert names[1] in line
            assert names[0] in next(line for line in text.splitlines() if "rank 0:" in line)


def test_tensors_that_do_not_fit_have_no_places() -> None:
    def body() -> None:
        channel = PartialState().channel()
        assert channel is not None
        blocks = Blocks(channel.wire, "gloo")
        room = blocks.capacity
        assert blocks.plan(1, [(torch.uint8, torch.Size([room]))]).fits
        assert not blocks.plan(1, [(torch.uint8, torch.Size([room + 1]))]).fits
        assert not blocks.plan(1, [(torch.uint8, torch.Size([1]))] * (room // 16 + 1)).fits
        assert not blocks.plan(1, [(torch.uint4, torch.Size([1]))]).fits
        assert not blocks.plan(1, None).fits

    worlds.run(body, 2)


def many_ranks(body: Callable[[], Any]) -> Callable[[], Any]:
    """In a small world, what a world of hundreds does."""

    def run() -> Any:
        blocks_module._DIRECT, blocks_module._TOGETHER = 1, 2
        return body()

    return run


def everything() -> list[Any]:
    state = PartialState()
    rank, ranks = state.process_index, state.num_processes
    found: list[Any] = [collectives.gather(torch.tensor([rank, 7])).tolist()]
    found.append(collectives.reduce(torch.tensor([float(rank), 1.0]), "sum").tolist())
    found.append(collectives.reduce({"a": torch.ones(3) * rank}, "mean")["a"].tolist())
    found.append(collectives.broadcast(torch.tensor([rank]), ranks - 1).tolist())
    found.append(collectives.gather_object([rank] * rank))
    found.append(collectives.gather_object(["x" * 5000 * rank]))
    found.append(collectives.gather_object(["x" * 5000, {"of": "all"}]))
    found.append(collectives.gather_object([str(rank) * 5000]))
    found.append(collectives.broadcast_object_list([f"from {rank}"], 1))
    found.append(collectives.broadcast_object_list(["x" * 5000 * rank], 1))
    found.append(collectives.gather(torch.full((rank + 1,), rank), ragged=True).tolist())
    found.append(collectives.pad_across_processes(torch.full((rank + 1,), rank)).shape)
    found.append(collectives.pad_across_processes(torch.full((3,), rank)).shape)
    state.wait_for_everyone()
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_large_group_gets_what_a_small_one_gets(ranks: int) -> None:
    assert worlds.run(many_ranks(everything), ranks) == worlds.run(everything, ranks)


@pytest.mark.parametrize("large", [True, False])
def test_ranks_agree_and_the_first_collects(large: bool) -> None:
    def body() -> Any:
        rank = PartialState().process_index
        marks = [b"same", b"%d" % rank, b"same" if rank else b"other", b""]
        found = [collectives.all_agree(mark) for mark in marks]
        return found, collectives.gather_to_first({"rank": rank, "text": "x" * 3000 * rank})

    results = worlds.run(many_ranks(body) if large else body, 3)
    assert [found for found, _ in results] == [[True, False, False, True]] * 3
    assert results[0][1] == [{"rank": rank, "text": "x" * 3000 * rank} for rank in range(3)]
    assert [found for _, found in results[1:]] == [None, None]


@pytest.mark.parametrize("large", [True, False])
def test_what_cannot_be_pickled_fails_on_all_ranks(large: bool) -> None:
    def body() -> str:
        rank = PartialState().process_index
        try:
            collectives.gather_to_first((lambda: 0) if rank == 1 else 0)
        except (TypeError, CollectiveMismatchError) as error:
            return str(error)
        return ""

    for message in worlds.run(many_ranks(body) if large else body, 3):
        assert "cannot be pickled" in message


@pytest.mark.parametrize("call", ["gather", "barrier", "all_agree"])
def test_ranks_of_a_large_group_that_disagree_all_hear_of_it(call: str) -> None:
    def body() -> str:
        state = PartialState()
        try:
            if state.process_index == 2:
                collectives.gather(torch.zeros(5))
            elif call == "gather":
                collectives.gather(torch.zeros(4))
            elif call == "barrier":
                state.wait_for_everyone()
            else:
                collectives.all_agree(b"")
        except CollectiveMismatchError as error:
            return str(error)
        return ""

    for message in worlds.run(many_ranks(body), 3):
        assert "ranks disagree about collective #1" in message
        assert "gather at" in message


def test_a_rank_of_a_large_group_receives_no_more_than_in_a_small_one() -> None:
    """Headers: the first gets one of each rank, and the others get two bounds."""

    def body() -> list[int]:
        state = PartialState()
        channel = state.channel(None)
        assert channel is not None
        return [channel._blocks.table.nbytes, channel._blocks._bounds.nbytes]

    for rank, (table, bounds) in enumerate(worlds.run(many_ranks(body), 4)):
        assert table == (4 * 32 if rank == 0 else 0)
        assert bounds == 64
