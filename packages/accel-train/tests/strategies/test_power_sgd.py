"""Communication hooks of DDP against plain PyTorch, and continuing with what PowerSGD remembers."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DistributedDataParallelKwargs
from testkit import worlds

# Several buckets, which DDP forms anew after its first backward.
MEGABYTES = 0.002
OPTIONS = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
POWER = {"power_sgd": powerSGD_hook.powerSGD_hook, "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook}
WRAPPERS = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
SIMPLE = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))


def samples():
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def renamed(hook):
    """Under a name that DDP does not refuse without CUDA, and one bucket after the other, without which gloo fails."""

    def run(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return run


def plain_hook(comm_hook, comm_wrapper, options):
    hook = SIMPLE.get(comm_hook) or POWER[comm_hook]
    if comm_wrapper != "no":
        hook = WRAPPERS[comm_wrapper](hook)
    state = powerSGD_hook.PowerSGDState(process_group=None, **options) if comm_hook in POWER else None
    return state, renamed(hook)


def plain(comm_hook, comm_wrapper, options, accumulation):
    if comm_hook == "batched_power_sgd":
        # torch's hook passes a matrix to a function that takes a batch of them
        orthogonalize = powerSGD_hook._orthogonalize
        powerSGD_hook._orthogonalize = lambda matrix, epsilon=0: orthogonalize(matrix[None], epsilon)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make(), bucket_cap_mb=MEGABYTES, gradient_as_bucket_view=True)
    model.register_comm_hook(*plain_hook(comm_hook, comm_wrapper, options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [samples()[begin : begin + 4] for begin in range(0, 96, 4)][rank::2]
    for number, (x, y) in enumerate(batches):
        last = (number + 1) % accumulation == 0
        model.require_backward_grad_sync = last
        (nn.functional.mse_loss(model(x), y) / accumulation).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.module.parameters()]


def ours(
    comm_hook, comm_wrapper, options, accumulation, folder=None, stop=None, resume=False, bucket=MEGABYTES
):
    handler = DistributedDataParallelKwargs(
        comm_hook=comm_hook, comm_wrapper=comm_wrapper, comm_state_option=options, bucket_cap_mb=bucket
    )
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, kwargs_handlers=[handler])
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(folder)
    batches = accelerator.skip_first_batches(loader, accelerator.step) if resume else loader
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.step += 1
        if accelerator.step == stop:
            accelerator.save_state(folder)
            return None
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.wide(only=["bf16-no-*", "power_sgd-bf16-*", "batched*-no-*", "batched*-bf16-*"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    ("comm_hook", "comm_wrapper"),
    [("fp16", "no"), ("bf16", "no"), *((hook, wrapper) for hook in POWER for wrapper in ("no", *WRAPPERS))],
)
def test_a_hook_does_what_it_does_in_plain_pytorch_bit_for_bit(comm_hook, comm_wrapper, accumulation):
    options = {**OPTIONS, "orthogonalization_epsilon": 1e-6} if comm_hook == "power_sgd" else {}
    if comm_hook == "batched_power_sgd":  # torch's hook compresses whatever it is given
        options = {"start_powerSGD_iter": 2, "min_compression_rate": 0}
    expected = worlds.run(plain, 2, comm_hook, comm_wrapper, options, accumulation)
    found = worlds.run(ours, 2, comm_hook, comm_wrapper, options, accumulation)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert all(a.isfinite().all() for a in mine)
    uncompressed = worlds.run(ours, 2, "no", "no", {}, accumulation)[0]
    assert not all(torch.equal(a, b) for a, b in zip(found[0], uncompressed, strict=True)), "nothing to see"


@pytest.mark.wide(only=["batched*", "*-3-*"])
@pytest.mark.parametrize("warm_start", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "stop", [pytest.param(1, marks=pytest.mark.full), 2, 3, pytest.param(7, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("comm_hook", "comm_wrapper"), [("power_sgd", "no"), ("batched_power_sgd", "fp16")])
def test_a_run_continues_exactly(tmp_path, comm_hook, comm_wrapper, stop, warm_start):
    folder = str(tmp_path / "state")
    options = {**OPTIONS, "warm_start": warm_start, "orthogonalization_epsilon": 1e-6}
    worlds.run(ours, 2, comm_hook, comm_wrapper, options, 1, folder, stop)
    resumed = worlds.run(ours, 2, comm_hook, comm_wrapper, options, 1, folder, None, True)
    whole = worlds.run(ours, 2, comm_hook, comm_wrapper, options, 1)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.wide), 7])
def test_a_run_continues_exactly_inside_a_window(tmp_path, stop):
    folder = str(tmp_path / "state")
    worlds.run(ours, 2, "power_sgd", "no", OPTIONS, 3, folder, stop)
    resumed = worlds.run(ours, 2, "power_sgd", "no", OPTIONS, 3, folder, None, True)
    for mine, theirs in zip(resumed, worlds.run(ours, 2, "power_sgd", "no", OPTIONS, 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_other_options_are_refused_before_anything_is_loaded(tmp_path):
    folder = str(tmp_path / "state")
    worlds.run(ours, 2, "power_sgd", "no", OPTIONS, 1, folder, 7)
    with pytest.raises(
        worlds.RankError, match=r"StateMismatchError.*its comm_hook has the options.*rank': 2"
    ):
        worlds.run(
            ours, 2, "power_sgd", "no", {**OPTIONS, "matrix_approximation_rank": 1}, 1, folder, 8, True
        )


def alone(folder):
    handler = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=OPTIONS)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(make())
    for _ in range(4):
        accelerator.backward(model(samples()[:4][0]).sum())
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()


def test_the_main_process_alone_has_not_the_errors_of_the_others(tmp_path):
    with pytest.raises(worlds.RankError, match=r"errors of compressed gradients.*on all processes"):
        worlds.run(alone, 2, str(tmp_path / "state"))


def own_hook():
    """A script registers a hook of its own on what prepare() returns."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make())
    calls = []

    def doubled(state, bucket):
        state.append(bucket.index())
        future = default_hooks.allreduce_hook(None, bucket)
        return future.then(
            lambda done: 2 * done.value()[0] if isinstance(done.value(), list) else 2 * done.value()
        )

    model.register_comm_hook(calls, doubled)
    for number in range(2):
        with accelerator.accumulate(model):
            x = samples()[4 * (2 * number + accelerator.process_index) :][0][:4]
            accelerator.backward(model(x).mean())
    return calls, model.module[-1].weight.grad


def test_a_hook_of_the_script_runs_once_per_window():
    model = make()
    model(samples()[:16][0]).mean().backward()
    for calls, gradient in worlds.run(own_hook, 2):
        assert calls == list(range(len(calls)))
        assert calls
        torch.testing.assert_close(gradient, 2 * model[-1].weight.grad)


def elsewhere(strategy):
    from accel_train import IncompatibleOptionsError

    handler = DistributedDataParallelKwargs(comm_hook="power_sgd")
    with pytest.raises(
        IncompatibleOptionsError, match=f"comm_hook='power_sgd'.*strategy '{strategy}' reduces its own"
    ):
        Accelerator(strategy=strategy, kwargs_handlers=[handler])
    Accelerator(strategy=strategy, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=7)])
    return True


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
def test_strategies_that_send_no_gradients_by_ddp_refuse_a_hook_by_name(strategy):
    assert worlds.run(elsewhere, 2, strategy) == [True, True]


def test_one_process_sends_nothing():
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="power_sgd")])
    model = make()
    assert accelerator.prepare(model) is model


def threads():
    """Threads that compute approximations, beside the one that runs backward."""
    found, orthogonalize = set(), powerSGD_hook._orthogonalize

    def note(*arguments):
        found.add(threading.get_ident())
        return orthogonalize(*arguments)

    powerSGD_hook._orthogonalize = note
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=OPTIONS)],
    )
    model = accelerator.prepare(make())
    x, y = samples()[:64]
    for _ in range(12):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
    assert found
    return len(found - {threading.get_ident()})


def test_nothing_is_computed_in_threads_of_gloo():
    """Products of matrices round otherwise there, and which thread computes depended on the network."""
    assert worlds.run(threads, 2) == [0, 0]
