"""The order of what the strategy "xla" does, with a fake of torch_xla; training with the real one is tested in
tests-integration/engines/test_xla.py.
"""

import importlib.util
import sys
import types

import pytest
import torch

from accel_state.errors import NotAvailableError
from accel_state.world.process import PartialState
from accel_train import Accelerator, XlaPlugin
from accel_train.errors import ArgumentTypeError, IncompatibleOptionsError
from accel_train.mesh import Mesh
from accel_train.plugins import DistributedDataParallelKwargs
from accel_train.precision.base import Precision, PrecisionOptions
from accel_train.setup.resolve import strategy_name
from accel_train.strategies import xla
from accel_train.strategies.base import StrategyOptions

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch):
    """What happens to gradients and programs, in order."""
    found: list[str] = []
    engine, runtime = types.ModuleType("torch_xla"), types.ModuleType("torch_xla.runtime")
    engine.sync = lambda: found.append("mark")
    runtime.process_count = runtime.world_size = lambda: 1
    runtime.is_spmd = lambda: False
    monkeypatch.setitem(sys.modules, "torch_xla", engine)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setattr(xla, "seed_as_torch", lambda: None)
    monkeypatch.setattr(xla, "average", lambda parameters, ranks: found.append(f"reduce {len(parameters)}"))
    monkeypatch.setattr(xla, "broadcast", lambda tensors: found.append(f"broadcast {len(tensors)}"))
    return found


class Steps:
    """Steps of preparing that change nothing."""

    def convert(self, model):
        return model

    place = compile = convert


class NotingSGD(torch.optim.SGD):
    """Notes its steps."""

    def __init__(self, parameters, found):
        super().__init__(parameters, lr=0.1)
        self.found = found

    def step(self, closure=None):
        self.found.append("step")
        return super().step(closure)


def strategy_on(ranks, config=None, sync_each_batch=False):
    options = StrategyOptions(
        CPU, Mesh.of_world(ranks, 0), Precision(PrecisionOptions()), config, sync_each_batch
    )
    return xla.XlaStrategy(options)


def window(strategy, model, optimizer, micro_batches=3):
    """Batches, backward passes, clipping and a step, as the loop calls them."""
    for number in range(1, micro_batches + 1):
        last = number == micro_batches
        batch = strategy.shard_batch(torch.ones(2, 2))
        strategy.begin_micro_batch([model], last=last, loss_factor=1 / micro_batches)
        strategy.backward([model], model(batch).sum(), pending=number > 1, kwargs={})
        if last:
            strategy.clip_grad_norm_(list(model.parameters()), 1.0)
            strategy.step(optimizer)
        strategy.end_micro_batch([model], last=last)


def test_gradients_are_reduced_once_before_they_are_used_and_the_step_is_marked_after(events):
    strategy = strategy_on(2)
    model = strategy.prepare_model(torch.nn.Linear(2, 1), Steps())
    window(strategy, model, NotingSGD(model.parameters(), events))
    assert events == ["broadcast 2", "mark", "mark", "mark", "reduce 2", "step", "mark"]


def test_one_process_reduces_nothing(events):
    strategy = strategy_on(1)
    model = strategy.prepare_model(torch.nn.Linear(2, 1), Steps())
    window(strategy, model, NotingSGD(model.parameters(), events), micro_batches=1)
    assert events == ["mark", "step", "mark"]


def test_a_backward_outside_of_windows_reduces(events):
    strategy = strategy_on(2)
    model = strategy.prepare_model(torch.nn.Linear(2, 1), Steps())
    strategy.begin_micro_batch([model], last=False, loss_factor=1.0)
    strategy.end_micro_batch([model], last=False)
    strategy.backward([model], model(torch.ones(1, 2)).sum(), pending=False, kwargs={})
    assert events == ["broadcast 2", "reduce 2"]


def test_sync_each_batch_reduces_in_each(events):
    strategy = strategy_on(2, sync_each_batch=True)
    model = strategy.prepare_model(torch.nn.Linear(2, 1), Steps())
    window(strategy, model, NotingSGD(model.parameters(), events), micro_batches=2)
    assert events.count("reduce 2") == 2


def test_only_trained_parameters_of_prepared_models_are_reduced_each_once(events):
    strategy = strategy_on(2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model = strategy.prepare_model(model, Steps())
    strategy.backward([model], model(torch.ones(1, 2)).sum(), pending=False, kwargs={})
    assert events[-1] == "reduce 2"
    assert strategy.states.keeps_replicas(model)
    strategy.release()
    assert not strategy.states.keeps_replicas(model)


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("through", ["plugin", "script"])
def test_spmd_takes_one_process(through, monkeypatch):
    if through == "plugin":
        with pytest.raises(IncompatibleOptionsError, match="4 processes were started, and in SPMD mode one"):
            xla.XlaStrategy.make_mesh(XlaPlugin(spmd=True), CPU, 4, 0)
        return
    monkeypatch.setattr(sys.modules["torch_xla.runtime"], "is_spmd", lambda: True)
    with pytest.raises(IncompatibleOptionsError, match=r"2 processes.*leave out.*use_spmd"):
        strategy_on(2)


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("name", ["world_size", "process_count"])
def test_ranks_of_torch_xla_are_refused(monkeypatch, name):
    monkeypatch.setattr(sys.modules["torch_xla.runtime"], name, lambda: 8)
    with pytest.raises(IncompatibleOptionsError, match=r"torch_xla has .*8.*XlaPlugin\(spmd=True\)"):
        strategy_on(1)


@pytest.mark.parametrize("spmd", [None, 1, "yes", DistributedDataParallelKwargs])
def test_spmd_is_a_bool(spmd):
    with pytest.raises(ArgumentTypeError, match=r"XlaPlugin\(spmd=…\) takes True or False"):
        XlaPlugin(spmd=spmd)


@pytest.mark.parametrize(
    ("given", "processes", "device", "name"),
    [
        (None, 1, "xla", "xla"),
        (None, 2, "xla", "xla"),
        (None, 2, "cpu", "ddp"),
        ("ddp", 2, "xla", "ddp"),
        (XlaPlugin(), 1, "cpu", "xla"),
    ],
)
def test_the_device_selects_it(given, processes, device, name):
    assert strategy_name(given, processes, torch.device(device)) == name


def test_the_cpu_is_refused_where_the_launcher_asks_for_tpus(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DISTRIBUTED_TYPE", "XLA")
    PartialState.reset()
    with pytest.raises(
        IncompatibleOptionsError, match=r"asks for XLA devices \(--tpu\) and the script for cpu"
    ):
        Accelerator(cpu=True)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="about its absence")
@pytest.mark.parametrize("strategy", ["xla", XlaPlugin(), XlaPlugin(spmd=True)])
def test_a_missing_package_gives_the_install_line(strategy):
    with pytest.raises(NotAvailableError, match=r"needs torch_xla.*pip install 'torch_xla\[tpu\]>=2\.9'"):
        Accelerator(strategy=strategy)


def test_states_do_not_move_to_host_memory(events):
    with pytest.raises(NotAvailableError, match=r"'xla'.*save_state\(\)"):
        strategy_on(1).check_offload([torch.nn.Linear(2, 1)], [], ["parameters"])
