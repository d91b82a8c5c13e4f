"""Adapters of PEFT under FSDP2, against plain PyTorch on one process with the batches of all ranks."""

from __future__ import annotations

import copy

import pytest
import torch

from testkit import worlds
from testkit.adapters import adapter, adapters_of, base, close, make, optimizer_of, plain, samples, trained

pytest.importorskip(
    "peft", reason="hatch run engines:peft installs it, and with it Accelerate, which it needs"
)

RANKS = [2, pytest.param(4, marks=pytest.mark.full)]


def steps(accelerator, model, optimizer, count=3):
    """The same on ranks."""
    seen = []
    for step in range(count):
        ids = samples(step).chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((accelerator.reduce(loss.detach(), "mean").item(), norm.item()))
    return seen


def sharded(precision="no", **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    return Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=FullyShardedDataParallelPlugin(**options)
    )


def train(folder, precision="no", dtype=torch.float32, **options):
    accelerator = sharded(precision, **options)
    model = make(dtype)
    optimizer = optimizer_of(trained(model))
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = steps(accelerator, model, optimizer)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    held = sum(p.to_local().numel() for p in frozen) / sum(p.numel() for p in frozen)
    state = accelerator.get_state_dict(model)
    mine = accelerator.unwrap_model(model)
    mine.save_pretrained(folder, state_dict=state, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    return seen, adapters_of(mine, state), state, held


@pytest.mark.parametrize("ranks", RANKS)
def test_t37_adapters_train_and_are_saved_complete_on_any_number_of_ranks(tmp_path, ranks):
    from peft import PeftModel
    from safetensors.torch import load_file

    model = make()
    start = copy.deepcopy(model.state_dict())
    wanted = plain(model)
    expected = adapters_of(model)
    for seen, found, state, held in worlds.run(train, ranks, tmp_path):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
        close(found, expected)
        assert held < 1.1 / ranks, "the frozen weights are divided, too"
        for name, value in start.items():
            if "lora" not in name:
                assert torch.equal(state[name], value), "frozen"
    close(load_file(tmp_path / "adapter_model.safetensors"), expected)
    again = PeftModel.from_pretrained(base(), tmp_path)
    ids = samples()
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_adapters_in_32_bits_on_a_base_in_16(tmp_path, precision):
    """PEFT keeps adapters in float32; the base stays in bfloat16, in memory and in what is saved."""
    model = make(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        wanted = plain(model)
    for seen, found, state, _ in worlds.run(train, 2, tmp_path, precision, torch.bfloat16):
        losses = [[loss for loss, _ in pairs] for pairs in (seen, wanted)]
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-2, atol=1e-2)
        close(found, adapters_of(model), bound=3e-2)
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert {value.dtype for name, value in state.items() if "lora" not in name} == {torch.bfloat16}


def save_and_load(folder):
    accelerator = sharded()
    model = make()
    model, optimizer = accelerator.prepare(model, optimizer_of(trained(model)))
    steps(accelerator, model, optimizer, 2)
    accelerator.save_state(folder)
    wanted = steps(accelerator, model, optimizer, 2)
    accelerator.load_state(folder)
    assert steps(accelerator, model, optimizer, 2) == wanted
    return wanted


def continue_from(folder, kind):
    from accel_train import Accelerator

    accelerator = sharded() if kind == "fsdp2" else Accelerator(cpu=True)
    model = make(r=4)
    for parameter in trained(model):
        torch.nn.init.zeros_(parameter)
    model, optimizer = accelerator.prepare(model, optimizer_of(trained(model)))
    accelerator.load_state(folder)
    return steps(accelerator, model, optimizer, 2)


def test_states_with_adapters_are_loaded_by_other_strategies(tmp_path):
    wanted = worlds.run(save_and_load, 2, tmp_path / "state")[0]
    for kind, ranks in [("single", 1), ("ddp", 2)]:
        for seen in worlds.run(continue_from, ranks, tmp_path / "state", kind):
            torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


# After prepare()


def add_later(folder, when):
    accelerator = sharded()
    model = make()
    model, optimizer = accelerator.prepare(model, optimizer_of(trained(model)))
    if when == "after steps":
        steps(accelerator, model, optimizer, 1)
    torch.manual_seed(100 + accelerator.process_index)  # each rank draws another adapter
    model.add_adapter("second", adapter(init_lora_weights=False, r=2))
    model.set_adapter("second")
    with torch.no_grad():
        model(input_ids=samples())  # a unit stays gathered when the optimizer is built
    optimizer = accelerator.prepare(optimizer_of(trained(model)))
    seen = steps(accelerator, model, optimizer)
    state = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    return seen, state


@pytest.mark.parametrize("when", ["at once", "after steps"])
def test_t39_an_adapter_added_after_sharding_is_the_same_on_all_ranks(tmp_path, when):
    model = make()
    if when == "after steps":
        plain(model, 1)
    torch.manual_seed(100)
    model.add_adapter("second", adapter(init_lora_weights=False, r=2))
    model.set_adapter("second")
    wanted = plain(model)
    expected = model.state_dict()
    for seen, state in worlds.run(add_later, 2, tmp_path / "state", when):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
        close(state, expected)


def add_different():
    from accel_train.errors import PrepareError

    accelerator = sharded()
    model = make()
    model, _ = accelerator.prepare(model, optimizer_of(trained(model)))
    model.add_adapter("second", adapter(r=2 + accelerator.process_index))
    with pytest.raises(PrepareError) as caught:
        model(input_ids=samples())
    return str(caught.value)


def test_t39_different_adapters_are_an_error_on_all_ranks():
    first, second = worlds.run(add_different, 2)
    assert first == second
    assert "names, shapes, dtypes or requires_grad differ" in first


def merge():
    accelerator = sharded()
    model = make()
    model, _ = accelerator.prepare(model, optimizer_of(trained(model)))
    before = model(input_ids=samples()).logits
    merged = model.merge_and_unload()
    after = model(input_ids=samples()).logits
    state = accelerator.get_state_dict(merged)
    return before.detach(), after.detach(), state


def test_adapters_are_merged_into_divided_weights():
    model = make()
    wanted = model.merge_and_unload().state_dict()
    for before, after, state in worlds.run(merge, 2):
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)
        close(state, wanted)
