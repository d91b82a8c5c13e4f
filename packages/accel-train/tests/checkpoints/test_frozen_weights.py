"""States without frozen parameters: what they hold, and that a run resumes from them as from a whole state."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import CorruptCheckpointError, StateMismatchError, export_to_accelerate
from accel_train import Accelerator, FullyShardedDataParallelPlugin
from accel_train.checkpoints import training_state
from accel_train.errors import OptionError
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
PLUGINS = {
    "single": dict,
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
}


class Adapted(nn.Module):
    """A frozen layer, a low-rank addition to it, and statistics."""

    def __init__(self, base=0, width=6):
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(4, width).requires_grad_(False)
        torch.manual_seed(99)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, width, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.down(x)))


def build(strategy, base=0, **options):
    accelerator = Accelerator(cpu=True, **PLUGINS[strategy]())
    model = Adapted(base, **options)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def steps(accelerator, model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number + 7 * accelerator.process_index))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def saved_and_resumed(folder, strategy, asynchronous=False, resumed_by=None):
    accelerator, model, optimizer = build(strategy)
    steps(accelerator, model, optimizer, range(2))
    if resumed_by is None:
        saved = accelerator.save_state(folder, trainable_only=True, asynchronous=asynchronous)
        if asynchronous:
            saved.result()
        whole = steps(accelerator, model, optimizer, range(2, 4))
    else:
        whole = None
    accelerator, model, optimizer = build(resumed_by or strategy)
    accelerator.load_state(folder)
    return whole, steps(accelerator, model, optimizer, range(2, 4))


@pytest.mark.parametrize(
    ("strategy", "ranks", "asynchronous"),
    [("single", 1, False), ("single", 1, True), ("ddp", 2, False), ("fsdp2", 2, False), ("fsdp2", 2, True)],
)
def test_a_run_resumes_as_from_a_whole_state(tmp_path, strategy, ranks, asynchronous):
    folder = tmp_path / "state"
    for whole, resumed in worlds.run(saved_and_resumed, ranks, folder, strategy, asynchronous):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    names = {name for file in folder.glob("model*.safetensors") for name in load_file(file)}
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert names == {"down.weight", "up.weight", "norm.weight", "norm.bias", *statistics}


def test_another_strategy_takes_it_up(tmp_path):
    folder = tmp_path / "state"
    [(whole, _), _] = worlds.run(saved_and_resumed, 2, folder, "ddp")
    for _, resumed in worlds.run(saved_and_resumed, 2, folder, "fsdp2", False, "fsdp2"):
        parameters = [name for name in whole if "running" not in name]  # of which each rank has its own
        for name in parameters:
            torch.testing.assert_close(resumed[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": 1}, r"with other values: base\.weight, base\.bias"),
        ({"width": 5}, r"of another shape: base\.weight"),
    ],
)
def test_another_base_is_refused_and_nothing_changes(tmp_path, change, message):
    accelerator, model, optimizer = build("single")
    steps(accelerator, model, optimizer, range(2))
    accelerator.save_state(tmp_path / "state", trainable_only=True)
    other, model, _ = build("single", **change)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=message):
        other.load_state(tmp_path / "state")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_base_of_another_dtype_or_without_the_layer_is_refused(tmp_path):
    accelerator, *_ = build("single")
    accelerator.save_state(tmp_path / "state", trainable_only=True)
    other = Accelerator(cpu=True)
    model = Adapted()
    model.base.to(torch.bfloat16)
    other.prepare(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    with pytest.raises(StateMismatchError, match=r"of another dtype: base"):
        other.load_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    model = Adapted()
    del model.base
    other.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(StateMismatchError, match=r"not here: base\.bias, base\.weight"):
        other.load_state(tmp_path / "state")


def test_a_model_that_is_frozen_as_a_whole(tmp_path):
    """A teacher beside the model that is trained."""

    def prepared():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(3)
        teacher, student = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        return accelerator, *accelerator.prepare(
            teacher, student, torch.optim.SGD(student.parameters(), lr=0.1)
        )

    accelerator, _, student, _ = prepared()
    with torch.no_grad():
        student.weight.fill_(2.0)
    accelerator.save_state(tmp_path / "state", trainable_only=True)
    other, teacher, student, _ = prepared()
    before = teacher.weight.clone()
    other.load_state(tmp_path / "state")
    assert torch.equal(student.weight, torch.full((3, 3), 2.0))
    assert torch.equal(teacher.weight, before)
    other, _, student, _ = prepared()
    with pytest.warns(UserWarning, match="restored models"):
        other.load_state(tmp_path / "state", only=("models",))
    assert torch.equal(student.weight, torch.full((3, 3), 2.0))
    notes = export_to_accelerate(tmp_path / "state", tmp_path / "theirs")
    assert any("frozen parameters were not saved" in note for note in notes)


def test_nothing_frozen_and_hooks_are_named(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="no prepared model has one"):
        accelerator.save_state(tmp_path / "state", trainable_only=True)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(OptionError, match="decides itself"):
        accelerator.save_state(tmp_path / "state", trainable_only=True)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "frozen", [3, [], [{}, {}], [{"base.weight": 3}], [{"base.weight": {"shape": "x"}}], ["x"]]
)
def test_what_no_save_writes_of_frozen_parameters_is_refused(tmp_path, frozen):
    accelerator, *_ = build("single")
    accelerator.save_state(tmp_path / "state", trainable_only=True)
    saved = training_state.read(accelerator._prepared, tmp_path / "state", False, False)
    saved.trees.shared["progress"]["frozen"] = frozen
    with pytest.raises(CorruptCheckpointError, match="frozen parameters"):
        training_state.fit(accelerator._prepared, saved, accelerator._prepared.models, strict=True)
