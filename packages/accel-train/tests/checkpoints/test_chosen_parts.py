"""Parts of a training state: those that are named are restored, the others stay as they are."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import StateMismatchError, export_to_accelerate
from accel_train import Accelerator, OptionError
from accel_train.checkpoints import chosen_parts
from testkit import worlds
from testkit.small_run import build, snapshot, train


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture
def saved(tmp_path):
    """A folder, and what was saved: weights, moments, the scheduler's step."""
    accelerator = Accelerator(cpu=True)
    parts = build(accelerator)
    accelerator.register_for_checkpointing(Counter(7))
    train(accelerator, *parts)
    accelerator.step = 5
    accelerator.save_state(tmp_path / "state")
    return tmp_path / "state", snapshot(*parts[:3])


@pytest.fixture(params=["ours", "accelerate"])
def folder(request, saved, tmp_path):
    if request.param == "ours":
        return saved
    export_to_accelerate(saved[0], tmp_path / "theirs")
    return tmp_path / "theirs", saved[1]


@pytest.mark.filterwarnings("ignore:.*was written by Accelerate")
def test_an_evaluation_that_prepares_its_model_and_a_loader_gets_the_weights(folder):
    path, (weights, *_) = folder
    accelerator = Accelerator(cpu=True)
    data = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    model, loader = accelerator.prepare(nn.Linear(4, 1), data)
    drawn = torch.get_rng_state()
    with pytest.warns(
        UserWarning, match="restored models of .*stays as it is here: .*optimizer_0.*scheduler_0"
    ):
        accelerator.load_state(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [x.tolist() for (x,) in loader] == [[0, 1], [2, 3], [4, 5]]  # not where the training's loader was
    assert accelerator.step == 0


@pytest.mark.filterwarnings("ignore:.*was written by Accelerate")
def test_weights_go_to_a_new_training(folder):
    """Of another optimizer, another scheduler and other registered objects."""
    path, (weights, *_) = folder
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, first, second = accelerator.prepare(
        model, torch.optim.SGD([model.weight], lr=0.5), torch.optim.AdamW([model.bias], lr=0.25)
    )
    with pytest.raises(StateMismatchError, match=r"only=\('models',\)"):
        accelerator.load_state(path)
    with pytest.warns(UserWarning, match="stays as it is here"):
        accelerator.load_state(path, only=("models",))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (0.5, 0.25)
    assert not first.state
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    first.step()
    assert torch.allclose(model.weight, before - 0.5 * 2)  # plain SGD from the loaded weights


PARTS = sorted(chosen_parts.ALL)


@pytest.mark.filterwarnings("ignore:load_state.. restored")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(saved, part):
    path, (weights, moments, steps, random) = saved
    accelerator = Accelerator(cpu=True)
    parts = build(accelerator, seed=3)
    counter = Counter(1)
    accelerator.register_for_checkpointing(counter)
    train(accelerator, *parts)
    train(accelerator, *parts)
    before = snapshot(*parts[:3])
    accelerator.load_state(path, only=part)
    after = snapshot(*parts[:3])

    def expected(name, restored, kept):
        return restored if part == name else kept

    for got, want in zip(after[0], expected("models", weights, before[0]), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(after[1], expected("optimizers", moments, before[1]), strict=True):
        assert torch.equal(got, want)
    assert after[2] == expected("schedulers", steps, before[2])
    assert counter.value == expected("registered", 7, 1)
    assert parts[3].iteration == expected("loaders", 1, 2)
    assert torch.equal(after[3], expected("random", random, before[3]))
    assert accelerator.step == 0


def test_all_parts_by_name_are_the_whole_state(saved):
    path, (weights, *_) = saved
    accelerator = Accelerator(cpu=True)
    parts = build(accelerator, seed=3)
    accelerator.register_for_checkpointing(Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.load_state(path, only=PARTS)
    assert accelerator.step == 5
    assert torch.equal(parts[0].weight, weights[0])


def test_a_named_part_that_does_not_fit_is_an_error_and_nothing_changes(saved):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    before = model.weight.detach().clone()
    with pytest.raises(StateMismatchError, match="nothing was prepared or registered for its optimizer_0"):
        accelerator.load_state(saved[0], only=("models", "optimizers"))
    assert torch.equal(model.weight, before)
    wide = Accelerator(cpu=True)
    wide.prepare(nn.Linear(5, 1))
    with pytest.raises(StateMismatchError, match="weight"):
        wide.load_state(saved[0])


@pytest.mark.parametrize(("only", "message"), [(("model",), "got 'model'"), ((), "got nothing")])
def test_a_name_of_no_part_is_an_error(saved, only, message):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 1))
    with pytest.raises(OptionError, match=f"{message}; the parts of a training state are loaders, models, "):
        accelerator.load_state(saved[0], only=only)


def test_weights_alone_leave_the_number_of_the_next_checkpoint(saved, tmp_path):
    from accel_train import ProjectConfiguration

    project = ProjectConfiguration(str(tmp_path / "new"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="stays as it is here"):
        accelerator.load_state(saved[0])
    assert accelerator.save_state().name == "checkpoint_0"


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_several_ranks_load_weights_alone(tmp_path, sharded):
    def work(folder):
        from accel_train import FullyShardedDataParallelPlugin

        plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}

        def net(seed):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

        accelerator = Accelerator(**plugin)
        model = net(0)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(accelerator.process_index))
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        accelerator.save_state(folder)
        trained = accelerator.get_state_dict(model)
        found = []
        for only in (None, ("models",)):
            other = Accelerator(**plugin)
            fresh = net(1)
            if only is None:
                fresh = other.prepare(fresh)
            else:
                fresh, _ = other.prepare(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                other.load_state(folder, only=only)
            found.append(
                (other.get_state_dict(fresh), [str(w.message) for w in said if "stays as" in str(w.message)])
            )
        return trained, found

    (trained, found), others = worlds.run(work, 2, str(tmp_path / "state"))
    for weights, said in found:
        assert weights.keys() == trained.keys()
        assert all(torch.equal(weights[name], trained[name]) for name in trained)
        assert len(said) == 1
    assert [said for _, said in others[1]] == [[], []]  # the main process says it
    if not sharded:  # replicas are those of rank 0, buffers too
        for weights, _ in others[1]:
            assert all(torch.equal(weights[name], trained[name]) for name in trained)
