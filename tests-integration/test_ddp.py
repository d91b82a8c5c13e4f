"""Two and more ranks: what only shows when gradients are reduced."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def inputs(size: int) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradient(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


def uneven(joined: bool) -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs(5)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert loader.batch_sampler.even_batches
    return batches, [p.detach().flatten().tolist() for p in model.parameters()]


def test_t28_uneven_inputs_can_be_joined_on_the_cpu() -> None:
    (first, weights), (second, others) = worlds.run(uneven, 2, True)
    assert (first, second) == (3, 2)
    assert weights == others
    # DDP divides by the initial number of ranks; a rank without data counts as zero gradient.
    model, x = make(), inputs(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in ([0, 1], [2, 3], [4]):
        optimizer.zero_grad()
        (model(x[group]).sum() / 2).backward()
        optimizer.step()
    expected = [p.detach().flatten().tolist() for p in model.parameters()]
    assert weights == [pytest.approx(item, rel=1e-12) for item in expected]


def uneven_windows(size: int, steps: int) -> list[float]:
    from accel_train import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs(size)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(("ranks", "size", "steps"), [(2, 7, 2), (2, 9, 3), (3, 7, 2), (3, 13, 4)])
def test_t28_windows_end_where_a_rank_runs_out(ranks: int, size: int, steps: int) -> None:
    model, x = make(), inputs(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds = [list(range(start, min(start + ranks, size))) for start in range(0, size, ranks)]
    full = size // ranks
    windows = [rounds[start : min(start + steps, full)] for start in range(0, full, steps)]
    if size % ranks:
        windows.append(rounds[full:])
    for window in windows:
        optimizer.zero_grad()
        (model(x[[row for part in window for row in part]]).sum() / (len(window) * ranks)).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    for ours in worlds.run(uneven_windows, ranks, size, steps):
        assert ours == pytest.approx(expected, rel=1e-12)


def unknown_ends() -> None:
    from accel_train import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(pre_sharded=True, dispatch_batches=False)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)

    class Own(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(inputs(3 + accelerator.process_index))

    model, loader = accelerator.prepare(make(), DataLoader(Own(), batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())


def test_t28_windows_are_refused_where_other_ranks_ends_are_unknown() -> None:
    with pytest.raises(worlds.RankError, match=r"AccumulationError.*gradient_accumulation_steps=1"):
        worlds.run(unknown_ends, 2)


def joined_items() -> None:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(make())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        accelerator.backward(model(inputs(1)).sum(), num_items=1)


def test_items_cannot_be_counted_while_a_rank_may_be_out_of_data() -> None:
    with pytest.raises(worlds.RankError, match=r"AccumulationError.*join_uneven_inputs"):
        worlds.run(joined_items, 2)


def triggered() -> list[bool]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_on_one_rank_is_seen_once_by_all() -> None:
    assert worlds.run(triggered, 3) == [[True, False]] * 3


def late_sync() -> list[float]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(make())
    x = inputs(4)[2 * accelerator.process_index : 2 * accelerator.process_index + 2]
    with accelerator.no_sync(model):
        losses = [model(row).sum() for row in x]
    with accelerator.no_sync(model):
        accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    return gradient(model)


def test_sync_can_be_triggered_in_backward() -> None:
    model = make()
    (model(inputs(4)).sum() / 2).backward()
    for ours in worlds.run(late_sync, 2):
        assert ours == pytest.approx(gradient(model), rel=1e-12)


def hooked(hook: str) -> list[float]:
    from accel_train import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(comm_hook=hook, bucket_cap_mb=1)
    accelerator = Accelerator(kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(3, 1))
    x = inputs(4).float()[2 * accelerator.process_index : 2 * accelerator.process_index + 2]
    accelerator.backward(model(x).mean())
    return gradient(model)


@pytest.mark.parametrize("hook", ["no", "fp16", "power_sgd"])
def test_communication_hooks_average_gradients(hook: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model(inputs(4).float()).mean().backward()
    for ours in worlds.run(hooked, 2, hook):
        assert ours == pytest.approx(gradient(model), rel=2e-3, abs=1e-3)


def frozen_and_options() -> Any:
    from accel_train import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)]
    )
    frozen = make().requires_grad_(False)
    trained = make()
    evaluated = make()
    a, b = accelerator.prepare(frozen, trained)
    c = accelerator.prepare_model(evaluated, evaluation_mode=True)
    again = accelerator.prepare(b)
    return (
        a is frozen,
        type(b).__name__,
        b.find_unused_parameters,
        b.gradient_as_bucket_view,
        c is evaluated,
        again is b,
        accelerator.unwrap_model(b) is trained,
        list(accelerator.get_state_dict(b)),
    )


def test_what_is_wrapped() -> None:
    expected = (True, "DistributedDataParallel", True, True, True, True, True, ["weight", "bias"])
    assert worlds.run(frozen_and_options, 2) == [expected] * 2


def unfrozen(part: bool, again: bool) -> Any:
    """The first layer, or everything, is frozen when the model is prepared and trained later."""
    from accel_train import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    (model[0] if part else model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = inputs(4)[2 * accelerator.process_index :][:2].to(accelerator.device)
    with torch.no_grad():
        model(rows)
    if part:
        accelerator.backward(model(rows).mean())
        optimizer.zero_grad()
    accelerator.unwrap_model(model).requires_grad_(True)
    with torch.no_grad():
        model(rows)
    if again:
        model = accelerator.prepare(model)
        assert accelerator.prepare(model) is model
        assert len(accelerator._models) == 1
    accelerator.backward(model(rows).mean())
    return gradient(model)


@pytest.mark.parametrize("part", [True, False])
def test_parameters_unfrozen_after_prepare_do_not_let_ranks_drift_apart(part: bool) -> None:
    with pytest.raises(
        worlds.RankError, match=r"PrepareError: Parameter '0.weight' was frozen.*prepare\(model\)"
    ):
        worlds.run(unfrozen, 2, part, False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    model(inputs(4)).mean().backward()
    for ours in worlds.run(unfrozen, 2, part, True):
        assert ours == pytest.approx(gradient(model), rel=1e-12)


def static_graph(form: str) -> list[float]:
    from accel_train import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=2 if form == "accumulate" else 1, kwargs_handlers=[handler]
    )
    model = accelerator.prepare(make())
    x = inputs(4)[2 * accelerator.process_index :][:2]
    if form == "accumulate":
        for row in x.split(1):
            with accelerator.accumulate(model):
                accelerator.backward(model(row).sum())
    else:
        with accelerator.no_sync(model):
            accelerator.backward(model(x[:1]).sum() / 2)
        accelerator.backward(model(x[1:]).sum() / 2)
    return gradient(model)


@pytest.mark.parametrize("form", ["accumulate", "by hand"])
def test_a_static_graph_accumulates(form: str) -> None:
    model = make()
    model(inputs(4)).mean().backward()
    for ours in worlds.run(static_graph, 2, form):
        assert ours == pytest.approx(gradient(model), rel=1e-12)


def unwrapped_while_training() -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator(dynamo_backend="eager", gradient_accumulation_steps=2)
    model = accelerator.prepare(make())
    unwrapped = accelerator.unwrap_model(model)
    rows = inputs(4)[2 * accelerator.process_index :][:2].to(accelerator.device)
    with accelerator.accumulate(model):
        accelerator.backward(model(rows[:1]).sum())
    local = gradient(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(rows[1:]).sum())
    return (
        type(model.module).__name__,
        unwrapped(rows).shape,
        list(unwrapped._orig_mod.state_dict()),
        local,
        gradient(model),
    )


def test_unwrapping_a_compiled_model_leaves_the_prepared_one_as_it_is() -> None:
    reference = make()
    reference(inputs(4)).mean().backward()
    results = worlds.run(unwrapped_while_training, 2)
    for kind, shape, names, _, complete in results:
        assert (kind, tuple(shape), names) == ("Linear", (2, 1), ["weight", "bias"])
        assert complete == pytest.approx(gradient(reference), rel=1e-9)
    assert results[0][3] != results[1][3]  # nothing was exchanged before the end of the window


def plateau() -> list[float]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for value in [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]:
        scheduler.step(value)
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_metric_counts_as_one_evaluation_on_any_number_of_ranks() -> None:
    optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    expected = []
    for value in [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]:
        scheduler.step(value)
        expected.append(scheduler.get_last_lr()[0])
    assert worlds.run(plateau, 2) == [expected] * 2


def own_metrics(by_name: bool) -> list[float]:
    """Each rank measures another loss: that of one falls, that of the other rises."""
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for mine in [(1.0, 1.0), (0.5, 1.25), (0.25, 2.0), (0.125, 2.0)]:
        metric = mine[accelerator.process_index]
        scheduler.step(metrics=torch.tensor(metric)) if by_name else scheduler.step(metric)
        rates.append(scheduler.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("by_name", [False, True])
def test_ranks_choose_their_rates_by_the_mean_of_their_metrics(by_name: bool) -> None:
    optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    expected = []
    for value in [1.0, 0.875, 1.125, 1.0625]:
        scheduler.step(value)
        expected.append(scheduler.get_last_lr()[0])
    assert worlds.run(own_metrics, 2, by_name) == [expected] * 2


def two_accelerators() -> Any:
    """A GAN with an accelerator for each network, trained in turn, each with windows of its own."""
    from accel_train import Accelerator

    first = Accelerator(gradient_accumulation_steps=2)
    second = Accelerator(gradient_accumulation_steps=3)
    a, b = first.prepare(make()), second.prepare(make())
    flags = []
    for number in range(6):
        x = inputs(12)[number * 2 + first.process_index :][:1]
        with first.accumulate(a):
            first.backward(a(x).sum())
        with second.accumulate(b):
            second.backward(b(x).sum())
        flags.append((first.sync_gradients, second.sync_gradients))
    return flags, gradient(b)


def test_two_accelerators_reduce_independently() -> None:
    results = worlds.run(two_accelerators, 2)
    flags = [(False, False), (True, False), (False, True)] * 2
    flags = [(bool(i % 2), i % 3 == 2) for i in range(6)]
    assert [result[0] for result in results] == [flags] * 2
    assert results[0][1] == results[1][1]


def metrics_ragged(size: int, batch_size: int, kind: str) -> list[int]:
    """Every kind of loader an evaluation meets."""
    from accel_train import Accelerator, DataLoaderConfiguration

    options: dict[str, Any] = {}
    if kind == "dispatch":
        options["dispatch_batches"] = True
    if kind == "split":
        options["split_batches"] = True
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader_options: dict[str, Any] = {"batch_size": batch_size}
    dataset: Any = TensorDataset(torch.arange(size))
    if kind == "subset":
        loader_options["sampler"] = torch.utils.data.SubsetRandomSampler(range(0, size, 2))
    if kind == "varying":

        class Varying:
            def __iter__(self) -> Any:
                start = 0
                for length in [1, 3, 2, 4] * size:
                    if start >= size:
                        return
                    yield list(range(start, min(start + length, size)))
                    start += length

        loader_options = {"batch_sampler": Varying()}
    if kind in ("iterable", "iterable dispatch"):

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self) -> Any:
                return ((torch.tensor(i),) for i in range(size))

        dataset = Stream()
        accelerator.dataloader_config.dispatch_batches = kind == "iterable dispatch"
    loader = accelerator.prepare(DataLoader(dataset, **loader_options))
    seen: list[int] = []
    for (x,) in loader:
        seen += accelerator.gather_for_metrics(x).tolist()
    return sorted(seen)


KINDS = ["map", "split", "dispatch", "subset", "varying", "iterable", "iterable dispatch"]


@pytest.mark.wide(only=["10-*"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 10, 23])
def test_t3_metrics_see_each_sample_of_the_sampler_once(ranks: int, kind: str, size: int) -> None:
    batch_size = ranks * 2 if kind == "split" else 3
    expected = list(range(0, size, 2)) if kind == "subset" else list(range(size))
    assert worlds.run(metrics_ragged, ranks, size, batch_size, kind) == [expected] * ranks


def metrics_of_uneven_ranks() -> str:
    from accel_state.errors import CollectiveMismatchError
    from accel_train import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    try:
        for (x,) in loader:
            accelerator.gather_for_metrics(x)
    except CollectiveMismatchError as error:
        return str(error)
    accelerator.end_training()
    return "done"


def test_gathering_from_a_rank_without_a_batch_is_an_error_not_a_hang() -> None:
    began = time.monotonic()
    message, done = worlds.run(metrics_of_uneven_ranks, 2)
    assert done == "done"
    assert "rank 1" in message
    assert time.monotonic() - began < 20


def metrics_of_objects(size: int) -> list[str]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(size)), batch_size=4))
    seen: list[str] = []
    for (x,) in loader:
        seen += accelerator.gather_for_metrics([f"sample {i}" for i in x.tolist()])
    return seen


def test_t3_objects_are_gathered_once_per_sample() -> None:
    assert worlds.run(metrics_of_objects, 2, 9) == [[f"sample {i}" for i in range(9)]] * 2


def metrics_with_wrong_rows() -> str:
    from accel_train import Accelerator, MetricsShapeError

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    for (x,) in loader:
        try:
            accelerator.gather_for_metrics(x.repeat_interleave(2))
        except MetricsShapeError as error:
            return str(error)
    return "accepted"


def test_t3_values_without_one_row_per_sample_are_refused_at_once() -> None:
    for message in worlds.run(metrics_with_wrong_rows, 2):
        assert "shape (8,)" in message
        assert "4 rows" in message


def metrics_of_scalars() -> list[float]:
    from accel_train import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10).float()), batch_size=4))
    return [accelerator.gather_for_metrics(x.mean()).numel() for (x,) in loader]


def test_scalars_are_gathered_one_per_rank() -> None:
    assert worlds.run(metrics_of_scalars, 2) == [[2, 2]] * 2


def metrics_in_turn(named: bool) -> Any:
    from accel_train import Accelerator, AmbiguousLoaderError

    accelerator = Accelerator()
    a, b = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(10)), batch_size=4),
        DataLoader(TensorDataset(torch.arange(100, 110)), batch_size=4),
    )
    seen: list[int] = []
    try:
        for (x,), (y,) in zip(a, b, strict=True):
            seen += accelerator.gather_for_metrics(x, dataloader=a if named else None).tolist()
            accelerator.gather_for_metrics(y, dataloader=b)
    except AmbiguousLoaderError as error:
        return str(error)
    return seen


def test_loaders_in_turn_must_be_told_apart_for_metrics() -> None:
    assert worlds.run(metrics_in_turn, 2, True) == [list(range(10))] * 2
    for message in worlds.run(metrics_in_turn, 2, False):
        assert "dataloader=eval_loader" in message


def gathered_ops() -> Any:
    from accel_train import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    value = torch.tensor([float(rank + 1)])
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        mine = list(part)
    return (
        accelerator.gather(value).tolist(),
        accelerator.reduce(value).tolist(),
        accelerator.reduce(value, "mean", scale=2.0).tolist(),
        accelerator.pad_across_processes(torch.ones(rank + 1)).tolist(),
        mine,
    )


def test_collectives_of_the_facade() -> None:
    first, second = worlds.run(gathered_ops, 2)
    assert first == ([1.0, 2.0], [3.0], [3.0], [1.0, 0.0], ["a", "b"])
    assert second == ([1.0, 2.0], [3.0], [3.0], [1.0, 1.0], ["c"])


# Resuming


def steps_of(folder: Any, keeps_buckets: bool, load: bool) -> torch.Tensor:
    """The weights after three steps, of which the last two come after a save or a load."""
    from accel_train import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(find_unused_parameters=keeps_buckets)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if load:
        accelerator.load_state(folder)
    for step in range(1 if load else 0, 3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            accelerator.save_state(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("keeps_buckets", [True, False])
def test_three_ranks_resume_exactly_if_buckets_stay(tmp_path: Any, keeps_buckets: bool) -> None:
    """Else to rounding: PyTorch forms other buckets after the first backward, and sums depend on them."""
    wanted = worlds.run(steps_of, 3, tmp_path, keeps_buckets, False)[0]
    for found in worlds.run(steps_of, 3, tmp_path, keeps_buckets, True):
        if keeps_buckets:
            assert torch.equal(found, wanted)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
