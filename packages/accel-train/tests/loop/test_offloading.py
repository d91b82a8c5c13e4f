"""What may be offloaded, what is refused meanwhile, and what comes back together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_train import (
    AcceleratedOptimizer,
    Accelerator,
    ArgumentTypeError,
    OffloadedStatesError,
    OptionError,
)
from accel_train.offload.host_copies import HostCopies


def pair(accelerator: Accelerator) -> tuple[nn.Module, AcceleratedOptimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def test_a_second_call_and_a_second_return_do_nothing(accelerator):
    model, optimizer = pair(accelerator)
    accelerator.reload_states()
    accelerator.offload_states()
    assert accelerator.offload_states().total == 0
    accelerator.reload_states()
    accelerator.reload_states()
    train(accelerator, model, optimizer)


def test_a_frozen_reference_sleeps_while_another_model_trains(accelerator):
    model, optimizer = pair(accelerator)
    reference = accelerator.prepare_model(nn.Linear(3, 1).requires_grad_(False), evaluation_mode=True)
    reference = accelerator.prepare(reference)
    early = model(torch.ones(1, 3)).sum()
    accelerator.offload_states(reference)
    accelerator.backward(early)
    train(accelerator, model, optimizer)
    with pytest.raises(OffloadedStatesError, match="Linear was called"):
        reference(torch.ones(1, 3))
    accelerator.get_state_dict(model)
    with pytest.raises(OffloadedStatesError, match="get_state_dict"):
        accelerator.get_state_dict(reference)
    accelerator.reload_states(reference)
    reference(torch.ones(1, 3))


def test_a_trained_critic_sleeps_while_the_actor_trains(accelerator):
    actor, actor_optimizer = pair(accelerator)
    critic, critic_optimizer = pair(accelerator)
    early = critic(torch.ones(1, 3)).sum()
    accelerator.offload_states(critic, critic_optimizer)
    train(accelerator, actor, actor_optimizer)
    mixed = early + actor(torch.ones(1, 3)).sum()
    with pytest.raises(OffloadedStatesError, match="computed before"):
        accelerator.backward(mixed)
    with pytest.raises(OffloadedStatesError, match=r"step\(\) of AdamW"):
        critic_optimizer.step()
    accelerator.reload_states(critic)
    with pytest.raises(OffloadedStatesError, match=r"step\(\) of AdamW"):
        critic_optimizer.step()
    accelerator.reload_states(critic_optimizer)
    train(accelerator, critic, critic_optimizer)


def test_a_model_without_its_gradients_is_evaluated(accelerator):
    model, optimizer = pair(accelerator)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    wanted = model[0].weight.grad.clone()
    accelerator.offload_states(include=("gradients", "optimizer"))
    with torch.no_grad():
        model(torch.ones(1, 3))
    accelerator.get_state_dict(model)
    with pytest.raises(OffloadedStatesError, match="with gradients on"):
        model(torch.ones(1, 3))
    with pytest.raises(OffloadedStatesError):
        optimizer.step()
    accelerator.offload_states(include="parameters")  # more of the same model
    with pytest.raises(OffloadedStatesError), torch.no_grad():
        model(torch.ones(1, 3))
    accelerator.reload_states()
    assert torch.equal(model[0].weight.grad, wanted)
    optimizer.step()


def test_gradients_may_be_dropped_meanwhile(accelerator):
    model, optimizer = pair(accelerator)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    with accelerator.offloaded_states():
        optimizer.zero_grad()
    assert model[0].weight.grad is None
    train(accelerator, model, optimizer)


def test_the_context_reloads_after_an_error(accelerator):
    model, optimizer = pair(accelerator)
    with pytest.raises(KeyError), accelerator.offloaded_states(model):
        raise KeyError
    train(accelerator, model, optimizer)


def test_objects_prepared_meanwhile_are_on_the_device(accelerator):
    model, optimizer = pair(accelerator)
    accelerator.offload_states()
    other, other_optimizer = pair(accelerator)
    train(accelerator, other, other_optimizer)
    accelerator.reload_states()
    train(accelerator, model, optimizer)


@pytest.mark.wide(but=["clear", "save_state"])
@pytest.mark.parametrize("call", ["free_memory", "clear", "save_state", "load_state"])
def test_what_needs_all_states_is_refused(accelerator, call, tmp_path):
    _, optimizer = pair(accelerator)
    accelerator.offload_states(optimizer)
    with pytest.raises(OffloadedStatesError, match=r"reload_states\(\)"):
        getattr(accelerator, call)(*([tmp_path] if "state" in call else []))
    accelerator.reload_states()
    accelerator.save_state(tmp_path / "saved")


def test_training_may_end_meanwhile(accelerator):
    pair(accelerator)
    accelerator.offload_states()
    accelerator.end_training()


def test_wrong_arguments_are_refused(accelerator):
    model, _ = pair(accelerator)
    with pytest.raises(OptionError, match=r"include='weights'.*'parameters', 'gradients', 'optimizer'"):
        accelerator.offload_states(include="weights")
    with pytest.raises(OptionError):
        accelerator.offload_states(include=())
    with pytest.raises(ArgumentTypeError, match="got Conv1d"):
        accelerator.offload_states(model, nn.Conv1d(1, 1, 1))
    with pytest.raises(ArgumentTypeError):
        accelerator.reload_states(nn.Linear(1, 1))
    model(torch.ones(1, 3))


def test_an_error_in_the_middle_moves_all_back(accelerator, monkeypatch):
    model, optimizer = pair(accelerator)
    train(accelerator, model, optimizer)
    strategy, moved = accelerator.strategy, []

    def offload(owner: Any, kinds: Any, memory: Any) -> HostCopies:
        if isinstance(owner, torch.optim.Optimizer):
            raise OffloadedStatesError("no room")
        moved.append(owner)
        return type(strategy).offload_states(strategy, owner, kinds, memory)

    monkeypatch.setattr(strategy, "offload_states", offload)
    with pytest.raises(OffloadedStatesError, match="no room"):
        accelerator.offload_states()
    assert moved == [model]
    monkeypatch.undo()
    train(accelerator, model, optimizer)
    assert not accelerator._prepared.accumulator.observers


def test_a_failed_return_says_what_is_back(accelerator, monkeypatch):
    model, optimizer = pair(accelerator)
    accelerator.offload_states()
    reload, calls = HostCopies.reload, []

    def fail(self: HostCopies) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise OffloadedStatesError("no room")
        reload(self)

    monkeypatch.setattr(HostCopies, "reload", fail)
    with pytest.raises(OffloadedStatesError) as caught:
        accelerator.reload_states()
    assert caught.value.__notes__ == ["1 of 3 objects were reloaded before, and can be used."]
    model(torch.ones(1, 3))
    with pytest.raises(OffloadedStatesError):
        optimizer.step()
    accelerator.reload_states()
    train(accelerator, model, optimizer)


def test_without_it_nothing_observes_steps(accelerator):
    pair(accelerator)
    assert accelerator._prepared.accumulator.observers == []
    accelerator.offload_states()
    accelerator.reload_states()
    assert accelerator._prepared.accumulator.observers == []
