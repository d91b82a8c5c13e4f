"""What a collective costs with its checks, without them, and in plain torch.

Everything runs in one world of gloo ranks, in turn, round after round: medians of a call in µs with the spread
between rounds in brackets, on the clock and of the processor (all threads, mean of the ranks). Accelerate takes part
where it is installed. Results are checked to be equal.

    hatch run bench:collectives
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import flags, installed, median_ratio, spread, table

from testkit import worlds

Call = Callable[[], Any]
Times = dict[str, dict[str, list[float]]]
"""Case → contender → one value per round."""
CONTENDERS = ("checks on", "checks off", "plain torch", "accelerate")


def plain_gather(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def plain_mean(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result / dist.get_world_size()


def plain_broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, 0)
    return tensor


def plain_objects(items: list[Any]) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def cases() -> dict[str, tuple[Any, str]]:
    """Name → (input, operation)."""
    tree = {f"leaf {index}": torch.randn(4, 3) for index in range(8)}
    return {
        "gather 8 floats": (torch.randn(8), "gather"),
        "gather dict of 8 tensors": (tree, "gather"),
        "gather 64 KiB": (torch.randn(16_384), "gather"),
        "gather 4 MiB": (torch.randn(1 << 20), "gather"),
        "reduce 1 float": (torch.randn(1), "reduce"),
        "reduce 64 floats": (torch.randn(64), "reduce"),
        "reduce 4 MiB": (torch.randn(1 << 20), "reduce"),
        "broadcast 8 floats": (torch.randn(8), "broadcast"),
        "gather_object": ([{"loss": 0.5, "name": "a"}], "gather_object"),
        "wait_for_everyone": (None, "wait_for_everyone"),
    }


def plain(operation: str, value: Any) -> Call:
    if operation == "wait_for_everyone":
        return dist.barrier
    if isinstance(value, dict):
        return lambda: {key: plain_gather(leaf) for key, leaf in value.items()}
    function = {
        "gather": plain_gather, "reduce": plain_mean, "broadcast": plain_broadcast, "gather_object": plain_objects,
    }[operation]  # fmt: skip
    return lambda: function(value)


def calls(operation: str, value: Any) -> dict[str, tuple[str | None, Call]]:
    """Contender → (mode of our checks, the call)."""
    import accel_state

    def of(module: Any) -> Call:
        function = getattr(module, operation)
        return function if value is None else lambda: function(value)

    result: dict[str, tuple[str | None, Call]] = {
        "checks on": ("on", of(accel_state)),
        "checks off": ("off", of(accel_state)),
        "plain torch": (None, plain(operation, value)),
    }
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate.utils

        accelerate.PartialState(cpu=True)

        result["accelerate"] = (None, of(accelerate.utils))
    return result


def measure(rounds: int, repetitions: int) -> tuple[dict[str, Times], float]:
    """On every rank: µs per call on the clock and of the processor, by case and contender, one value per round; and ns
    of the watch per collective.
    """
    import accel_state

    state = accel_state.PartialState()
    torch.manual_seed(state.process_index)
    times: dict[str, Times] = {"on the clock": {}, "of the processor": {}}
    table = {name: calls(operation, value) for name, (value, operation) in cases().items()}
    for turn in range(rounds + 1):
        for name, contenders in table.items():
            count = max(5, repetitions // 10) if "MiB" in name else repetitions
            results = []
            for contender, (mode, call) in contenders.items():
                if mode is not None:
                    accel_state.set_collective_checks(mode)
                results.append(call())
                dist.barrier()
                began, busy = time.perf_counter(), time.process_time()
                for _ in range(count):
                    call()
                spent = torch.tensor([time.perf_counter() - began, time.process_time() - busy])
                dist.all_reduce(spent)
                if turn:
                    per_call = (spent / state.num_processes / count * 1e6).tolist()
                    for clock, value in zip(times.values(), per_call, strict=True):
                        clock.setdefault(name, {}).setdefault(contender, []).append(value)
            _require_equal(name, results)
    return times, _place_cost(state.channel())


def _require_equal(name: str, results: list[Any]) -> None:
    first = results[0]
    for other in results[1:]:
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(other, first, msg=lambda text: f"{name}: {text}")
        elif isinstance(first, dict):
            for key in first:
                torch.testing.assert_close(other[key], first[key])
        elif other != first:
            raise AssertionError(f"{name}: {other!r} is not {first!r}")


def _place_cost(channel: Any) -> float:
    """ns to say where this rank is, which is all that a collective does for the watch."""
    rounds = 20_000
    began = time.perf_counter()
    for _ in range(rounds):
        with channel.operation("gather"):
            pass
    return (time.perf_counter() - began) / rounds * 1e9


def show(times: Times, title: str) -> None:
    present = [name for name in CONTENDERS if name in next(iter(times.values()))]
    over = [name for name in ("checks off", "accelerate") if name in present]
    rows = [
        [case, *(spread(row[n], ".0f") for n in present)]
        + [f"{median_ratio(row['checks on'], row[name]):.2f}" for name in over]
        for case, row in times.items()
    ]
    table(["case", *present, *(f"on / {name}" for name in over)], rows, title)


def main() -> None:
    given = flags(__doc__, ranks=2, rounds=9, repetitions=100)
    times, place = worlds.run(measure, given.ranks, given.rounds, given.repetitions, timeout=600)[0]
    installed(["accelerate"])
    for clock, found in times.items():
        show(
            found,
            f"{given.ranks} gloo ranks, µs {clock} per call, median of {given.rounds} rounds [least-most]",
        )
    print(f"\nThe watch: {place:.0f} ns per collective.")


if __name__ == "__main__":
    main()
