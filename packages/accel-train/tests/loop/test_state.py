"""The states of an accelerator: what scripts read from them, and write to the gradient state."""

import gc
import weakref

import pytest
import torch

from accel_state.enums import DistributedType
from accel_state.errors import StateError
from accel_train import Accelerator, ArgumentTypeError, GradientAccumulationPlugin, OptionError
from accel_train.loop.state import AcceleratorState, GradientState, is_initialized


def test_the_accumulation_options_are_shown_as_they_are_now():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 2, "sync_each_batch": True}
    assert accelerator.gradient_state.plugin_kwargs.get("sync_each_batch") is True
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.gradient_state.plugin_kwargs["num_steps"] == 4
    assert Accelerator().gradient_state.plugin_kwargs.get("sync_each_batch") is None


def test_writing_to_the_shown_options_has_an_effect_or_is_refused():
    accelerator = Accelerator()
    state = accelerator.gradient_state
    state.plugin_kwargs["num_steps"] = 4
    assert accelerator.gradient_accumulation_steps == 4
    state.plugin_kwargs.update({"num_steps": 2, "sync_with_dataloader": False})
    assert (state.num_steps, state.sync_with_dataloader) == (2, False)
    assert state.plugin_kwargs == {"num_steps": 2, "sync_with_dataloader": False}
    with pytest.raises(OptionError, match=r"GradientAccumulationPlugin\(sync_each_batch=True\)"):
        state.plugin_kwargs["sync_each_batch"] = True


def test_gradients_that_are_declared_incomplete_are_not_stepped_with():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = model.weight.detach().clone()

    accelerator.gradient_state._set_sync_gradients(False)
    assert accelerator.sync_gradients is False
    accelerator.backward(model(torch.ones(1, 2)).sum())
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))  # nothing is scaled
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))
    assert torch.equal(model.weight, before)

    accelerator.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 2.0))
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_only_a_truth_value_declares_it(value):
    with pytest.raises(ArgumentTypeError, match=r"_set_sync_gradients\(\) takes True or False"):
        Accelerator().gradient_state._set_sync_gradients(value)


def test_calls_without_arguments_give_the_newest_accelerator():
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()
    with pytest.raises(RuntimeError, match="Create `Accelerator"):
        AcceleratorState()
    first = Accelerator()
    second = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    assert AcceleratorState() is second.state
    assert AcceleratorState().mixed_precision == "bf16"
    assert GradientState().num_steps == 3
    assert AcceleratorState().num_processes == first.num_processes == 1
    gone = weakref.ref(second.strategy)
    del second
    gc.collect()
    assert gone() is None, "its strategy, and the models that this knows, are free"
    state = AcceleratorState()
    assert (state.mixed_precision, state.num_processes) == ("bf16", 1)
    assert is_initialized()
    assert AcceleratorState._shared_state["mixed_precision"] == "bf16"
    with pytest.raises(StateError, match="is gone"):
        _ = state.strategy
    with pytest.raises(RuntimeError, match="Create `Accelerator"):
        GradientState()


def test_clients_may_write_what_a_state_answers():
    state = Accelerator().state
    state.distributed_type = DistributedType.MULTI_CPU
    state.device_mesh = mesh = object()
    assert (state.distributed_type, state.device_mesh) == (DistributedType.MULTI_CPU, mesh)


@pytest.mark.parametrize("arguments", [{"mixed_precision": "bf16"}, {"cpu": True}])
def test_a_state_is_made_by_an_accelerator_only(arguments):
    with pytest.raises(StateError, match=rf"Accelerator\({next(iter(arguments))}=…\)"):
        AcceleratorState(**arguments)


def test_an_unknown_attribute_is_missed_in_the_state_that_was_asked():
    with pytest.raises(AttributeError, match="'AcceleratorState' object has no attribute 'other'"):
        _ = Accelerator(cpu=True).state.other


def test_a_precision_that_is_written_has_no_effect_silently():
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = "no"
    with pytest.raises(OptionError, match=r"set up for 'no'\. Create Accelerator\(mixed_precision='bf16'\)"):
        accelerator.state._mixed_precision = "bf16"
    with pytest.raises(AttributeError):
        accelerator.state.mixed_precision = "bf16"
    assert accelerator.mixed_precision == accelerator.state._mixed_precision == "no"
    assert AcceleratorState._shared_state["_mixed_precision"] == "no"


def test_facts_of_the_process_are_attributes_of_the_class():
    """Tests of clients replace them there."""
    state = Accelerator(cpu=True).state
    for name in ("is_main_process", "is_local_main_process", "is_last_process", "use_distributed"):
        assert isinstance(getattr(AcceleratorState, name), property)
        assert getattr(state, name) is getattr(state.process_state, name)
