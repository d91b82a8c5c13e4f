"""What ranks must agree on of a call; stages themselves run in tests-integration."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel_bigmodel import PipelineError
from accel_bigmodel.pipelines.tracing import Inputs, are_still_those_of, tensors_of


def described(*args, rows=4, chunks=2, **kwargs):
    return Inputs.of(args, kwargs, rows, chunks)


def test_tensors_with_the_rows_of_the_batch_are_split():
    leaves, _ = described(torch.ones(4, 3), torch.ones(3), torch.tensor(1.0), 7, mask=torch.ones(4)).flatten()
    assert [(leaf.shape, leaf.cut) for leaf in leaves if hasattr(leaf, "cut")] == [
        ((2, 3), True),
        ((3,), False),
        ((), False),
        ((2,), True),
    ]
    assert 7 in leaves


def test_calls_of_one_key_have_the_same_shapes_dtypes_and_constants():
    assert described(torch.ones(4, 3)).key == described(torch.zeros(4, 3)).key
    # A micro-batch counts: 8 rows in 4 are traced as 4 rows in 2.
    assert described(torch.ones(4, 3)).key == described(torch.ones(8, 3), rows=8, chunks=4).key
    others = [
        described(torch.ones(4, 2)),
        described(torch.ones(4, 3).half()),
        described([torch.ones(4, 3)]),
        described(x=torch.ones(4, 3)),
    ]
    assert len({described(torch.ones(4, 3)).key, *(other.key for other in others)}) == 5
    assert described(torch.ones(4), 1).key != described(torch.ones(4), True).key


@dataclass
class Unregistered:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(4).to_sparse(), r"the input \[0\]\[0\] is sparse"),
        (object(), "is of type object.*give tensors, plain numbers and strings"),
        (Unregistered(torch.ones(4)), r"torch\.export\.register_dataclass\(Unregistered\)"),
    ],
)
def test_inputs_that_cannot_be_split(value, message):
    with pytest.raises(PipelineError, match=message):
        described(value)


def test_replaced_weights_are_noticed_and_changes_in_place_are_not():
    model = nn.Linear(2, 2)
    device = torch.device("cpu")

    def weights():
        held = tensors_of(model)
        return {
            name: (tensor, (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.device, None))
            for name, tensor in held.items()
        }

    known = weights()
    assert sorted(known) == ["bias", "weight"]
    with torch.no_grad():
        model.weight.zero_()
    assert are_still_those_of(model, known, device)
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert not are_still_those_of(model, known, device)
    known = weights()
    model.half()
    assert not are_still_those_of(model, known, device)
