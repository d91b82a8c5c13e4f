"""The façade: options, independence, preparing and unwrapping, on one process."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


class Augmented(torch.utils.data.Dataset):
    """Draws from the global generator per sample, as augmentations do."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.randn(4), torch.tensor([float(index % 3)])


def plain_curve(epochs=3):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_five_added_lines_do_not_change_the_curve_of_one_process(order):
    expected_losses, expected = plain_curve()
    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    objects = [model, optimizer, loader, scheduler]
    prepared = accelerator.prepare(*(objects[i] for i in order))
    model, optimizer, loader, scheduler = (prepared[order.index(i)] for i in range(4))
    losses = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_t17_two_accelerators_do_not_see_each_other():
    first = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator(gradient_accumulation_steps=2)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 2)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    model = first.prepare(make())
    with first.accumulate(model):
        assert not first.sync_gradients
        assert second.sync_gradients
    second.gradient_accumulation_steps = 3
    assert first.gradient_accumulation_steps == 4
    loader = first.prepare(DataLoader(torch.arange(4), batch_size=2))
    iterator = iter(loader)
    next(iterator)
    assert first.gradient_state.in_dataloader
    assert not second.gradient_state.in_dataloader


def test_t26_no_argument_is_dead():
    with pytest.warns(FutureWarning, match="DataLoaderConfiguration"):
        accelerator = Accelerator(split_batches=True)
    assert accelerator.split_batches
    assert float(accelerator.reduce(torch.tensor(3.0), scale=0.5)) == 1.5
    lengths = {}
    for adjust in (False, True):
        accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
        )
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(2, 4)).sum())
                optimizer.step()
                scheduler.step()
        lengths[adjust] = scheduler.scheduler.last_epoch
    assert lengths == {False: 2, True: 4}


def test_everything_pickles_and_is_collected():
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
    for item in (accelerator, optimizer, scheduler, loader):
        assert type(pickle.loads(pickle.dumps(item))) is type(item)
    references = [weakref.ref(item) for item in (model, optimizer, scheduler, loader, accelerator)]
    model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
    assert model is optimizer is scheduler is loader is None
    del accelerator, item, x
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


def test_a_model_is_forgotten_while_its_accelerator_goes_on():
    """Also one that was trained for fewer micro-batches than the new loop's checks look at."""
    accelerator = Accelerator()
    plain = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    references = [weakref.ref(item) for item in (plain, model, optimizer, plain.weight)]
    del plain
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_deepcopy_of_an_accelerator_is_the_accelerator():
    accelerator = Accelerator()
    assert copy.deepcopy({"a": accelerator})["a"] is accelerator


def test_triggers_answer_once():
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_the_launcher_decides_what_the_script_leaves_open(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
    with pytest.warns(UserWarning, match="4 gradient accumulation steps and the script for 2"):
        assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fsdp_plugin": object()}, RuntimeError, "fsdp_plugin.*not available yet"),
        ({"deepspeed_plugin": object()}, RuntimeError, "deepspeed_plugin.*not available yet"),
        ({"megatron_lm_plugin": object()}, RuntimeError, "megatron_lm_plugin.*not available yet"),
        ({"torch_tp_plugin": object()}, RuntimeError, "torch_tp_plugin.*not available yet"),
        ({"parallelism_config": object()}, RuntimeError, "parallelism_config.*not available yet"),
        ({"log_with": "tensorbord"}, ValueError, "Unknown tracker 'tensorbord' in log_with"),
        ({"mixed_precison": "bf16"}, TypeError, "Did you mean 'mixed_precision'"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin()},
            ValueError,
            "both given",
        ),
        (
            {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")},
            ValueError,
            "both given",
        ),
        ({"dynamo_backend": "inductr"}, ValueError, "Unknown dynamo backend 'inductr'"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "two AutocastKwargs"),
        ({"kwargs_handlers": ["bf16"]}, ValueError, "not one of the accepted kinds"),
        ({"kwargs_handlers": AutocastKwargs()}, TypeError, "kwargs_handlers.*takes a list"),
        (
            {"dataloader_config": {"split_batches": True}},
            TypeError,
            r"DataLoaderConfiguration\(…\), got dict",
        ),
        ({"project_config": {"project_dir": "x"}}, TypeError, r"ProjectConfiguration\(…\), got dict"),
        ({"dynamo_plugin": {"backend": "eager"}}, TypeError, r"TorchDynamoPlugin\(…\), got dict"),
        ({"gradient_accumulation_plugin": 4}, TypeError, r"GradientAccumulationPlugin\(…\), got int"),
        ({"rng_types": "torch"}, ValueError, r"takes a list.*\['torch'\]"),
        ({"rng_types": ["numpy"]}, ValueError, "'numpy'; known: torch"),
        ({"dispatch_batches": True}, ValueError, r"DataLoaderConfiguration\(dispatch_batches=…\)"),
        ({"find_unused_parameters": True}, ValueError, r"kwargs_handlers=\[DistributedDataParallelKwargs"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, error, message):
    with pytest.raises(error, match=message):
        Accelerator(**arguments)


def test_a_number_of_numpy_may_say_how_many_steps():
    numpy = pytest.importorskip("numpy")
    assert Accelerator(gradient_accumulation_steps=numpy.int64(3)).gradient_accumulation_steps == 3


def test_a_deprecated_argument_leaves_the_configuration_of_the_user_alone():
    config = DataLoaderConfiguration()
    with pytest.warns(FutureWarning, match="split_batches"):
        assert Accelerator(split_batches=True, dataloader_config=config).split_batches
    assert not config.split_batches


def test_options_keep_their_documented_defaults():
    accelerator = Accelerator()
    assert accelerator.rng_types == ["generator"]
    assert accelerator.dataloader_config == DataLoaderConfiguration()
    assert accelerator.project_configuration == ProjectConfiguration()
    assert accelerator.scaler is None
    assert not accelerator.native_amp
    assert DistributedDataParallelKwargs().to_dict()["gradient_as_bucket_view"]
    assert GradScalerKwargs(init_scale=1.0).to_kwargs() == {"init_scale": 1.0}
    with pytest.raises(ValueError, match="total_limit"):
        ProjectConfiguration(total_limit=0)


def test_wrong_types_are_named():
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    with pytest.raises(TypeError, match="loss tensor, got float"):
        accelerator.backward(1.0)
    with pytest.raises(TypeError, match="loss tensor, got dict"):
        accelerator.backward({"loss": torch.ones(())})
    with pytest.raises(TypeError, match=r"Pass model\.parameters"):
        accelerator.clip_grad_norm_(model, 1.0)
    with pytest.raises(TypeError, match=r"accumulate.*got SGD"):
        accelerator.accumulate(torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="DataLoader"):
        accelerator.prepare_data_loader([1, 2, 3])
    with pytest.raises(ValueError, match=r"Item at index 1 \(str\)"):
        accelerator.register_for_checkpointing(model, "text")


def test_t27_a_step_probes_nothing_and_adds_nothing_to_the_graph(monkeypatch):
    import importlib.util
    import inspect
    import os

    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    differentiated = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor,
        "backward",
        lambda self, *args, **kwargs: (differentiated.append(self), backward(self, *args, **kwargs))[1],
    )

    def step(x):
        with accelerator.accumulate(model):
            loss = model(x).sum()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss

    batches = iter(loader)
    step(next(batches)[0])  # torch itself looks things up at its first step

    def forbidden(*args, **kwargs):
        raise AssertionError("probed in a step")

    with monkeypatch.context() as steps:  # pytest itself may read the environment when the test has ended
        steps.setattr(importlib.util, "find_spec", forbidden)
        steps.setattr(inspect, "signature", forbidden)
        steps.setattr(type(os.environ), "__getitem__", forbidden)
        for (x,) in batches:
            loss = step(x)
            assert differentiated[-1] is loss
    assert len(differentiated) == 8


def test_gradients_dropped_by_the_model_are_not_dropped_again_inside_the_next_window():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for number in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            if number == 1:
                model.zero_grad()  # of which the optimizer does not know
            if number == 2:
                optimizer.zero_grad()  # inside an unfinished window
    assert model.weight.grad.item() == 0.5


def test_training_on_several_ranks_without_a_prepared_model_is_reported_once():
    from testkit import worlds

    def train():
        accelerator = Accelerator()
        weight = torch.ones(1, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                accelerator.backward(weight.sum())
        return [str(item.message) for item in caught]

    for [message] in worlds.run(train, 2):
        assert "no model is prepared" in message
        assert "Pass the model to accelerator.prepare()" in message
