"""FSDP2 on two and four ranks, against ddp on the same batches, and against files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(meta=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    return build(LlamaForCausalLM, LlamaConfig(**SMALL, num_hidden_layers=3), meta)


def gpt2(meta=False):
    """Its output layer is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return build(GPT2LMHeadModel, config, meta)


def mixtral(meta=False):
    from transformers import MixtralConfig, MixtralForCausalLM

    return build(MixtralForCausalLM, MixtralConfig(**SMALL, num_hidden_layers=2, num_local_experts=4), meta)


def build(kind, config, meta):
    if meta:
        from accel_bigmodel import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return kind(config)
    torch.manual_seed(0)
    return kind(config)


def prepared(make, strategy="fsdp2", precision="no", **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**options) if strategy == "fsdp2" else None
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def batch(accelerator):
    return torch.arange(40).view(4, 10) % VOCABULARY + accelerator.process_index * 7


def steps(accelerator, model, optimizer, count=3):
    """Mean losses and norms."""
    ids = batch(accelerator)
    seen = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert type(norm) is torch.Tensor
        optimizer.step()
        optimizer.zero_grad()
        seen.append((accelerator.reduce(loss.detach(), "mean").item(), norm.item()))
    return seen


def train(make, evaluate=None, **options):
    accelerator, model, optimizer = prepared(make, **options)
    if evaluate is not None:
        with evaluate():
            model(input_ids=batch(accelerator))
    seen = steps(accelerator, model, optimizer)
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    return seen, accelerator.get_state_dict(model), held


_EXPECTED: dict[object, object] = {}


def expected(make, ranks=2):
    """What ddp reaches; each model is trained once."""
    if (make, ranks) not in _EXPECTED:
        _EXPECTED[make, ranks] = worlds.run(train, ranks, make, strategy="ddp")[0]
    return _EXPECTED[make, ranks]


def check(results, wanted, bound=1e-6):
    losses, weights, _ = wanted
    for seen, found, _ in results:
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(losses), rtol=bound, atol=bound)
        assert found.keys() == weights.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=bound, atol=max(bound, 1e-5), msg=name)


@pytest.mark.parametrize(
    "make",
    [llama, *(pytest.param(make, marks=pytest.mark.full) for make in (gpt2, mixtral))],
    ids=lambda make: make.__name__,
)
def test_t28_models_of_transformers_train_as_with_ddp(make):
    results = worlds.run(train, 2, make)
    check(results, expected(make))
    assert all(held < 0.55 for *_, held in results), "each rank holds about half"


OPTIONS = {
    "keep gathered": {"reshard_after_forward": False},
    "checkpointing": {"activation_checkpointing": True},
    "offloaded checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
    },
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "prefetch": {"forward_prefetch": True},
    "one unit": {"auto_wrap_policy": "no_wrap"},
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 2000},
    "version 1": {
        "fsdp_version": 1,
        "sharding_strategy": "SHARD_GRAD_OP",
        "backward_prefetch": "NO_PREFETCH",
    },
    "ignored": {"ignored_modules": r"model\.embed_tokens"},
    "own start": {"sync_module_states": False},
}


FEW = {"checkpointing", "offload"}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in OPTIONS]
)
def test_options_change_no_result(name):
    check(worlds.run(train, 2, llama, **OPTIONS[name]), expected(llama))


def eager():
    """Its attention notices keys that were appended to the cache twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, num_hidden_layers=2, attn_implementation="eager")
    return build(LlamaForCausalLM, config, False)


@pytest.mark.full
def test_recomputed_blocks_cache_nothing():
    check(worlds.run(train, 2, eager, activation_checkpointing=True), expected(eager))


@pytest.mark.full
def test_replicas_of_sharded_models():
    results = worlds.run(train, 4, llama, dp_replicate_size=2)
    check(results, expected(llama, 4))
    assert all(held < 0.55 for *_, held in results), "two replicas, each divided among two"


def on_two_machines(strategy_name):
    """The ranks' environment says that two of them are on each machine."""
    import os

    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
    os.environ["GROUP_WORLD_SIZE"] = "2"
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(sharding_strategy=strategy_name)
    mesh = Accelerator(fsdp_plugin=plugin).strategy.options.mesh.device_mesh
    replicas = mesh["dp_replicate"].mesh.tolist(), mesh["dp_shard"].mesh.tolist()
    return *replicas, *train(llama, sharding_strategy=strategy_name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrid_sharding_keeps_a_replica_on_each_machine(name):
    found = worlds.run(on_two_machines, 4, name)
    check([result[2:] for result in found], expected(llama, 4))
    for rank, (replicas, shards, _, _, held) in enumerate(found):
        assert replicas == [rank % 2, rank % 2 + 2]
        assert shards == [rank // 2 * 2, rank // 2 * 2 + 1], "the ranks of one machine"
        assert held < 0.55


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_precision(precision):
    wanted = worlds.run(train, 2, llama, strategy="ddp", precision=precision)[0]
    results = worlds.run(train, 2, llama, precision=precision)
    for seen, weights, _ in results:
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted[0]), rtol=2e-2, atol=2e-2)
        assert {value.dtype for value in weights.values()} == {torch.float32}


def in_half():
    return llama().to(torch.bfloat16)


def test_trained_parameters_of_16_bits_are_kept_in_32():
    rounded = lambda: in_half().float()  # noqa: E731
    wanted = worlds.run(train, 2, rounded, precision="bf16")
    found = worlds.run(train, 2, in_half, precision="bf16")
    for (seen, weights, _), (other, same, _) in zip(found, wanted, strict=True):
        assert seen == other
        for name, value in weights.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, same[name])
    unmixed = worlds.run(train, 2, in_half)[0][1]
    assert {value.dtype for value in unmixed.values()} == {torch.bfloat16}


@pytest.mark.parametrize("mode", [pytest.param(torch.no_grad, marks=pytest.mark.full), torch.inference_mode])
def test_t40_evaluation_comes_before_training(mode):
    check(worlds.run(train, 2, llama, evaluate=mode), expected(llama))


# Where the weights come from


def only_rank_0():
    import torch.distributed as dist

    return llama(meta=dist.get_rank() != 0)


def test_rank_0_has_the_weights_and_sends_them():
    check(worlds.run(train, 2, only_rank_0, cpu_ram_efficient_loading=True), expected(llama))


def read_by_rank_0(folder):
    from transformers import LlamaForCausalLM
    from transformers.modeling_utils import is_fsdp_enabled

    from accel_train import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading

    enable_fsdp_ram_efficient_loading()
    assert is_fsdp_enabled()
    disable_fsdp_ram_efficient_loading()
    assert not is_fsdp_enabled()
    enable_fsdp_ram_efficient_loading()
    return LlamaForCausalLM.from_pretrained(folder)


def test_from_pretrained_is_told_that_rank_0_reads(tmp_path):
    llama().save_pretrained(tmp_path)
    check(worlds.run(train, 2, lambda: read_by_rank_0(tmp_path)), expected(llama))


@pytest.mark.parametrize(
    "make", [llama, pytest.param(gpt2, marks=pytest.mark.full)], ids=lambda make: make.__name__
)
def test_each_rank_reads_its_parts_from_files(make, tmp_path):
    make().save_pretrained(tmp_path)
    results = worlds.run(train, 2, lambda: make(meta=True), checkpoint=str(tmp_path))
    check(results, expected(make))


class Norm(nn.Module):
    """Parameters, and no way to make their values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)


def started(make, **options):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    torch.manual_seed(accelerator.process_index)
    with torch.device("meta"):
        model = make()
    return accelerator.get_state_dict(accelerator.prepare(model))


def test_modules_make_their_values_where_nobody_has_any():
    first, second = worlds.run(started, 2, lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(first[name], value)
        torch.testing.assert_close(second[name], value)


def ignored_on_meta():
    from accel_ckpt.parts import is_sharded
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="1"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    model = accelerator.prepare(model)
    return [is_sharded(parameter) for parameter in model.parameters()]


def test_ignored_modules_stay_whole_when_their_values_are_made():
    assert worlds.run(ignored_on_meta, 2) == [[True, True, False, False]] * 2


def ones(module):
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def test_a_function_of_the_script_makes_values():
    for state in worlds.run(started, 2, Norm, param_init_fn=ones):
        assert torch.equal(state["weight"], torch.ones(4))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Norm, {}, "Norm has parameters on the meta device and no reset_parameters.*checkpoint="),
        (Table, {"checkpoint": "nowhere"}, "buffer table is on the meta device.*include_buffers=False"),
    ],
)
def test_values_that_nothing_gives_are_refused(make, options, message):
    with pytest.raises(worlds.RankError, match=f"PrepareError.*{message}"):
        worlds.run(started, 2, make, **options)


def only_rank_1():
    import torch.distributed as dist

    return llama(meta=dist.get_rank() == 0)


def test_weights_that_only_another_rank_has_are_not_lost():
    with pytest.raises(
        worlds.RankError, match=r"PrepareError.*has values on rank 1.*Load the weights on rank 0"
    ):
        worlds.run(train, 2, only_rank_1)


def prepare_different():
    from accel_train import Accelerator, FullyShardedDataParallelPlugin
    from accel_train.errors import PrepareError

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(PrepareError) as caught:
        accelerator.prepare(nn.Linear(4, 4 + accelerator.process_index))
    return str(caught.value)


def test_t39_models_that_differ_are_an_error_on_all_ranks():
    first, second = worlds.run(prepare_different, 2)
    assert first == second
    assert "rank 1 (Linear): names, shapes, dtypes or requires_grad differ" in first


# Models that the script has divided


def shard_alone(strategy, accumulation, whole):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from accel_train import Accelerator

    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=accumulation)
    model = llama()
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if not whole:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    again, optimizer = accelerator.prepare(model, optimizer)
    assert again is model
    assert isinstance(again, FSDPModule) != whole
    assert {parameter.device for parameter in model.parameters()} == {accelerator.device}
    return windows(accelerator, model, optimizer)


def windows(accelerator, model, optimizer):
    """Four micro-batches, and the weights after them."""
    ids = batch(accelerator).to(accelerator.device)
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=(ids + number) % VOCABULARY, labels=ids).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def replicated(accumulation):
    from accel_train import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return windows(accelerator, model, optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("whole", [False, pytest.param(True, id="whole layers around")])
def test_a_model_that_the_script_has_sharded_is_taken_as_it_is(strategy, accumulation, whole):
    if whole and strategy == "ddp":
        with pytest.raises(worlds.RankError, match=r"except 'model\.embed_tokens\.weight' \(the first of \d"):
            worlds.run(shard_alone, 2, strategy, accumulation, whole)
        return
    wanted = worlds.run(replicated, 2, accumulation)[0]
    for found in worlds.run(shard_alone, 2, strategy, accumulation, whole):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


def tensor_parallel(strategy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from accel_train import Accelerator

    accelerator = Accelerator(strategy=strategy)
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    accelerator.prepare(parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_tensor_parallel_ranks_that_would_read_different_samples_are_refused(strategy):
    with pytest.raises(worlds.RankError, match=r"PrepareError.*'0\.weight' is a DTensor.*the same samples"):
        worlds.run(tensor_parallel, 2, strategy)


# State


def save_and_load(make, folder):
    accelerator, model, optimizer = prepared(make)
    steps(accelerator, model, optimizer, 1)
    model(input_ids=batch(accelerator))  # leaves the outermost unit gathered
    accelerator.save_state(folder / "state")
    wanted = steps(accelerator, model, optimizer, 2)
    accelerator.save_model(model, folder / "model")
    weights = accelerator.get_state_dict(model)
    accelerator.load_state(folder / "state")
    return steps(accelerator, model, optimizer, 2) == wanted, weights


def test_states_are_loaded_and_saved_models_are_transformers_own(tmp_path):
    from safetensors.torch import load_file

    (first, weights), (second, _) = worlds.run(save_and_load, 2, gpt2, tmp_path)
    assert first
    assert second
    written = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in written.items():
        assert torch.equal(value, weights[name])
    parts = [load_file(path) for path in sorted((tmp_path / "state").glob("model-shard-*"))]
    assert len(parts) == 2
    for part in parts:
        assert all(value.numel() < weights["transformer.wte.weight"].numel() for value in part.values())


def compiled(strategy, regional):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, TorchDynamoPlugin

    accelerator = Accelerator(
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional),
        fsdp_plugin=FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None,
    )
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(accelerator, model, optimizer), accelerator.get_state_dict(model), 0.0


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.full
def test_compiled(regional):
    check(worlds.run(compiled, 2, "fsdp2", regional), expected(llama), bound=1e-4)


def frozen_body():
    model = llama()
    model.model.layers.requires_grad_(False)
    return model


def test_frozen_parts():
    check(worlds.run(train, 2, frozen_body), expected(frozen_body))
