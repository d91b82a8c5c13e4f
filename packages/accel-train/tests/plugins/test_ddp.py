"""Options of DDP and of its communication hooks."""

import pytest

from accel_train import DDPCommunicationHookType, DistributedDataParallelKwargs


class Recorder:
    """Stands for a DDP model."""

    def __init__(self):
        self.registered = []

    def register_comm_hook(self, state, hook):
        self.registered.append((state, hook))


def test_options_of_a_communication_hook_need_one():
    with pytest.raises(ValueError, match=r"comm_wrapper='fp16'.*use comm_hook='fp16'"):
        DistributedDataParallelKwargs(comm_wrapper="fp16")
    with pytest.raises(ValueError, match=r"comm_state_option.*comm_hook is 'fp16'"):
        DistributedDataParallelKwargs(comm_hook="fp16", comm_state_option={"matrix_approximation_rank": 1})
    with pytest.raises(
        ValueError, match=r"'rank', which PowerSGDState does not take; it takes matrix_approximation_rank"
    ):
        DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"rank": 1})
    with pytest.raises(ValueError, match=r"comm_state_option=.*Expect `start_powerSGD_iter` > 1"):
        DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 1})
    with pytest.raises(ValueError, match="one of no, fp16, bf16, power_sgd"):
        DistributedDataParallelKwargs(comm_hook="sgd")
    with pytest.raises(ValueError, match="comm_wrapper must be no, fp16 or bf16, got 'power_sgd'"):
        DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="power_sgd")


def test_only_arguments_of_the_constructor_are_passed_on():
    handler = DistributedDataParallelKwargs(comm_hook="fp16", find_unused_parameters=True)
    assert handler.to_kwargs() == {"find_unused_parameters": True}
    assert not any(name.startswith("comm_") for name in handler.to_dict())
    assert DistributedDataParallelKwargs().to_kwargs() == {}


def test_a_hook_is_registered_if_there_is_one():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = Recorder()
    DistributedDataParallelKwargs().register_comm_hook(model)
    assert model.registered == []
    DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16).register_comm_hook(model)
    state, hook = model.registered.pop()
    assert state is None
    assert hook.__name__ != default_hooks.bf16_compress_hook.__name__, "DDP refuses it by name without CUDA"
    DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(model)
    assert model.registered.pop() == (None, default_hooks.fp16_compress_hook)
    DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 3}
    ).register_comm_hook(model)
    state, hook = model.registered.pop()
    assert hook is powerSGD_hook.powerSGD_hook
    assert state.matrix_approximation_rank == 3
    DistributedDataParallelKwargs(comm_hook="power_sgd", comm_wrapper="fp16").register_comm_hook(model)
    assert model.registered.pop()[1] is not powerSGD_hook.powerSGD_hook
