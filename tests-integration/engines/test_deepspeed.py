"""Training with the real DeepSpeed: against the engine driven by hand, and against plain PyTorch.

`hatch run engines:deepspeed` also runs the conformance suite with every ZeRO stage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

STAGES = [0, 1, 2, 3]
ROWS, BATCH = 24, 2


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model: nn.Module, accelerator: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def plugin_of(stage: int, **more: Any) -> Any:
    from accel_train import DeepSpeedPlugin

    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto", **more}
    return DeepSpeedPlugin(hf_ds_config=config)


def by_accelerator(stage: int, precision: str, accumulation: int, clip: float | None) -> Any:
    """Losses, norms and weights of two epochs; the loader's last window is short."""
    from accel_train import Accelerator

    accelerator = Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin_of(stage), gradient_accumulation_steps=accumulation
    )
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), DataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    )
    losses, norms = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients and clip is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
    return losses, norms, whole(model, accelerator)


def by_hand(stage: int, precision: str, accumulation: int, clip: float | None) -> Any:
    """The same with DeepSpeed's own calls, which clip as configured."""
    import deepspeed
    import torch.distributed as dist

    from accel_state import PartialState

    rank = PartialState().process_index
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip or 0.0,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    x, y = make_data()
    losses, norms = [], []
    for _ in range(2):
        micro = [slice(start, start + BATCH) for start in range(0, ROWS, BATCH)][rank :: dist.get_world_size()]
        for first in range(0, len(micro), accumulation):
            window = micro[first : first + accumulation]
            for rows in window:
                loss = ((engine(x[rows].to(dtype)).float() - y[rows]) ** 2).mean()
                losses.append(loss.item())
                engine.backward(loss / len(window), scale_wrt_gas=False)
            engine.step()
            if clip is not None and engine.get_global_grad_norm() is not None:
                norms.append(float(engine.get_global_grad_norm()))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, norms, weights


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_engine_computes_what_it_computes_by_hand(stage, precision, clip):
    """But for roundings: of tensors at other addresses, and of a clipping factor that is applied elsewhere."""
    ours = worlds.run(by_accelerator, 2, stage, precision, 4, clip)
    theirs = worlds.run(by_hand, 2, stage, precision, 4, clip)
    bound = 1e-6 if precision == "no" else 1e-2
    for (losses, norms, weights), (raw_losses, raw_norms, raw_weights) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(losses, raw_losses, rtol=bound, atol=bound)
        if raw_norms:
            torch.testing.assert_close(norms, raw_norms, rtol=bound, atol=bound)
        for name, raw in raw_weights.items():
            torch.testing.assert_close(weights[name].to(raw.dtype), raw, rtol=bound, atol=bound)
