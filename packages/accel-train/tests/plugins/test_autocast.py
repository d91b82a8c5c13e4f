"""Options of autocast, and what they do to prepared models."""

import pytest
import torch
from torch import nn

from accel_train import Accelerator, AutocastKwargs


def test_names_and_defaults_are_those_of_torch():
    assert AutocastKwargs().to_dict() == {"enabled": True, "cache_enabled": None}
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    torch.autocast("cpu", torch.bfloat16, **AutocastKwargs().to_dict())


class Asking(nn.Linear):
    """Notes whether autocast is on, and keeps cast weights."""

    def forward(self, x):
        self.seen = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return super().forward(x)


@pytest.mark.parametrize("cache", [True, False, None])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_prepared_model_runs_as_they_say(enabled, cache):
    handler = AutocastKwargs(enabled=enabled, cache_enabled=cache)
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[handler])
    assert accelerator.autocast_handler is handler
    model = accelerator.prepare(Asking(2, 2))
    model(torch.ones(1, 2))
    assert model.seen[0] is enabled
    if enabled:
        assert model.seen[1] is (cache is not False)
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu") is enabled
    with accelerator.autocast(AutocastKwargs(enabled=not enabled)):
        assert torch.is_autocast_enabled("cpu") is not enabled
