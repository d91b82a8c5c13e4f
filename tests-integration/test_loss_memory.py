"""What a loss takes: with all logits, and in chunks. Resident memory of a process that gives freed memory back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from testkit import worlds
from testkit.memory import freed_at_once, growth

TOKENS, VOCABULARY, WIDTH = 4096, 32_000, 64
MB = 1 << 20
LOGITS = TOKENS * VOCABULARY * 4


def peaks() -> dict[str, int]:
    """The most that forward and backward take, in bytes; the second call, when what is kept exists."""
    from accel_train import chunked_cross_entropy

    def plain(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy(F.linear(hidden, weight), labels)

    def chunked(hidden: Any, weight: Any, labels: Any) -> Any:
        return chunked_cross_entropy(hidden, weight, labels, chunk_size=256)

    freed_at_once()
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    found = {}
    for function in (chunked, plain):
        function(hidden[:8], weight, labels[:8]).backward()
        with growth() as grown:
            function(hidden, weight, labels).backward()
        found[function.__name__] = grown.peak
    return found


@pytest.mark.wide
def test_a_chunked_loss_takes_a_small_part_of_the_logits() -> None:
    (found,) = worlds.run(peaks, 1, timeout=280)
    print({name: f"{value / MB:.0f} MB" for name, value in found.items()}, f"logits: {LOGITS / MB:.0f} MB")
    assert found["plain"] > 2.5 * LOGITS
    assert found["chunked"] < LOGITS / 6


def model_peaks() -> dict[str, int]:
    """Of a step of a small model."""
    import transformers

    from accel_train import use_chunked_loss

    freed_at_once()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(VOCABULARY, (8, TOKENS // 8))
    found = {}
    for name in ("chunked", "plain"):
        handle = use_chunked_loss(model, chunk_size=256)
        if name == "plain":
            handle.remove()
        model(input_ids=ids[:, :8], labels=ids[:, :8]).loss.backward()
        with growth() as grown:
            model(input_ids=ids, labels=ids).loss.backward()
        found[name] = grown.peak
        handle.remove()
    return found


@pytest.mark.wide
def test_a_model_with_a_chunked_loss_never_holds_its_logits() -> None:
    (found,) = worlds.run(model_peaks, 1, timeout=280)
    print({name: f"{value / MB:.0f} MB" for name, value in found.items()}, f"logits: {LOGITS / MB:.0f} MB")
    assert found["plain"] > 2.5 * LOGITS
    assert found["chunked"] < LOGITS / 4
