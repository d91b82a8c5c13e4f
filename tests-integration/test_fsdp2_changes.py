"""What a script changes in a model after FSDP2 has divided it, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
WIDTH = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x)).squeeze(-1)


def make(dtype):
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.layers[0].requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def data(dtype):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Ranks:
    """The script under FSDP2."""

    def __init__(self, precision, dtype):
        from accel_train import Accelerator

        self.accelerator = Accelerator(strategy="fsdp2", mixed_precision=precision)
        self.model = make(dtype)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer_of(self.model))
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        self.x = data(dtype).chunk(count)[index].to(self.accelerator.device)

    def steps(self, count=2):
        for _ in range(count):
            self.accelerator.backward(self.model(self.x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def look(self):
        self.model(self.x)  # FSDP leaves the outermost unit gathered for a backward

    def evaluate(self):
        with torch.no_grad():
            self.model(self.x)

    def rebuild(self):
        self.optimizer = self.accelerator.prepare(optimizer_of(self.model))

    def weights(self):
        return self.accelerator.get_state_dict(self.model)


class Plain:
    """The same script in plain PyTorch, on one process with all samples."""

    def __init__(self, precision, dtype):
        self.model = make(dtype)
        self.optimizer = optimizer_of(self.model)
        self.x = data(dtype)
        self.half = precision == "bf16"

    def steps(self, count=2):
        for _ in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                out = self.model(self.x)
            out.float().square().mean().backward() if self.half else out.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def look(self):
        pass

    def evaluate(self):
        pass

    def rebuild(self):
        self.optimizer = optimizer_of(self.model)

    def weights(self):
        return self.model.state_dict()


def thaw(run):
    """Parts of a unit, all of one, and the freezing of another."""
    run.model.layers[0].requires_grad_(True)
    run.model.head.requires_grad_(True)
    run.model.layers[1].requires_grad_(False)


def unfreeze(run):
    run.steps()
    thaw(run)
    run.steps()


def unfreeze_first(run):
    thaw(run)
    run.steps()


def unfreeze_gathered(run):
    """What is unfrozen is gathered: there are whole tensors in its place."""
    run.steps()
    run.look()
    thaw(run)
    run.steps()
    run.look()
    run.model.head.requires_grad_(False)
    run.steps()


def add_head(run):
    """A new module in the place of one, different on each rank before the first forward."""
    run.steps()
    bias = getattr(getattr(run, "accelerator", None), "process_index", 0)
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, 1).to(run.x.device, run.x.dtype)
    with torch.no_grad():
        head.bias += bias
    run.model.head = head
    run.evaluate()
    run.rebuild()
    run.steps()


def remove_bias(run):
    run.steps()
    run.model.layers[2].bias = None
    run.steps()


def run_on_ranks(change, precision, dtype):
    run = Ranks(precision, dtype)
    change(run)
    return run.weights()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "change", [unfreeze, unfreeze_first, unfreeze_gathered, add_head], ids=lambda change: change.__name__
)
def test_t45_changes_after_preparation_are_trained(change, precision):
    dtype, bound = (torch.float64, 1e-12) if precision == "no" else (torch.float32, 2e-2)
    expected = Plain(precision, dtype)
    change(expected)
    for weights in worlds.run(run_on_ranks, 2, change, precision, dtype):
        assert weights.keys() == expected.weights().keys()
        for name, value in expected.weights().items():
            torch.testing.assert_close(weights[name], value, rtol=bound, atol=bound, msg=name)


def in_replicas():
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    run = Ranks.__new__(Ranks)
    run.accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(dp_replicate_size=2))
    run.model = make(torch.float64)
    run.model, run.optimizer = run.accelerator.prepare(run.model, optimizer_of(run.model))
    run.x = data(torch.float64).chunk(4)[run.accelerator.process_index]
    unfreeze_gathered(run)
    add_head(run)
    return run.weights()


@pytest.mark.full
def test_t45_changes_in_replicas_of_divided_models():
    expected = Plain("no", torch.float64)
    unfreeze_gathered(expected)
    add_head(expected)
    for weights in worlds.run(in_replicas, 4):
        for name, value in expected.weights().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Optimizers of gathered parameters


def built_after_a_forward(run):
    """Its parameters include the whole ones that a forward leaves in the model for its backward."""
    run.steps()
    run.look()
    run.rebuild()
    run.steps()


def train_layers_and_look(run, look="look"):
    run.optimizer = torch.optim.AdamW(run.model.layers.parameters(), lr=1e-2)
    if isinstance(run, Ranks):
        run.optimizer = run.accelerator.prepare(run.optimizer)
    run.steps()
    getattr(run, look)()


def a_group_added_after_an_evaluation(run):
    train_layers_and_look(run, "evaluate")
    run.optimizer.add_param_group({"params": list(run.model.norm.parameters()), "lr": 1e-2})
    run.model.zero_grad()
    run.steps()


def a_group_added_after_a_forward(run):
    train_layers_and_look(run)
    run.optimizer.add_param_group({"params": list(run.model.norm.parameters()), "lr": 1e-2})
    run.model.zero_grad()  # divides the model again: only the group's tensors are still the whole ones
    if isinstance(run, Ranks):
        with pytest.raises(
            Exception, match="was built while the parameters of a sharded model were gathered"
        ):
            run.steps()
        run.optimizer.param_groups[-1]["params"] = list(run.model.norm.parameters())
        run.model.zero_grad()
    run.steps()


def a_group_added_after_the_gradients_are_dropped(run):
    """`zero_grad` of the model has put the parts back, so the group gets them."""
    train_layers_and_look(run)
    run.model.zero_grad()
    run.optimizer.add_param_group({"params": list(run.model.norm.parameters()), "lr": 1e-2})
    run.steps()


@pytest.mark.parametrize(
    "change",
    [
        built_after_a_forward,
        a_group_added_after_an_evaluation,
        a_group_added_after_a_forward,
        a_group_added_after_the_gradients_are_dropped,
    ],
    ids=lambda change: change.__name__,
)
def test_t45_optimizers_of_gathered_parameters_train_or_are_refused(change):
    expected = Plain("no", torch.float64)
    change(expected)
    for weights in worlds.run(run_on_ranks, 2, change, "no", torch.float64):
        for name, value in expected.weights().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def refused():
    from accel_train.errors import PrepareError

    messages = []

    def catch(change):
        with pytest.raises(PrepareError) as caught:
            change()
        messages.append(str(caught.value))

    run = Ranks("no", torch.float64)
    run.steps()
    run.look()
    late = optimizer_of(run.model)
    run.steps()
    catch(lambda: run.accelerator.prepare(late))
    run.look()
    used = torch.optim.AdamW([run.model.norm.weight], lr=1e-2)
    run.model.norm.weight.grad = torch.ones_like(run.model.norm.weight)
    used.step()
    run.model.norm.weight.grad = None
    catch(lambda: run.accelerator.prepare(used))
    run.steps(1)
    run.model.layers[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    catch(run.evaluate)
    catch(run.steps)
    return messages


def test_t45_what_cannot_be_trained_is_refused_on_all_ranks():
    first, second = worlds.run(refused, 2)
    assert first == second
    late, used, replaced, again = first
    for message in (late, used):
        assert "AdamW was built while the parameters of a sharded model were gathered" in message
        assert "Build it from the model's parameters() before such a forward" in message
    assert "'layers.1.weight' of Net was replaced after the model was prepared" in replaced
    assert again == replaced
