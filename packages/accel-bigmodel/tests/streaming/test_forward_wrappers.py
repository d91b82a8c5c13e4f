"""A wrapper of forward, with a stand-in for the streamer that records its calls."""

import contextlib
import copy
import inspect
import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import has_offloaded_params
from accel_bigmodel.streaming.forward_wrappers import ForwardWrapper, wrappers_of


class Recorder:
    """What a wrapper calls, in order."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = []
        self.turn, self.lock = threading.RLock(), threading.RLock()
        self.depth = 0

    def is_running(self):
        return self.depth > 0

    def is_copied(self, memo):
        return False

    def open(self, key, order, outermost):
        self.depth += 1
        self.calls.append(("open", order, outermost))

    def close(self, outermost, orderly, complete):
        self.depth -= 1
        self.calls.append(("close", outermost, orderly, complete))

    def enter(self, group):
        self.calls.append(("enter", group))

    def leave(self, group):
        self.calls.append(("leave", group))

    def saving(self):
        self.calls.append("saving")
        return contextlib.nullcontext()

    def owned(self, group, result):
        return result + 1


@pytest.fixture
def recorder():
    return Recorder()


def test_the_forward_is_surrounded_and_keeps_its_signature(recorder):
    layer = nn.Linear(2, 2)
    plain = copy.deepcopy(layer)
    ForwardWrapper(recorder, layer, 4, [4])
    assert inspect.signature(layer.forward) == inspect.signature(plain.forward)
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x) + 1)
    assert recorder.calls == [("open", (4,), True), ("enter", 4), ("leave", 4), ("close", True, True, True)]
    recorder.calls.clear()
    layer(x)
    assert "saving" in recorder.calls
    assert has_offloaded_params(layer)


def test_a_module_that_only_contains_groups_opens_and_closes(recorder):
    model = nn.Sequential(nn.Linear(2, 2))
    ForwardWrapper(recorder, model, None, [0])
    ForwardWrapper(recorder, model[0], 0, [0])
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert [call[0] for call in recorder.calls] == ["open", "open", "enter", "leave", "close", "close"]
    assert [call[2] for call in recorder.calls if call[0] == "open"] == [True, False]
    assert not has_offloaded_params(model)


@pytest.mark.parametrize(("error", "orderly"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_a_forward_that_raises_is_closed(recorder, error, orderly):
    class Raising(nn.Module):
        def forward(self):
            raise error

    module = Raising()
    ForwardWrapper(recorder, module, 0, [0])
    with pytest.raises(error):
        module()
    assert recorder.calls[-2:] == [("leave", 0), ("close", True, orderly, False)]


def test_removing_restores_the_forward_that_was_there(recorder):
    layer = nn.Linear(2, 2)
    wrapper = ForwardWrapper(recorder, layer, 0, [0])
    assert wrappers_of(layer) == [wrapper]
    assert wrapper.belongs_to(recorder)
    wrapper.remove()
    assert "forward" not in layer.__dict__
    assert not wrapper.is_active()
    layer(torch.ones(1, 2))
    assert recorder.calls == []


def test_a_wrapper_beneath_another_passes_calls_on(recorder):
    layer = nn.Linear(2, 2)
    wrapper = ForwardWrapper(recorder, layer, 0, [0])

    def outer(*args):
        return wrapper(*args)

    outer.__wrapped__ = wrapper
    layer.forward = outer
    wrapper.remove()
    assert layer.forward is outer
    assert torch.equal(
        layer(torch.ones(1, 2)), nn.functional.linear(torch.ones(1, 2), layer.weight, layer.bias)
    )
    assert recorder.calls == []
