"""Gradients that DDP's reducer did not see: averaged, or an error before the step. The oracle is one big batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

from accel_train.ranks import Ranks
from accel_train.strategies.replicas import differing, differing_rates
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
ROWS = 8  # of each rank
STEPS = 3


class Net(nn.Module):
    """Two heads, one of which a forward can leave out, and a method beside forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.aside = nn.Linear(4, 2)
        self.double()

    def forward(self, x, skip=False):
        h = self.body(x).tanh()
        return self.head(h) if skip else self.head(h) + self.aside(h)

    def compute_loss(self, x):
        return loss_of(self(x))


def loss_of(out):
    return out.square().mean()


def rows(world, step):
    return torch.randn(ROWS * world, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def wrapped(accelerator, model, x):
    accelerator.backward(loss_of(model(x)))


def unwrapped(accelerator, model, x):
    accelerator.backward(loss_of(accelerator.unwrap_model(model)(x)))


def method(accelerator, model, x):
    accelerator.backward(accelerator.unwrap_model(model).compute_loss(x))


def method_of_the_wrapper(accelerator, model, x):
    accelerator.backward(model.compute_loss(x))


def functional(accelerator, model, x):
    plain = accelerator.unwrap_model(model)
    accelerator.backward(loss_of(functional_call(plain, dict(plain.named_parameters()), (x,))))


def two_backwards(accelerator, model, x):
    out = model(x)
    accelerator.backward(out[:, 0].square().mean() / 2, retain_graph=True)
    accelerator.backward(out[:, 1].square().mean() / 2)


def two_forwards(accelerator, model, x):
    first, second = model(x[: ROWS // 2]), model(x[ROWS // 2 :])
    accelerator.backward(loss_of(first) / 2)
    accelerator.backward(loss_of(second) / 2)


def held_forward(accelerator, model, x):
    with accelerator.no_sync(model):
        out = model(x)
    accelerator.backward(loss_of(out))


def in_windows(accelerator, model, x):
    for part in x.chunk(2):
        with accelerator.accumulate(model):
            unwrapped(accelerator, model, part)


def by_items(accelerator, model, x):
    """Micro-batches of 2 and 6 rows, weighed by them."""
    for part in x.split([2, ROWS - 2]):
        with accelerator.accumulate(model):
            out = accelerator.unwrap_model(model)(part)
            accelerator.backward(out.square().sum(), num_items=out.numel())


def clipped(accelerator, model, x):
    unwrapped(accelerator, model, x)
    accelerator.clip_grad_norm_(model.parameters(), 0.05)


def penalised(accelerator, model, x):
    """A penalty that is equal on all ranks needs no average."""
    wrapped(accelerator, model, x)
    accelerator.backward(sum(p.square().sum() for p in model.parameters()))


#: Way, options of the accelerator, options of DDP, whether a warning names it.
WAYS = {
    "wrapped": (wrapped, {}, {}, False),
    "penalised": (penalised, {}, {}, False),
    "unwrapped": (unwrapped, {}, {}, True),
    "method": (method, {}, {}, True),
    "method of the wrapper": (method_of_the_wrapper, {}, {}, True),
    "functional": (functional, {}, {}, True),
    "two backwards": (two_backwards, {}, {}, True),
    "two forwards": (two_forwards, {}, {}, True),
    "held forward": (held_forward, {}, {}, True),
    "windows": (in_windows, {"gradient_accumulation_steps": 2}, {}, True),
    "windows, static": (in_windows, {"gradient_accumulation_steps": 2}, {"static_graph": True}, True),
    "items": (by_items, {"gradient_accumulation_steps": 2}, {}, True),
    "clipped": (clipped, {}, {}, True),
    "unused": (two_backwards, {}, {"find_unused_parameters": True}, True),
    "no views": (two_backwards, {}, {"gradient_as_bucket_view": False}, True),
    "power_sgd": (unwrapped, {}, {"comm_hook": "power_sgd"}, True),
}


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train_every_way():
    from accel_train import Accelerator, DistributedDataParallelKwargs

    found = {}
    for name, (way, options, ddp, _) in WAYS.items():
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**ddp)], **options)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                way(accelerator, model, rows(2, step).chunk(2)[accelerator.process_index])
                optimizer.step()
                optimizer.zero_grad()
        said = [str(w.message) for w in caught if "ddp did not average" in str(w.message)]
        found[name] = said, weights_of(accelerator.unwrap_model(model))
    return found


def one_big_batch(name):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for step in range(STEPS):
        loss_of(model(rows(2, step))).backward()
        if name == "penalised":
            sum(p.square().sum() for p in model.parameters()).backward()
        if name == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_what_came_past_the_reducer_is_averaged_and_named_once():
    first, second = worlds.run(train_every_way, 2)
    for name, (*_, named) in WAYS.items():
        assert first[name][1] == pytest.approx(one_big_batch(name), rel=1e-9), name
        assert second[name][1] == first[name][1], name
        assert len(first[name][0]) == int(named), (name, first[name][0])
        assert not second[name][0], "rank 0 speaks for all"
    assert "was never called" in first["unwrapped"][0][0]
    assert "a second one of one forward" in first["two backwards"][0][0]
    assert "'body.weight'" in first["method"][0][0]


# What cannot be made right


def step(accelerator, model, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def raw_backward(accelerator, model, optimizer, x):
    loss_of(accelerator.unwrap_model(model)(x)).backward()
    optimizer.step()


def own_noise(accelerator, model, optimizer, x):
    accelerator.backward(loss_of(model(x)))
    for parameter in model.parameters():
        parameter.grad.add_(accelerator.process_index)
    optimizer.step()


def added(accelerator, model, optimizer, x):
    step(accelerator, model, optimizer, loss_of(model(x)))
    plain = accelerator.unwrap_model(model)
    plain.adapter = nn.Linear(4, 2).double()
    optimizer.add_param_group({"params": list(plain.adapter.parameters())})
    step(accelerator, model, optimizer, loss_of(model(x) + plain.adapter(x)))


def evaluated(accelerator, model, optimizer, x):
    other = accelerator.prepare_model(Net(), evaluation_mode=True)
    others = accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    step(accelerator, other, others, loss_of(other(x)))


def frozen(accelerator, model, optimizer, x):
    step(accelerator, model, optimizer, loss_of(model(x)))
    accelerator.unwrap_model(model).aside.requires_grad_(False)
    step(accelerator, model, optimizer, loss_of(model(x)))


def branch(accelerator, model, optimizer, x):
    """The first micro-batch takes it, the last one does not."""
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model(x)))
    step(accelerator, model, optimizer, loss_of(model(x, skip=True)))


def cast(accelerator, model, optimizer, x):
    for _ in range(5):
        step(accelerator, model, optimizer, loss_of(model(x)))
    accelerator.unwrap_model(model).float()
    step(accelerator, model, optimizer, loss_of(model(x.float())))


def own_rates(accelerator, model, optimizer, x):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + accelerator.process_index)
    step(accelerator, model, optimizer, loss_of(model(x)))


REFUSED = {
    raw_backward: ("AccumulationError", "the loss went to loss.backward()"),
    own_noise: ("AccumulationError", "gradients were changed after accelerator.backward()"),
    added: ("PrepareError", "'adapter.weight' of Net"),
    evaluated: ("PrepareError", "prepared for evaluation"),
    frozen: ("PrepareError", "'aside.weight' of Net (of 2) was trained when the model was prepared"),
    branch: (
        "PrepareError",
        "2 of 6 parameters of Net took no part in the last backward of this step: aside.weight",
    ),
    cast: ("PrepareError", "Net was cast from torch.float64 to torch.float32 after prepare()"),
    own_rates: (
        "AccumulationError",
        "learning rate of group 0 of SGD is 0.05 on one rank and 0.1 on another",
    ),
}


def refuse_all():
    from accel_train import Accelerator

    found = []
    for way in REFUSED:
        accelerator = Accelerator()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        try:
            way(accelerator, model, optimizer, rows(2, 0).chunk(2)[accelerator.process_index])
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_what_cannot_be_made_right_is_an_error_on_all_ranks_before_the_step():
    for results in worlds.run(refuse_all, 2):
        for way, (kind, text) in zip(REFUSED, results, strict=True):
            assert kind == REFUSED[way][0], (way.__name__, text)
            assert REFUSED[way][1] in text, way.__name__


def changed_and_prepared_again(what):
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = accelerator.unwrap_model(model)
    if what == "frozen":
        plain.aside.requires_grad_(False)
    else:
        torch.manual_seed(accelerator.process_index)
        plain.head = nn.Sequential(plain.head, nn.Linear(2, 2).double())  # another on each rank
        optimizer.add_param_group({"params": list(plain.head[1].parameters())})
    before = weights_of(plain)
    model = accelerator.prepare(model)
    assert accelerator.prepare(model) is model
    for number in range(2):
        step(
            accelerator, model, optimizer, loss_of(model(rows(2, number).chunk(2)[accelerator.process_index]))
        )
    return before, weights_of(plain)


@pytest.mark.parametrize("what", ["frozen", "added"])
def test_a_model_that_changed_is_prepared_again_with_the_weights_of_rank_0(what):
    (_, first), (other, second) = worlds.run(changed_and_prepared_again, 2, what)
    assert first == second
    assert first != other


def shared_encoder():
    from accel_train import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    encoder, one, two = (nn.Linear(4, 4).double() for _ in range(3))
    a, b = nn.Sequential(encoder, one), nn.Sequential(encoder, nn.Tanh(), two)
    a, b = accelerator.prepare(a, b)
    x = rows(2, 0).chunk(2)[accelerator.process_index]
    accelerator.backward(loss_of(a(x)) + loss_of(b(x)))
    return torch.cat([layer.weight.grad.flatten() for layer in (encoder, one, two)]).tolist()


def test_models_that_share_a_module_train_with_one_loss():
    torch.manual_seed(0)
    encoder, one, two = (nn.Linear(4, 4).double() for _ in range(3))
    x = rows(2, 0)
    (loss_of(one(encoder(x))) + loss_of(two(encoder(x).tanh()))).backward()
    expected = torch.cat([layer.weight.grad.flatten() for layer in (encoder, one, two)]).tolist()
    for ours in worlds.run(shared_encoder, 2):
        assert ours == pytest.approx(expected, rel=1e-9)


# Without a world


def test_one_rank_differs_from_nobody():
    gradients = [torch.ones(3), None, torch.full((2,), float("nan")), torch.ones(2, dtype=torch.complex64)]
    assert differing(gradients, Ranks()) == []
    assert differing([], Ranks()) == []
    assert differing_rates(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Ranks()) == []


def compare():
    from accel_train import Accelerator

    accelerator = Accelerator()
    mine = accelerator.process_index
    ranks = accelerator.strategy.loss
    base = torch.linspace(-1, 1, 1000)
    same = [base, base.bfloat16(), torch.full((3,), float("inf")), None]
    nearly = [base * (1 + 1e-8 * mine)]  # another order of a summation
    apart = [base * (1 + 1e-4 * mine), base.roll(mine), base + 1e-3 * mine, base if mine else None]
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, float(mine)], (2,))
    nan = [torch.full((2,), float("nan")) if mine else torch.ones(2), sparse]
    return [[found.place for found in differing(items, ranks)] for items in (same, nearly, apart, nan)]


def test_gradients_are_compared_by_norm_sum_and_presence():
    # The same values in another order have the same norm and sum: no two samples give them.
    assert worlds.run(compare, 2) == [[[], [], [0, 2, 3], [0, 1]]] * 2


def later(kind):
    """From the eighth step on, after an evaluation, the wrapper is left out, or the model was cast."""
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(10):
            used = model if number < 7 or kind == "cast" else accelerator.unwrap_model(model)
            if number == 7 and kind == "cast":
                accelerator.unwrap_model(model).float().double()
            step(
                accelerator,
                model,
                optimizer,
                loss_of(used(rows(2, number).chunk(2)[accelerator.process_index])),
            )
            with torch.no_grad():
                model(rows(1, 0))
    said = [str(warning.message) for warning in caught]
    return said, weights_of(accelerator.unwrap_model(model))


@pytest.mark.parametrize("kind", ["unwrapped", "cast"])
def test_a_reduction_that_is_missing_later_is_found_at_the_first_backward(kind):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(10):
        if number == 7 and kind == "cast":
            model.float().double()
        loss_of(model(rows(2, number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    (said, first), (_, second) = worlds.run(later, 2, kind)
    assert first == second == pytest.approx(weights_of(model), rel=1e-9)
    assert len(said) == 1
    assert "ddp did not average 6 of 6 gradients of Net" in said[0]


def comparisons_of_an_adversary():
    """How often two models that take turns are compared, after the first steps."""
    from accel_train import Accelerator
    from accel_train.strategies import replicas

    accelerator = Accelerator()
    one, two = Net(), Net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, two)]
    one, two, *optimizers = accelerator.prepare(one, two, *optimizers)
    counted = []
    differing = replicas.differing
    replicas.differing = lambda *args: counted.append(1) or differing(*args)
    try:
        for number in range(40):
            if number == 10:
                counted.clear()
            x = rows(2, number).chunk(2)[accelerator.process_index]
            for net, optimizer in zip((one, two), optimizers, strict=True):
                accelerator.backward(loss_of(net(x)))
                optimizer.step()
                if number % 2:
                    optimizer.zero_grad()
    finally:
        replicas.differing = differing
    return len(counted)


def test_models_that_take_turns_are_not_suspected():
    # At the steps 16 and 32 of each optimizer gradients are compared anyway.
    assert worlds.run(comparisons_of_an_adversary, 2) == [4, 4]


def adversaries(unwrapped):
    """A generator whose samples serve both losses; its loss leaves gradients in the critic, which are dropped."""
    from accel_train import Accelerator
    from accel_train.strategies import replicas

    accelerator = Accelerator()
    torch.manual_seed(0)
    nets = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    generator, critic, for_generator, for_critic = accelerator.prepare(*nets, *optimizers)
    counted = []
    differing = replicas.differing
    replicas.differing = lambda *args: counted.append(1) or differing(*args)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(12):
                if number == 9:
                    counted.clear()
                z = rows(2, number).chunk(2)[accelerator.process_index]
                fake = generator(z)
                for_critic.zero_grad()
                accelerator.backward((critic(fake.detach()) - 1).square().mean())
                for_critic.step()
                for_generator.zero_grad()
                judge = accelerator.unwrap_model(critic) if unwrapped else critic
                accelerator.backward(judge(fake).square().mean())
                for_generator.step()
    finally:
        replicas.differing = differing
    return len(counted), weights_of(accelerator.unwrap_model(generator)) + weights_of(
        accelerator.unwrap_model(critic)
    )


@pytest.mark.parametrize(("unwrapped", "comparisons"), [(False, 0), (True, 3)])
def test_a_generator_and_its_critic_train_as_on_one_process_without_a_word(unwrapped, comparisons):
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    for_generator, for_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic))
    for number in range(12):
        fake = generator(rows(2, number))
        for_critic.zero_grad()
        (critic(fake.detach()) - 1).square().mean().backward()
        for_critic.step()
        for_generator.zero_grad()
        critic(fake).square().mean().backward()
        for_generator.step()
    for counted, weights in worlds.run(adversaries, 2, unwrapped):
        assert counted == comparisons  # step 16 is not reached
        assert weights == pytest.approx(weights_of(generator) + weights_of(critic), rel=1e-9)


def local_by_a_hook():
    """Torch's hook for a local SGD, with groups of one rank."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    from accel_train import Accelerator

    accelerator = Accelerator()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
    reference = Net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.3)
    for number in range(3):
        x = rows(2, number).chunk(2)[accelerator.process_index]
        step(accelerator, model, optimizer, loss_of(model(x)))
        plain.zero_grad()
        loss_of(reference(x)).backward()
        plain.step()
    return weights_of(accelerator.unwrap_model(model)), weights_of(reference)


def test_whether_a_hook_of_the_script_averages_is_its_business():
    results = worlds.run(local_by_a_hook, 2)
    for ours, alone in results:
        assert ours == pytest.approx(alone, rel=1e-9)
    assert results[0][0] != results[1][0]


def attributes():
    from accel_train import Accelerator

    accelerator = Accelerator()
    model = Net()
    model.config = {"hidden": 4}
    wrapped = accelerator.prepare(model)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = wrapped.absent
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert repr(wrapped).startswith("DistributedDataParallel(")
    assert not hasattr(wrapped, "absent")
    return wrapped.config, wrapped.head is model.head


def test_attributes_of_the_model_are_read_through_the_wrapper():
    assert worlds.run(attributes, 2) == [({"hidden": 4}, True)] * 2
