"""Adapters on weights that bitsandbytes has quantised to 4 bits, against plain PyTorch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds
from testkit.adapters import adapter, adapters_of, base, close, optimizer_of, plain, samples, trained

pytest.importorskip("bitsandbytes", reason="hatch run engines:quantization installs it")
pytest.importorskip("peft", reason="hatch run engines:quantization installs it")


def quantised(storage):
    import bitsandbytes
    from peft import get_peft_model

    model = base()
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                new = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.float32,
                    quant_type="nf4",
                    quant_storage=storage,
                )
                new.load_state_dict(child.state_dict())
                setattr(parent, name, new)
    model.to("cpu")  # quantises
    torch.manual_seed(5)
    return get_peft_model(model, adapter(init_lora_weights=False))


def train(strategy, storage, folder):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = quantised(storage)
    model, optimizer = accelerator.prepare(model, optimizer_of(trained(model)))
    seen = steps(accelerator, model, optimizer, 3)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in frozen)
    accelerator.save_state(folder)
    wanted = steps(accelerator, model, optimizer, 2)
    accelerator.load_state(folder)
    assert steps(accelerator, model, optimizer, 2) == wanted
    adapters = adapters_of(accelerator.unwrap_model(model), state)
    return seen, adapters, state, held / sum(p.numel() for p in frozen)


def steps(accelerator, model, optimizer, count):
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


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_adapters_train_on_a_base_of_four_bits(tmp_path, strategy, storage):
    model = quantised(storage)
    wanted = plain(model)
    expected = model.state_dict()
    assert any("quant_state" in name for name in expected)
    for seen, adapters, state, held in worlds.run(
        train, 1 if strategy == "single" else 2, strategy, storage, tmp_path / "state", timeout=120
    ):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
        close(adapters, adapters_of(model), bound=1e-4)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            if "lora" not in name:
                same = torch.equal(
                    state[name].view(torch.uint8), value.view(torch.uint8)
                )  # bytes, of any meaning
                assert same, name
        assert held < 0.55 if strategy == "fsdp2" else held == 1
