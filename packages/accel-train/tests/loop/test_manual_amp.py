"""Mixed precision for loops without prepared models, against plain torch."""

import pickle
from collections import namedtuple

import pytest
import torch

from accel_state.errors import StateError
from accel_train import (
    Accelerator,
    AutocastKwargs,
    DistributedType,
    convert_outputs_to_fp32,
    get_grad_scaler,
    get_mixed_precision_context_manager,
)

Output = namedtuple("Output", "logits name")


def forward(x):
    """What it computes."""
    return Output(logits=x.bfloat16(), name="x"), [x.half(), x.int()]


def test_outputs_come_back_in_float32_and_the_rest_as_it_is():
    wrapped = convert_outputs_to_fp32(forward)
    output, (half, whole) = pickle.loads(pickle.dumps(wrapped))(torch.ones(2))
    assert (output.logits.dtype, output.name) == (torch.float32, "x")
    assert (half.dtype, whole.dtype) == (torch.float32, torch.int32)
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", forward.__doc__)


def test_the_scaler_is_torchs_for_this_device():
    scaler = get_grad_scaler(init_scale=8.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0
    assert isinstance(get_grad_scaler(DistributedType.FSDP), torch.amp.GradScaler)
    assert isinstance(get_grad_scaler(DistributedType.MEGATRON_LM), torch.amp.GradScaler)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_is_in_the_newest_accelerators_precision(precision, dtype):
    accelerator = Accelerator(mixed_precision=precision)
    x = torch.ones(2, 2, device=accelerator.device)
    with get_mixed_precision_context_manager(native_amp=True):
        assert (x @ x).dtype is dtype
    with get_mixed_precision_context_manager():
        assert (x @ x).dtype is torch.float32
    with get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False)):
        assert (x @ x).dtype is torch.float32


def test_autocast_without_an_accelerator_is_an_error():
    with pytest.raises(StateError, match="Create `Accelerator"):
        get_mixed_precision_context_manager(native_amp=True)
