"""The checks of ``accel test``: right engines pass on two ranks, and each check finds a wrong engine."""

from pathlib import Path

import pytest
import torch

from accel_cli.sanity import checks
from accel_cli.sanity.checks import CHECKS, Bench
from accel_train import Accelerator
from testkit import worlds

NAMED = dict(CHECKS)


def checked(folder):
    bench = Bench(Accelerator(cpu=True), Path(folder))
    found = []
    for name, check in CHECKS:
        bench.found = ""
        check(bench)
        found.append((name, bench.found))
    return found


def test_two_right_ranks_pass_all(tmp_path):
    for found in worlds.run(checked, 2, tmp_path):
        told = dict(found)
        assert list(told) == [
            "processes and devices",
            "collectives",
            "data",
            "training",
            "saving and resuming",
        ]
        assert told["processes and devices"] == "2 x cpu, MULTI_CPU, mixed_precision no"
        assert told["data"] == "101 samples, shuffled and not, each read once"
        assert told["training"].startswith("4 steps, losses ")
    assert list((tmp_path / "model").glob("*.safetensors"))


@pytest.fixture
def bench(tmp_path):
    return Bench(Accelerator(cpu=True), tmp_path)


def failure(bench, name):
    with pytest.raises(AssertionError) as caught:
        NAMED[name](bench)
    return str(caught.value)


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("gather", "gather of torch.float32: [1.0, 2.0, 3.0]; expected [0.0, 1.0, 2.0]"),
        ("reduce", "reduce (sum) of torch.float32: [1.0, 2.0, 3.0]; expected [0.0, 1.0, 2.0]"),
        ("broadcast", "broadcast: [1.0, 1.0]; expected [0.0, 0.0]"),
        ("pad_across_processes", "pad_across_processes: [2.0]; expected [1.0]"),
    ],
)
def test_a_wrong_collective_is_named_with_its_values(bench, verb, told, monkeypatch):
    right = getattr(checks, verb)
    monkeypatch.setattr(checks, verb, lambda *args, **kwargs: right(*args, **kwargs) + 1)
    assert failure(bench, "collectives") == told


def test_a_second_process_of_one_number_is_found(bench, monkeypatch):
    monkeypatch.setattr(checks, "gather_object", lambda objects: objects * 2)
    assert failure(bench, "processes and devices") == "process_index of all ranks: [0, 0]; expected [0]"


def test_a_sample_that_is_not_read_is_found(bench, monkeypatch):
    monkeypatch.setattr(bench.accelerator, "gather_for_metrics", lambda batch: batch[:3])
    assert failure(bench, "data").startswith("samples with shuffle=False: [0, 1, 2, 4, 5, 6, 8,")


def test_samples_in_another_order_are_found(bench, monkeypatch):
    monkeypatch.setattr(bench.accelerator, "gather_for_metrics", lambda batch: batch.flip(0))
    assert failure(bench, "data").startswith("order of the samples: [3, 2, 1, 0, 7,")


def test_a_skip_that_skips_nothing_is_found(bench, monkeypatch):
    monkeypatch.setattr(checks, "skip_first_batches", lambda loader, count: loader)
    assert failure(bench, "data") == "samples after a skip with shuffle=False: False; expected True"


def test_gradients_of_another_size_are_found(bench, monkeypatch):
    right = bench.accelerator.backward
    monkeypatch.setattr(bench.accelerator, "backward", lambda loss: right(loss * 1.01))
    told = failure(bench, "training")
    assert told.startswith("gradient norms: [")  # clipping hides it from the losses
    assert "; one process has [" in told
    assert told.endswith("and 2e-05 of the largest is allowed")


@pytest.mark.parametrize("step", range(4))
def test_a_loss_that_is_not_a_number_is_found(bench, step, monkeypatch):
    right, calls = checks.reduce, iter(range(4))

    def spoilt(tensor, **kwargs):
        return right(tensor, **kwargs) * (float("nan") if next(calls) == step else 1)

    monkeypatch.setattr(checks, "reduce", spoilt)
    told = failure(bench, "training")
    assert told.startswith("losses: [")
    assert told.count("nan") == 1


def test_a_norm_that_is_not_told_is_found(bench, monkeypatch):
    right, calls = bench.accelerator.clip_grad_norm_, iter(range(4))

    def silent_once(*args):
        norm = right(*args)
        return None if next(calls) == 2 else norm

    monkeypatch.setattr(bench.accelerator, "clip_grad_norm_", silent_once)
    told = failure(bench, "training")
    assert told.startswith("gradient norms: 3 values, [")
    assert "; one process has 4, [" in told


def test_a_part_of_a_weight_is_found(bench, monkeypatch):
    right = bench.accelerator.get_state_dict
    monkeypatch.setattr(
        bench.accelerator, "get_state_dict", lambda model: right(model) | {"4.weight": torch.ones(8)}
    )
    told = failure(bench, "training")
    assert told.startswith("4.weight: 8 values, [1.0, 1.0,")
    assert "; one process has 16, [" in told


def test_a_weight_that_is_not_there_is_found(bench, monkeypatch):
    right = bench.accelerator.get_state_dict
    monkeypatch.setattr(bench.accelerator, "get_state_dict", lambda model: {"0.bias": right(model)["0.bias"]})
    absent = "['0.weight', '2.weight', '2.bias', '4.weight', '4.bias']"
    assert failure(bench, "training") == f"weights that get_state_dict lacks: {absent}; expected []"


def test_training_without_a_step_is_found(bench, monkeypatch):
    monkeypatch.setattr(type(bench.accelerator), "sync_gradients", property(lambda self: False))
    told = failure(bench, "training")
    assert told == "sync_gradients was false in all of 4 batches: no step was taken"


def test_a_state_that_is_not_loaded_is_found(bench, monkeypatch):
    NAMED["training"](bench)
    monkeypatch.setattr(bench.accelerator, "load_state", lambda folder: None)
    assert failure(bench, "saving and resuming").startswith("losses after load_state: [")


def test_a_model_that_is_not_written_is_found(bench, monkeypatch):
    NAMED["training"](bench)
    (bench.folder / "model").mkdir()
    monkeypatch.setattr(bench.accelerator, "save_model", lambda model, folder: None)
    assert failure(bench, "saving and resuming") == "save_model wrote [], and no safetensors file"


def test_the_training_is_that_of_plain_pytorch(bench):
    """The same batches by hand, in float64: the losses that the line of the report shows."""
    NAMED["training"](bench)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 1),
    ).double()
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(4):
        x = torch.randn(4, 8, generator=generator).double()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient / max(1.0, float(norm))
    assert f"losses {losses[0]:.4f} to {losses[-1]:.4f}" in bench.found
