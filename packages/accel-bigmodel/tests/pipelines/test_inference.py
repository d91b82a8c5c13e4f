"""Pipelines in a world of one, and batch sizes; several ranks are in tests-integration."""

import copy

import pytest
import torch
from torch import nn

from accel_bigmodel import PipelineError, find_pippy_batch_size, pippy_forward, prepare_pippy


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.ones(3, 2),), None, 3),
        ((torch.tensor(1.0), [torch.ones(5)]), {"x": torch.ones(7)}, 5),
        (None, {"a": 1, "x": {"y": torch.ones(7)}}, 7),
        ((1, "a"), {}, None),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor_with_one(args, kwargs, size):
    assert find_pippy_batch_size(args, kwargs) == size


def test_one_process_runs_the_model_itself_without_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    plain = copy.deepcopy(model)
    prepared = prepare_pippy(model, example_args=(torch.ones(2, 4),))
    assert prepared is model
    assert (model.hf_split_points, model.pippy_stage) == ([], None)
    x = torch.randn(3, 4)
    found = model(x)
    assert torch.equal(found, plain(x))
    assert not found.requires_grad
    with pytest.raises(PipelineError, match="split into stages already"):
        prepare_pippy(model, example_args=(x,))


def test_one_process_pads_nothing():
    seen = []
    assert pippy_forward(lambda *args: seen.append(args) or 5, 4, True, torch.ones(3)) == 5
    assert seen[0][0].shape == (3,)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: model.train(), {}, "is in training mode"),
        (lambda model: model.to("meta"), {}, r"have no values yet \(meta device\)"),
        (lambda model: setattr(model, "hf_device_map", {"": 0}), {}, "is dispatched over devices"),
        (lambda model: None, {"num_chunks": 0}, "num_chunks must be a whole number of 1 or more, got 0"),
        (
            lambda model: None,
            {"example_args": torch.ones(2)},
            "must be a tuple of inputs, such as .x,., got a Tensor",
        ),
        (lambda model: None, {"split_points": 3}, "split_points must be 'auto' or names of modules"),
        (
            lambda model: None,
            {"split_points": ["0"]},
            "1 split points make 2 stages, but there are 1 processes",
        ),
    ],
)
def test_what_cannot_be_prepared(change, options, message):
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    change(model)
    with pytest.raises(PipelineError, match=message):
        prepare_pippy(model, **{"example_args": (torch.ones(2, 4),), **options})
    assert not hasattr(model, "hf_split_points")
