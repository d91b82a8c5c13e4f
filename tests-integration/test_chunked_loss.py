"""Chunked cross entropy on two ranks, against one process that trains with the whole batch and all logits."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from testkit import worlds
from testkit.float64 import Float64

pytestmark = pytest.mark.usefixtures("kept_ranks")
VOCABULARY, WIDTH = 37, 16
STEPS = 2  # micro-batches of a window
ROWS = 16


def build(kind: str = "Llama") -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def samples() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, 6), generator=torch.Generator().manual_seed(1))


def train(
    accelerator: Any,
    model: nn.Module,
    chunk_size: int | None = 5,
    items: bool = False,
    rows: int = 2,
    exact: bool = True,
) -> Any:
    """Losses of micro-batches and weights afterwards."""
    from accel_train import use_chunked_loss
    from accel_train.losses.pending_logits import PendingLogits

    if chunk_size is not None:
        use_chunked_loss(model, chunk_size=chunk_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = torch.utils.data.DataLoader(samples(), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):
            given = {"num_items_in_batch": 1} if items else {}
            with Float64() if exact else nullcontext():
                outputs = model(input_ids=ids, labels=ids, **given)
            loss = outputs.loss
            assert chunk_size is None or type(outputs.logits) is PendingLogits
            accelerator.backward(loss, **({"num_items": ids[:, 1:].numel()} if items else {}))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def plain(kind: str = "Llama", frozen: str = "nothing") -> dict[str, torch.Tensor]:
    """Weights after training with big batches, of all ranks and micro-batches of a window."""
    model = freeze(build(kind), frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for ids in samples().split(4 * STEPS):
        with Float64():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.to(found[name].dtype), rtol=bound, atol=bound, msg=name)


def head_alone(module: nn.Module) -> bool:
    """The blocks and the head are units of FSDP2 by themselves."""
    return "DecoderLayer" in type(module).__name__ or getattr(module, "out_features", 0) == VOCABULARY


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-unused": {"find_unused_parameters": True},
    "fsdp2": {},
    "fsdp2-reshard": {"reshard_after_forward": True},
    "fsdp2-head": {"auto_wrap_policy": head_alone},
    "fsdp2-whole": {"auto_wrap_policy": "NO_WRAP", "reshard_after_forward": False},
}


def accelerator_of(strategy: str, steps: int = STEPS, **options: Any) -> Any:
    from accel_train import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    given = STRATEGIES[strategy]
    if strategy.startswith("fsdp2"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**given)
    else:
        options["kwargs_handlers"] = [DistributedDataParallelKwargs(**given)]
    return Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)


def trained(strategy: str, kind: str, items: bool, frozen: str = "nothing") -> Any:
    return train(accelerator_of(strategy), freeze(build(kind), frozen), items=items)


def freeze(model: Any, what: str) -> Any:
    """The model with a frozen "head", "body" (all else), or nothing."""
    if what != "nothing":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("lm_head") == (what == "body"))
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("items", [False, True])
def test_training_equals_one_process_with_all_logits(strategy: str, items: bool) -> None:
    wanted = plain()
    for _, weights in worlds.run(trained, 2, strategy, "Llama", items, timeout=200):
        same(weights, wanted)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_tied_head_with_a_soft_cap(strategy: str) -> None:
    wanted = plain("Gemma2")
    for _, weights in worlds.run(trained, 2, strategy, "Gemma2", False, timeout=200):
        same(weights, wanted)


@pytest.mark.parametrize("frozen", ["head", "body"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-head"])
def test_parts_that_are_frozen(strategy: str, frozen: str) -> None:
    wanted = plain("Llama", frozen)
    for _, weights in worlds.run(trained, 2, strategy, "Llama", False, frozen, timeout=200):
        same(weights, wanted)


def test_one_process() -> None:
    same(train(accelerator_of("ddp"), build(), rows=4)[1], plain())


def mixed(strategy: str, chunk_size: int | None) -> Any:
    return train(accelerator_of(strategy, mixed_precision="bf16"), build().float(), chunk_size, exact=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_mixed_precision(strategy: str) -> None:
    """As the same training with all logits, to the precision of its products."""
    found = worlds.run(mixed, 2, strategy, 5, timeout=200)[0]
    wanted = worlds.run(mixed, 2, strategy, None, timeout=200)[0]
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-2, atol=1e-2)
    same(found[1], wanted[1], 5e-3)


def evaluated(strategy: str) -> Any:
    """What is said of logits in training, and the logits of an evaluation between two steps."""
    from accel_train import use_chunked_loss
    from accel_train.errors import LossError

    accelerator, model = accelerator_of(strategy, steps=1), build()
    use_chunked_loss(model, chunk_size=5)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    ids = samples()[2 * accelerator.process_index :][:2]
    for step in range(2):
        with Float64():
            outputs = model(input_ids=ids, labels=ids)
            with pytest.raises(LossError) as error:
                outputs.logits.argmax(-1)
            accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            model.eval()
            with torch.no_grad(), Float64():
                gathered = accelerator.gather_for_metrics((model(input_ids=ids, labels=ids).logits, ids))
            model.train()
    return str(error.value), gathered, accelerator.get_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-reshard", "fsdp2-head"])
def test_an_evaluation_has_logits(strategy: str) -> None:
    model, ids = build(), samples()[:4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(2):
        with Float64():
            outputs = model(input_ids=ids, labels=ids)
            if step == 1:
                logits = outputs.logits.detach()
            outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for said, gathered, weights in worlds.run(evaluated, 2, strategy, timeout=200):
        assert "under torch.no_grad()" in said
        torch.testing.assert_close(gathered, (logits, ids), rtol=1e-12, atol=1e-12)
        same(weights, dict(model.state_dict()))


# The vocabulary is divided among ranks


def divided_loss(options: dict[str, Any], wrapped: bool, bias: bool) -> Any:
    """Loss and gradients of a head that two ranks divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from accel_train import PartialState, chunked_cross_entropy

    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=None if wrapped else ("tp",))
    hidden, weight, offset, labels = head_inputs()
    parts = [distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in (weight, offset)]
    given = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False) if wrapped else hidden
    added = {"bias": parts[1]} if bias else {}
    loss = chunked_cross_entropy(given, parts[0], labels, chunk_size=4, **added, **options)
    loss.backward()
    grads = [hidden.grad, *(part.grad.full_tensor() for part in parts[: 1 + bias])]
    return loss.detach(), grads


def head_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    sizes = ((3, 5, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes]
    labels = torch.randint(VOCABULARY, (3, 5), generator=generator)
    labels[0, :2] = -100
    return (*tensors, labels)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, False),
        ({"reduction": "sum", "label_smoothing": 0.1}, True),
        ({"scale": 0.5, "softcap": 2.0}, False),
    ],
)
def test_a_head_that_is_divided_over_the_vocabulary(
    options: dict[str, Any], bias: bool, wrapped: bool
) -> None:
    hidden, weight, offset, labels = head_inputs()
    logits = F.linear(hidden, weight, offset if bias else None) * options.get("scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    known = {key: options[key] for key in ("reduction", "label_smoothing") if key in options}
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **known)
    grads = torch.autograd.grad(wanted, [hidden, weight, offset][: 2 + bias])
    for loss, found in worlds.run(divided_loss, 2, options, wrapped, bias):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, list(grads), rtol=1e-12, atol=1e-12)


def refused_heads() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from accel_train import PartialState, chunked_cross_entropy

    PartialState(cpu=True)
    named, other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), init_device_mesh("cpu", (2,))
    hidden, weight, bias, labels = (tensor.detach() for tensor in head_inputs())
    rows, part = distribute_tensor(weight, named, [Shard(0)]), distribute_tensor(hidden, named, [Shard(0)])
    wrong = labels.clone()
    wrong[1, 1] = VOCABULARY
    calls: list[tuple[Any, ...]] = [
        (hidden, distribute_tensor(weight, named, [Shard(1)]), labels, None),
        (hidden, distribute_tensor(weight, other, [Shard(0)]), labels, None),
        (part, rows, labels, None),
        (DTensor.from_local(hidden, named, [Replicate()]), weight, labels, None),
        (hidden, rows, labels, bias),
        (hidden, rows, wrong, None),
    ]
    seen = []
    for *arguments, given in calls:
        try:
            seen.append(str(chunked_cross_entropy(*arguments, bias=given)))
        except (RuntimeError, ValueError) as error:
            seen.append(str(error))
    return seen


def test_heads_that_are_divided_otherwise_are_refused() -> None:
    for seen in worlds.run(refused_heads, 2):
        for text, said in zip(
            seen,
            [
                r"expected (Shard(dim=0),)",
                "inside the model's forward",
                "expected Replicate on the mesh of the weight",
                "weight of the head is a whole tensor",
                "its bias is divided in another way",
                f"expected 0 to {VOCABULARY - 1}",
            ],
            strict=True,
        ):
            assert said in text


def tensor_parallel(how: str, layouts: str, kind: str, degrees: dict[str, int]) -> Any:
    from accel_train import Accelerator, ParallelismConfig

    config = ParallelismConfig(**degrees)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=STEPS)
    model = build(kind)
    divide_head(model.lm_head, accelerator.torch_device_mesh["tp"], how, layouts)
    return train(accelerator, model, rows=4 // config.dp_shard_size)


def divide_head(head: nn.Module, mesh: Any, how: str, layouts: str) -> None:
    from torch.distributed.tensor import Replicate, Shard

    outputs = Replicate() if layouts == "whole" else Shard(-1)
    if how == "transformers":  # as from_pretrained(distributed_config=…) does
        from transformers.distributed.tensor_parallel import ColwiseParallel as Style

        style = Style(input_layouts=Replicate(), output_layouts=outputs)
        style.shard_param(head, "weight", mesh)
        style.install_forward(head, mesh)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        style = ColwiseParallel(output_layouts=outputs, use_local_output=layouts == "whole")
        parallelize_module(head, mesh, style)


@pytest.mark.parametrize(
    ("how", "layouts", "kind", "degrees"),
    [
        ("transformers", "whole", "Llama", {"tp_size": 2}),
        ("torch", "whole", "Llama", {"tp_size": 2}),
        ("torch", "divided", "Llama", {"tp_size": 2}),
        ("torch", "whole", "Phi", {"tp_size": 2}),  # its head has a bias
        ("torch", "whole", "Llama", {"dp_shard_size": 2, "tp_size": 2}),
    ],
)
def test_a_model_whose_head_is_divided(how: str, layouts: str, kind: str, degrees: dict[str, int]) -> None:
    wanted = plain(kind)
    ranks = math.prod(degrees.values())
    for _, weights in worlds.run(tensor_parallel, ranks, how, layouts, kind, degrees, timeout=200):
        same(weights, wanted)


def in_parts(degrees: dict[str, int]) -> Any:
    """Weights after training on divided sequences or layers, and how many losses were computed in chunks."""
    from accel_train import Accelerator, ParallelismConfig, use_chunked_loss
    from accel_train.losses import pending_logits

    accelerator, model = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees)), build()
    use_chunked_loss(model, chunk_size=5)
    loader = torch.utils.data.DataLoader(
        [{"input_ids": ids, "labels": ids} for ids in samples()], batch_size=8
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compute = pending_logits.head_cross_entropy
    with mock.patch.object(pending_logits, "head_cross_entropy", side_effect=compute) as chunks:
        for batch in loader:
            with Float64():
                loss = model(**batch).loss
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model), chunks.call_count


@pytest.mark.parametrize(
    ("degrees", "in_chunks"),
    [
        ({"sp_size": 2}, [True, True]),
        ({"pp_size": 2}, [False, True]),  # the last stage computes losses
    ],
)
def test_sequences_or_layers_that_are_divided(degrees: dict[str, int], in_chunks: list[bool]) -> None:
    wanted = plain()
    found = worlds.run(in_parts, 2, degrees, timeout=200)
    for weights, _ in found:
        same(weights, wanted)
    assert [count > 0 for _, count in found] == in_chunks
