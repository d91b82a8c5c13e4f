"""Models divided into stages of a pipeline train as on one process, which computes all samples in float64."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds
from testkit.language_models import config_of, ids

pytestmark = pytest.mark.usefixtures("kept_ranks")
FEATURES, ROWS, STEPS = 6, 8, 3


def chain(layers: int = 8) -> nn.Sequential:
    """Layers that differ in shape and in what they compute."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh() if index % 2 else nn.LayerNorm(FEATURES))
            for index in range(layers)
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.double()


def batches(replicas: int, steps: int = STEPS, windows: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    count = steps * windows * replicas * ROWS
    return torch.randn(count, FEATURES, dtype=torch.float64), torch.randn(
        count, FEATURES, dtype=torch.float64
    )


def one_process(replicas: int, windows: int = 1) -> dict:
    """The oracle: plain PyTorch, one batch of all ranks' samples for each step."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, targets = batches(replicas, windows=windows)
    losses, norms = [], []
    for x, y in zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    with torch.no_grad():
        last = model(inputs[:ROWS])
    return {"losses": losses, "norms": norms, "weights": model.state_dict(), "output": last}


def train(
    degrees: dict,
    handler: dict,
    windows: int = 1,
    inside: bool = False,
    tp: bool = False,
    plugin: dict | None = None,
    meta: bool = False,
) -> dict:
    """The same with stages: what every rank sees."""
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    if inside:
        handler = {**handler, "loss_function": nn.functional.mse_loss}
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=windows,
        parallelism_config=ParallelismConfig(**degrees, pp_handler=PipelineParallelConfig(**handler)),
        fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin),
    )
    model = chain().to("meta") if meta else chain()
    if tp:
        divide_layers(model, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicas = degrees.get("dp_replicate_size", 1) * degrees.get("dp_shard_size", 1)
    inputs, targets = batches(replicas, windows=windows)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, seen = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, target=y) if inside else nn.functional.mse_loss(model(x), y)
            loss = loss.loss if inside else loss
            accelerator.backward(loss)
            seen.append(float(accelerator.reduce(loss.detach(), "mean")))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                losses.append(sum(seen) / len(seen))
                seen = []
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        output = model(inputs[:ROWS])
    own = sum(p.numel() for p in model.parameters())
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": weights, "output": output, "own": own}


def assert_equal(ranks: list[dict], expected: dict, within: float = 1e-9) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=within, atol=within)
        torch.testing.assert_close(rank["norms"], expected["norms"], rtol=within, atol=within)
        torch.testing.assert_close(rank["output"], expected["output"], rtol=within, atol=within)
        assert list(rank["weights"]) == list(expected["weights"])
        torch.testing.assert_close(dict(rank["weights"]), dict(expected["weights"]), rtol=within, atol=within)


SHARDED = {"pp_size": 2, "dp_shard_size": 2}
LINEARS: dict = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 40}
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(schedule: str) -> None:
    ranks = worlds.run(train, 2, {"pp_size": 2}, {"schedule": schedule, "num_micro_batches": 4}, inside=True)
    assert_equal(ranks, one_process(1))
    assert all(rank["own"] < 0.7 * sum(p.numel() for p in chain().parameters()) for rank in ranks)


@pytest.mark.parametrize(
    "reshard", [True, pytest.param(False, marks=pytest.mark.full)], ids=["gathers again", "keeps gathered"]
)
@pytest.mark.parametrize(
    "schedule",
    [name if "zero" in name else pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES],
)
def test_every_schedule_with_sharded_stages(schedule: str, reshard: bool) -> None:
    """A window of two batches. Zero bubbles compute the gradients of weights apart from those of inputs."""
    ranks = worlds.run(
        train,
        4,
        SHARDED,
        {"schedule": schedule, "num_micro_batches": 4},
        windows=2,
        inside=True,
        plugin={**LINEARS, "reshard_after_forward": reshard},
    )
    assert_equal(ranks, one_process(2, windows=2))


def test_the_script_computes_the_loss() -> None:
    assert_equal(worlds.run(train, 2, {"pp_size": 2}, {}), one_process(1))


@pytest.mark.parametrize("inside", [False, True], ids=["loss of the script", "loss of the last stage"])
@pytest.mark.parametrize("degrees", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}], ids=["ddp", "fsdp2"])
def test_stages_of_replicas_and_of_sharded_parameters(degrees: dict, inside: bool) -> None:
    assert_equal(worlds.run(train, 4, {"pp_size": 2, **degrees}, {}, inside=inside), one_process(2))


@pytest.mark.wide(but=["ddp-loss of the script", "fsdp2-loss of the last stage"])
@pytest.mark.parametrize("inside", [False, True], ids=["loss of the script", "loss of the last stage"])
@pytest.mark.parametrize("degrees", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}], ids=["ddp", "fsdp2"])
def test_windows(degrees: dict, inside: bool) -> None:
    ranks = worlds.run(train, 4, {"pp_size": 2, **degrees}, {}, windows=2, inside=inside)
    assert_equal(ranks, one_process(2, windows=2))


def test_stages_of_divided_tensors() -> None:
    assert_equal(worlds.run(train, 4, {"pp_size": 2, "tp_size": 2}, {}, tp=True), one_process(1))


PLUGINS = {
    "prefetch, checkpointing, offload": {
        **LINEARS,
        "forward_prefetch": True,
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
        "cpu_offload": True,
    },
    "keep gathered": {"reshard_after_forward": False},
    "selective checkpointing": {"activation_checkpointing": "selective", **LINEARS},
    "one unit": {"auto_wrap_policy": "no_wrap"},
    "ignored": {"ignored_modules": r"2(\..*)?"},
    "own start": {"sync_module_states": False},
}
FEW = {"prefetch, checkpointing, offload"}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in PLUGINS]
)
def test_options_of_fsdp_change_no_result(name: str) -> None:
    assert_equal(worlds.run(train, 4, SHARDED, {}, plugin=PLUGINS[name]), one_process(2))


def divided(plugin: dict):
    """The stages of this rank of a chain whose ranks begin with different values, and the chain as it was."""
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**SHARDED),
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
    )
    model = chain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += accelerator.process_index
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = accelerator.prepare(model)
    return accelerator, model, engine, before


def prefetched() -> list[int]:
    _, _, engine, _ = divided({"forward_prefetch": True, **LINEARS})
    units = [module for module in engine.modules() if hasattr(module, "_get_fsdp_state")]
    return [len(unit._get_fsdp_state()._states_to_forward_prefetch) for unit in units]


def recomputed() -> tuple[list[bool], list[object]]:
    from accel_train.strategies.fsdp2.activations import CheckpointedForward

    options = {"activation_checkpointing": "selective", "activation_checkpointing_offload": True, **LINEARS}
    _, model, _, _ = divided(options)
    found = [block[0].forward for block in model if isinstance(block, nn.Sequential)]
    return [isinstance(each, CheckpointedForward) and each.offload for each in found], [
        getattr(each, "policy", None) for each in found
    ]


def own_start(syncs: bool) -> bool:
    """Whether this rank's parts are those of its own model, not of rank 0's."""
    accelerator, model, _, before = divided({"sync_module_states": syncs})
    place = accelerator.process_index % 2
    return all(
        torch.equal(parameter.to_local(), before[name].chunk(2)[place])
        for name, parameter in model.named_parameters()
    )


@pytest.mark.wide
def test_options_of_fsdp_have_their_effect() -> None:
    assert all(sum(counts) == 3 for counts in worlds.run(prefetched, 4)), "four units, each gathers the next"
    for offloads, policies in worlds.run(recomputed, 4):
        assert offloads == [True] * 4
        assert all(policies)
    assert worlds.run(own_start, 4, False) == [True] * 4
    assert worlds.run(own_start, 4, True) == [True, False, False, False]


# Models on the meta device


@pytest.mark.parametrize(
    ("ranks", "degrees", "sharded"),
    [
        (2, {"pp_size": 2}, False),
        pytest.param(4, SHARDED, True, marks=pytest.mark.full),
    ],
    ids=["whole", "sharded"],
)
def test_ranks_read_the_weights_of_their_stages(tmp_path, ranks: int, degrees: dict, sharded: bool) -> None:
    from accel_ckpt import save_model

    save_model(chain(), tmp_path)
    files = {"checkpoint": str(tmp_path)}
    found = worlds.run(
        train, ranks, degrees, {} if sharded else files, plugin=files if sharded else None, meta=True
    )
    assert_equal(found, one_process(ranks // 2))


def made_on_meta(handler: dict, degrees: dict, plugin: dict | None = None) -> dict:
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**degrees, pp_handler=PipelineParallelConfig(**handler)),
        fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin),
    )
    model = chain().to("meta")
    torch.manual_seed(accelerator.process_index)
    return dict(accelerator.get_state_dict(accelerator.prepare(model)))


def in_order(model: nn.Module) -> nn.Module:
    """What modules make by themselves, in the order of the model."""
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def halves(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def test_modules_make_the_values_of_one_process() -> None:
    expected = dict(in_order(chain()).state_dict())
    for weights in worlds.run(made_on_meta, 2, {}, {"pp_size": 2}):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "handler", "degrees", "plugin"),
    [
        (2, {"param_init_fn": halves}, {"pp_size": 2}, None),
        pytest.param(4, {}, SHARDED, {"param_init_fn": halves}, marks=pytest.mark.full),
    ],
    ids=["whole", "sharded"],
)
def test_a_function_makes_values(ranks: int, handler: dict, degrees: dict, plugin: dict | None) -> None:
    for weights in worlds.run(made_on_meta, ranks, handler, degrees, plugin):
        assert weights.keys() == chain().state_dict().keys()
        assert all(torch.all(value == 0.5) for value in weights.values())


def only_rank_0_has_values() -> dict:
    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = chain() if accelerator.is_main_process else chain().to("meta")
    return dict(accelerator.get_state_dict(accelerator.prepare(model)))


def test_rank_0_sends_its_values() -> None:
    for weights in worlds.run(only_rank_0_has_values, 2):
        torch.testing.assert_close(weights, dict(chain().state_dict()), rtol=0, atol=0)


def memory_of_a_start(folder: str | None) -> tuple[int, int]:
    """The most bytes on the device while a model gets its values, and those of this rank's stage."""
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig
    from testkit import simulated_device

    simulated_device.use("npu:4")
    handler = PipelineParallelConfig(checkpoint=None if folder == "real" else folder)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    with torch.device("cpu" if folder == "real" else "meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return torch.accelerator.max_memory_allocated(), sum(p.nbytes for p in model.parameters())


@pytest.mark.simulated
@pytest.mark.parametrize("origin", ["files", "modules", "real"])
def test_a_device_never_holds_the_whole_model(tmp_path, origin: str) -> None:
    from accel_ckpt import save_model

    save_model(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), tmp_path)
    folder = {"files": str(tmp_path), "modules": None, "real": "real"}[origin]
    environ = {"ACCELERATE_USE_CPU": "false"}
    for most, own in worlds.run(memory_of_a_start, 2, folder, environ=environ):
        assert own <= most < 1.1 * own


def most_layers_alive(degrees: dict, handler: dict) -> int:
    """How many layers have values at most while modules make them."""
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig
    from accel_train.strategies.fsdp2 import initial_values

    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0
    plain = initial_values._materialise

    def observed(modules, device):
        nonlocal most
        found = plain(modules, device)
        alive.update(module for module in found if isinstance(module, nn.Linear))
        most = max(most, len(alive))
        return found

    initial_values._materialise = observed
    stages = PipelineParallelConfig(**handler)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees, pp_handler=stages))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return most


@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "handler", "most"),
    [({"pp_size": 4}, {}, 4), (SHARDED, {"schedule": "interleaved_1f1b"}, 6)],
    ids=["whole", "sharded"],
)
def test_a_rank_makes_one_stage_after_the_other(degrees: dict, handler: dict, most: int) -> None:
    """Of eight layers in four stages it has its own, and those of one stage of another rank."""
    assert max(worlds.run(most_layers_alive, 4, degrees, handler)) == most


def zero_grad_before_backward() -> bool:
    """As PyTorch's tutorials write it; whether the weights of this rank changed."""
    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = chain()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.ones(ROWS, FEATURES, dtype=torch.float64)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_zero_grad_between_forward_and_backward() -> None:
    assert all(worlds.run(zero_grad_before_backward, 2))


def evaluated_averages() -> tuple[Tensor, dict]:
    """What a rank computes in evaluation after training on samples of its own, and the saved weights."""
    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, dp_replicate_size=2))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.strategy.batch.index)
    accelerator.backward(model(torch.randn(8, 4, dtype=torch.float64)).square().mean())
    optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 4, dtype=torch.float64))
    return output, dict(accelerator.get_state_dict(model))


def test_replicas_evaluate_with_the_averages_that_are_saved() -> None:
    ranks = worlds.run(evaluated_averages, 4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))).double()
    model.load_state_dict(ranks[0][1])
    expected = model.eval()(torch.ones(2, 4, dtype=torch.float64)).detach()
    for output, _ in ranks:
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


# States


def started(degrees: dict | None, handler: dict | None = None):
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    parallelism = None
    if degrees is not None:
        pipeline = PipelineParallelConfig(**(handler or {})) if "pp_size" in degrees else None
        parallelism = ParallelismConfig(**degrees, pp_handler=pipeline)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
    model = chain()
    groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3:].parameters()), "lr": 0.02}]
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.05)))


def steps(accelerator, model, optimizer, first: int, last: int) -> None:
    ranks = accelerator.strategy.batch
    inputs, targets = batches(2, steps=4)
    for step in range(first, last):
        rows = slice(step * 2 * ROWS, (step + 1) * 2 * ROWS)
        x, y = (whole[rows].chunk(ranks.size)[ranks.index] for whole in (inputs, targets))
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def half(folder, degrees, handler=None):
    accelerator, model, optimizer = started(degrees, handler)
    steps(accelerator, model, optimizer, 0, 2)
    accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")
    return accelerator.get_state_dict(model)


def rest(folder, degrees, handler=None):
    accelerator, model, optimizer = started(degrees, handler)
    accelerator.load_state(folder / "state")
    steps(accelerator, model, optimizer, 2, 4)
    return accelerator.get_state_dict(model)


def whole_run():
    accelerator, model, optimizer = started(None)
    steps(accelerator, model, optimizer, 0, 4)
    return accelerator.get_state_dict(model)


@pytest.mark.wide(but=["the same stages", "one process", "fsdp2"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, {"pp_size": 2}), (2, {"pp_size": 2}), id="the same stages"),
        pytest.param((2, {"pp_size": 2}), (1, None), id="one process"),
        pytest.param((1, None), (2, {"pp_size": 2}), id="from one process"),
        pytest.param((2, {"pp_size": 2}), (2, {"dp_shard_size": 2}), id="fsdp2"),
        pytest.param(
            (4, {"pp_size": 2, "dp_shard_size": 2}),
            (4, {"pp_size": 4}),
            id="other stages",
            marks=pytest.mark.full,
        ),
        pytest.param((2, {"dp_shard_size": 2}), (4, {"pp_size": 2, "dp_replicate_size": 2}), id="from fsdp2"),
    ],
)
def test_a_state_is_continued_by(tmp_path, before, after) -> None:
    expected = worlds.run(whole_run, 1)[0]
    worlds.run(half, before[0], tmp_path, before[1])
    for weights in worlds.run(rest, after[0], tmp_path, after[1]):
        torch.testing.assert_close(dict(weights), dict(expected), rtol=1e-9, atol=1e-10)


def test_saved_weights_load_into_the_plain_model(tmp_path) -> None:
    from accel_ckpt import load_checkpoint_in_model

    weights = worlds.run(half, 2, tmp_path, {"pp_size": 2}, {"cuts": ["5"]})
    model = chain()
    load_checkpoint_in_model(model, tmp_path / "model")
    torch.testing.assert_close(dict(model.state_dict()), dict(weights[0]), rtol=0, atol=0)


# Models of transformers


def language_model(kind: str, layers: int = 4):
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
    )

    torch.manual_seed(0)
    if kind == "bert":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
                tie_word_embeddings=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        ).double()  # fmt: skip
    if kind == "llama for rows":
        config = config_of("llama", layers)
        config.num_labels, config.pad_token_id = KINDS, 0
        return AutoModelForSequenceClassification.from_config(config).double()
    if kind == "llama for tokens":
        config = config_of("llama", layers)
        config.num_labels, config.classifier_dropout = KINDS, 0.0
        return AutoModelForTokenClassification.from_config(config).double()
    config = config_of(kind, layers) if kind != "gpt2" else GPT2Config(
        vocab_size=96, n_embd=32, n_layer=layers, n_head=4, n_positions=64, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    return model if "_" in kind else model.double()  # grouped products of experts are not of float64


KINDS = 5
"""Of tokens."""


def padded(kind: str = "") -> dict[str, Tensor]:
    """Sequences of different lengths, whose padding counts in no loss."""
    rows = ids()
    mask = torch.ones_like(rows)
    mask[1, 6:] = mask[4, 3:] = mask[7, 8:] = 0
    mask[2:4, 1:] = 0  # a micro-batch without a token that counts
    labels = rows.masked_fill(mask == 0, -100)
    if kind.endswith("for tokens"):
        mask[2:4] = 1  # what only padding attends to is not a number
        labels = (rows % KINDS).masked_fill(labels == -100, -100)
        labels[2:4] = -100
    batch = {"input_ids": rows, "attention_mask": mask, "labels": labels}
    if kind == "llama for rows":  # one label for each, at its last token
        return {
            "input_ids": rows.masked_fill(mask == 0, 0),
            "attention_mask": mask,
            "labels": rows[:, 0] % KINDS,
        }
    if kind.endswith("shifted"):  # fewer count than in `labels`
        following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].clone()
        following[0, :5] = following[6, 2:] = -100
        batch["shift_labels"] = following
    return batch


def train_language_model(
    kind: str, degrees: dict | None, handler: dict | None = None, recomputed: bool = False
):
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    model = language_model(kind.removesuffix(" shifted"))
    if recomputed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batch, seen = padded(kind), []
    accelerator = None
    if degrees is not None:
        parallelism = ParallelismConfig(**degrees, pp_handler=PipelineParallelConfig(**(handler or {})))
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
        model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(**batch).loss
        if accelerator is None:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss), float(norm)))
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return seen, dict(weights), output.logits, float(output.loss)


TOKENS_MODULES = ["model.embed_tokens", "model.layers", "model.norm", "score"]
BERT_MODULES = ["bert.embeddings", "bert.encoder.layer", "cls"]
GPT2_MODULES = ["transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head"]


@pytest.mark.wide(only=["*handler[02357]", "*handler10", "*handler12"])
@pytest.mark.parametrize(
    ("kind", "handler"),
    [
        ("llama", {}),
        ("llama", {"schedule": "gpipe"}),
        ("llama", {"schedule": "interleaved_zero_bubble"}),
        ("llama", {"cuts": ["model.layers.3"]}),
        ("llama shifted", {}),
        ("llama shifted", {"schedule": "gpipe"}),
        ("llama for tokens", {"modules": TOKENS_MODULES}),
        ("llama for tokens", {"modules": TOKENS_MODULES, "schedule": "gpipe"}),
        ("llama for rows", {"modules": TOKENS_MODULES}),
        ("bert", {"modules": BERT_MODULES}),
        ("qwen3_moe", {}),
        ("gpt2", {"modules": GPT2_MODULES}),
        ("deepseek_v3", {}),
    ],
)
def test_models_of_transformers_train_as_on_one_process(kind: str, handler: dict) -> None:
    expected = train_language_model(kind, None)
    for seen, weights, logits, loss in worlds.run(train_language_model, 2, kind, {"pp_size": 2}, handler):
        # Norms and rotary positions of these models compute in float32.
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, expected[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, expected[2], rtol=1e-4, atol=1e-4)
        assert loss == pytest.approx(expected[3], rel=1e-5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_layers_that_recompute_their_activations(schedule: str) -> None:
    expected = train_language_model("llama", None)
    for seen, weights, _, _ in worlds.run(
        train_language_model, 2, "llama", {"pp_size": 2}, {"schedule": schedule}, recomputed=True
    ):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, expected[1], rtol=1e-4, atol=1e-5)


def unwrapped_call() -> str:
    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(language_model("llama"))
    try:
        accelerator.unwrap_model(model).generate(ids()[:1], max_new_tokens=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_does_not_generate_with_its_layers_alone() -> None:
    for found in worlds.run(unwrapped_call, 2):
        assert "is in another stage of the pipeline, so this rank cannot run the model by itself" in found


def train_in_bf16(degrees: dict, plugin: dict | None) -> list[float]:
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        parallelism_config=ParallelismConfig(**degrees),
        fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin),
    )
    model = language_model("llama").float()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    batch, losses = padded(), []
    for _ in range(4):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("degrees", "plugin"),
    [
        pytest.param({"pp_size": 2}, None, id="autocast"),
        pytest.param(
            {"pp_size": 2, "dp_shard_size": 2},
            {"activation_checkpointing": True, "auto_wrap_policy": "transformer_based_wrap"},
            id="fsdp2, recomputed",
        ),
        pytest.param(
            {"pp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2},
            {"reshard_after_forward": False},
            id="hybrid",
            marks=pytest.mark.full,
        ),
    ],
)
def test_mixed_precision(degrees: dict, plugin: dict | None) -> None:
    """All ranks read the same batch here, so losses are those of one process, as far as bfloat16 is exact."""
    [expected] = worlds.run(train_in_bf16, 1, {}, None)
    ranks = degrees["pp_size"] * degrees.get("dp_shard_size", 1) * degrees.get("dp_replicate_size", 1)
    for losses in worlds.run(train_in_bf16, ranks, degrees, plugin):
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
        assert losses[-1] < losses[0] - 0.1


# A gradient scaler

FP16_STEPS = 6
SCALER = {"init_scale": 64.0, "growth_interval": 2}


def divide_layers(model: nn.Sequential, accelerator: Any) -> None:
    """Divide each layer's matrix by tensor parallelism."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for layer in model:
        style = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(layer[0], accelerator.torch_device_mesh["tp"], style)


def poisoned(model: nn.Module, name: str, steps: set[int], frozen: tuple[str, ...]) -> dict:
    """Let a parameter's gradient be inf in some steps; returns what says which step it is."""
    state = {"step": 0}
    for other, parameter in model.named_parameters():
        parameter.requires_grad_(not other.startswith(frozen))
        if other == name:
            parameter.register_hook(lambda g: g * float("inf") if state["step"] in steps else g)
    return state


def train_in_fp16(degrees: dict | None, handler: dict, name: str, frozen: tuple[str, ...] = ()) -> dict:
    """Losses, loss scales and skipped steps of a training in which gradients of one parameter are inf twice."""
    from accel_train import (
        Accelerator,
        GradScalerKwargs,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    model = chain().float()
    accelerator = None
    if degrees is None:
        scaler = torch.amp.GradScaler("cpu", **SCALER)
    else:
        loss = {"loss_function": nn.functional.mse_loss} if "schedule" in handler else {}
        stages = PipelineParallelConfig(**handler, **loss)
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            parallelism_config=ParallelismConfig(**degrees, pp_handler=stages),
            kwargs_handlers=[GradScalerKwargs(**SCALER)],
        )
        if "tp_size" in degrees:
            divide_layers(model, accelerator)
    state = poisoned(model, name, {1, 4}, frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = (whole.float() for whole in batches(1, steps=FP16_STEPS))
    losses, scales, skipped, norms = [], [], [], []
    for step in range(FP16_STEPS):
        state["step"] = step
        x, y = inputs[step * ROWS : (step + 1) * ROWS], targets[step * ROWS : (step + 1) * ROWS]
        if accelerator is None:
            with torch.autocast("cpu", torch.float16):
                output = model(x)
            loss = nn.functional.mse_loss(output.float(), y)
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            skipped.append(all(map(torch.equal, before, model.parameters())))
        else:
            if "schedule" in handler:
                loss = model(x, target=y).loss
            else:
                loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            scales.append(accelerator.scaler.get_scale())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
        losses.append(float(loss))
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    finite = [norm if step not in (1, 4) else 0.0 for step, norm in enumerate(norms)]
    return {"losses": losses, "norms": finite, "scales": scales, "skipped": skipped, "weights": dict(weights)}


@pytest.mark.parametrize(
    ("ranks", "degrees", "handler", "name", "frozen"),
    [
        pytest.param(2, {}, {}, "0.0.weight", (), id="gpipe, inf on the first stage"),
        pytest.param(2, {}, {}, "7.0.weight", (), id="gpipe, inf on the last stage", marks=pytest.mark.full),
        pytest.param(2, {}, {"schedule": "1f1b"}, "7.0.weight", (), id="1f1b"),
        pytest.param(
            2,
            {},
            {"schedule": "interleaved_1f1b"},
            "3.0.weight",
            (),
            id="interleaved",
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            {},
            {"schedule": "1f1b"},
            "7.0.weight",
            ("0.", "1.", "2.", "3."),
            id="nothing trained on rank 0",
        ),
        pytest.param(
            4, {"dp_shard_size": 2}, {"schedule": "1f1b"}, "", (), id="fsdp2", marks=pytest.mark.full
        ),
        pytest.param(
            4, {"tp_size": 2}, {"schedule": "1f1b"}, "7.0.weight", (), id="tp", marks=pytest.mark.full
        ),
    ],
)
def test_a_step_is_skipped_on_all_stages(
    ranks: int, degrees: dict, handler: dict, name: str, frozen: tuple[str, ...]
) -> None:
    expected = train_in_fp16(None, handler, name, frozen)
    assert expected["skipped"] == [bool(name) and step in (1, 4) for step in range(FP16_STEPS)]
    for found in worlds.run(train_in_fp16, ranks, {"pp_size": 2, **degrees}, handler, name, frozen):
        assert found["skipped"] == expected["skipped"]
        assert found["scales"] == expected["scales"]
        for key in ("losses", "norms", "weights"):
            torch.testing.assert_close(found[key], expected[key], rtol=5e-3, atol=2e-3)


def norms_beside_a_frozen_stage() -> Tensor:
    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = chain()
    model[:4].requires_grad_(False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model[4:].parameters(), lr=0.1))
    inputs, targets = batches(1)
    accelerator.backward(nn.functional.mse_loss(model(inputs[:ROWS]), targets[:ROWS]))
    return accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_a_frozen_stage_returns_the_norm_of_the_others() -> None:
    first, second = worlds.run(norms_beside_a_frozen_stage, 2)
    assert first.dtype == second.dtype == torch.float64
    assert torch.equal(first, second)


# Batches that are left out


def without_one(schedule: str | None, dp: int = 1) -> dict:
    """The weights after four batches, of which the second is left out, as a guard against bad losses does.

    The third and the fourth have one loss together.
    """
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, targets = batches(dp, steps=4)
    rows = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
    accelerator = None
    if schedule is not None:
        inside = None if schedule == "gpipe" else nn.functional.mse_loss
        handler = PipelineParallelConfig(schedule=schedule, num_micro_batches=4, loss_function=inside)
        degrees = {"pp_size": 2} | ({"dp_shard_size": dp} if dp > 1 else {})
        parallelism = ParallelismConfig(**degrees, pp_handler=handler)
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
        model, optimizer = accelerator.prepare(model, optimizer)
        ranks = accelerator.strategy.batch
        rows = [(x.chunk(ranks.size)[ranks.index], y.chunk(ranks.size)[ranks.index]) for x, y in rows]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if accelerator is None or schedule == "gpipe":
            return nn.functional.mse_loss(model(x), y)
        return model(x, target=y).loss

    for step in range(3):
        loss = loss_of(*rows[step]) if step < 2 else (loss_of(*rows[2]) + loss_of(*rows[3]))
        if step == 1:
            optimizer.zero_grad()
            continue
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict() if accelerator is None else accelerator.get_state_dict(model))


@pytest.mark.parametrize(
    ("schedule", "dp"),
    [
        ("1f1b", 1),
        pytest.param("gpipe", 1, marks=pytest.mark.full),
        pytest.param("zbv_zero_bubble", 1, marks=pytest.mark.full),
        pytest.param("1f1b", 2, marks=pytest.mark.full),
        pytest.param("interleaved_zero_bubble", 2, marks=pytest.mark.full),
    ],
)
def test_a_batch_that_is_left_out_leaves_no_gradients(schedule: str, dp: int) -> None:
    """The call of the model has computed them already, with every schedule but gpipe."""
    expected = without_one(None, dp)
    for weights in worlds.run(without_one, 2 * dp, schedule, dp):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-10)


# What is refused


def refused(kind: str) -> str:
    """The error of a script with one mistake, on this rank."""
    from accel_train import Accelerator, ParallelismConfig, PipelineParallelConfig

    def made(handler: dict | None = None, degrees: dict | None = None, **arguments):
        stages = PipelineParallelConfig(**(handler or {}))
        parallelism = ParallelismConfig(**(degrees or {"pp_size": 2}), pp_handler=stages)
        return Accelerator(cpu=True, parallelism_config=parallelism, **arguments)

    def step(accelerator, loss_of, rows: int = ROWS):
        model = chain()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(accelerator, model, torch.randn(rows, FEATURES, dtype=torch.float64))
        optimizer.step()

    def twice(accelerator, model, x):
        output = model(x)
        accelerator.backward(output.sum(), retain_graph=True)
        accelerator.backward(output.mean())

    def scaled(accelerator, model, x):
        for _ in range(2):
            accelerator.backward(model(x, target=x).loss * 3)

    def computed(accelerator, model, x):
        model(nn.Linear(FEATURES, FEATURES).double()(x))

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return (output - target).square().mean() * self.weight

    def zeroed(accelerator, model, x):
        loss = model(x, target=x).loss
        accelerator._optimizers[0].zero_grad()
        accelerator.backward(loss)

    plain = lambda accelerator, model, x: accelerator.backward(model(x).sum())  # noqa: E731
    fused = {"loss_function": nn.functional.mse_loss}
    cases = {
        "rows": lambda: step(made({"num_micro_batches": 3}), plain),
        "few rows": lambda: step(made({"schedule": "1f1b", **fused}), lambda a, m, x: m(x, target=x), rows=1),
        "no loss": lambda: step(made({"schedule": "1f1b"}), plain),
        "no function": lambda: step(made(), lambda a, m, x: m(x, target=x)),
        "raw backward": lambda: step(made(), lambda a, m, x: m(x).sum().backward()),
        "no backward": lambda: step(made(fused), lambda a, m, x: m(x, target=x).loss),
        "raw backward of its loss": lambda: step(made(fused), lambda a, m, x: m(x, target=x).loss.backward()),
        "second backward": lambda: step(made(), twice),
        "factor": lambda: step(made(fused), scaled),
        "zero_grad": lambda: step(made(fused), zeroed),
        "computed inputs": lambda: step(made(), computed),
        "loss with weights": lambda: step(made({"loss_function": Weighted()}), plain),
        "stages": lambda: made({"schedule": "gpipe", "stages_per_rank": 2}),
        "cp": lambda: made(degrees={"pp_size": 2, "cp_size": 1, "sp_size": 1, "dp_shard_size": 3}),
    }
    try:
        cases[kind]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rows", "DataError: A batch has 8 rows, which num_micro_batches=3 does not divide"),
        ("few rows", "DataError: A batch of 1 rows cannot be cut into at least 2 micro-batches of one size"),
        ("no loss", "ArgumentTypeError: The schedule '1f1b' runs backward in the call of the model"),
        ("no function", "ArgumentTypeError: The model was called with target=…, and nothing computes a loss"),
        ("raw backward", "AccumulationError: A loss of the model went to loss.backward()"),
        (
            "no backward",
            "AccumulationError: The loss of a call of the model did not go to accelerator.backward()",
        ),
        ("raw backward of its loss", "AccumulationError: A loss of the model went to loss.backward()"),
        ("second backward", "AccumulationError: A second backward went through what the model returned"),
        ("factor", "AccumulationError: The loss was multiplied by 3 after the model returned it"),
        ("zero_grad", "AccumulationError: zero_grad() was called between a call of the model and"),
        (
            "computed inputs",
            "ArgumentTypeError: Sequential was called with a tensor that requires a gradient",
        ),
        ("loss with weights", "PrepareError: loss_function=Weighted has trained parameters"),
        ("stages", "IncompatibleOptionsError: stages_per_rank=2, and the schedule 'gpipe' takes 1"),
        ("cp", "IncompatibleOptionsError: ParallelismConfig: the degrees pp 2 x dp_shard 3 multiply to 6"),
    ],
)
def test_mistakes_are_named_on_all_ranks(kind: str, message: str) -> None:
    found = worlds.run(refused, 2, kind)
    assert all(each.startswith(message) for each in found), found


def refused_inside_stages(kind: str) -> tuple[str, bool]:
    """The error, and whether the model is as it was."""
    from accel_train import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    model = chain()
    before = dict(model.named_modules())

    def prepared(plugin: dict, handler: dict | None = None, meta: bool = False):
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(
                **SHARDED, pp_handler=PipelineParallelConfig(**(handler or {}))
            ),
            fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        )
        accelerator.prepare(model.to("meta") if meta else model)

    cases = {
        "float16 without a scaler": lambda: prepared({"mixed_precision_policy": "fp16"}),
        "no such class": lambda: prepared({"transformer_cls_names_to_wrap": ["Block"]}),
        "no blocks": lambda: prepared({"activation_checkpointing": True}),
        "no such module": lambda: prepared({"ignored_modules": "head"}),
        "two origins": lambda: prepared({"checkpoint": "there"}, {"param_init_fn": halves}),
        "no files": lambda: prepared({"checkpoint": "nowhere"}, meta=True),
        "selective": lambda: prepared(
            {"activation_checkpointing": "selective"}, {"schedule": "zbv_zero_bubble"}
        ),
    }
    try:
        cases[kind]()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        same = all(before[name] is module for name, module in model.named_modules())
        return found, same and not any(hasattr(p, "placements") for p in model.parameters())
    return "no error", False


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("float16 without a scaler", "IncompatibleOptionsError: mixed_precision_policy computes in float16"),
        ("no such class", "PrepareError: Sequential has no module of the class 'Block'"),
        ("no blocks", "PrepareError: activation_checkpointing=True recomputes the blocks of a model"),
        ("no such module", "PrepareError: ignored_modules='head' matches no module of Sequential"),
        ("two origins", "IncompatibleOptionsError: PipelineParallelConfig(param_init_fn=…) and FullySharded"),
        ("no files", "CheckpointNotFoundError: "),
        ("selective", "IncompatibleOptionsError: activation_checkpointing='selective' keeps results for one"),
    ],
)
def test_mistakes_in_options_of_stages(kind: str, message: str) -> None:
    for found, unchanged in worlds.run(refused_inside_stages, 4, kind):
        assert found.startswith(message), found
        assert unchanged


# Sleep


def sleeping(degrees: dict, sleeps: bool) -> tuple[list[float], dict, float]:
    """Losses, weights, and the share of the device's memory that stays in use between steps."""
    from accel_train import Accelerator, ParallelismConfig
    from testkit import simulated_device

    simulated_device.use("npu:4")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**degrees))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    rows = torch.randn(8, 256).to(accelerator.device)
    losses, share = [], 0.0
    for _ in range(3):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if sleeps:
            before = torch.accelerator.memory_allocated()
            accelerator.offload_states()
            share = max(share, (torch.accelerator.memory_allocated() - rows.nbytes) / before)
            accelerator.reload_states()
    return losses, {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}, share


@pytest.mark.wide(but=["whole"])
@pytest.mark.simulated
@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(2, {"pp_size": 2}), (4, {"pp_size": 2, "dp_shard_size": 2})],
    ids=["whole", "sharded"],
)
def test_stages_sleep(ranks: int, degrees: dict) -> None:
    environ = {"ACCELERATE_USE_CPU": "false"}
    expected = worlds.run(sleeping, ranks, degrees, False, environ=environ)
    for (losses, weights, share), (their_losses, theirs, _) in zip(
        worlds.run(sleeping, ranks, degrees, True, environ=environ), expected, strict=True
    ):
        assert losses == their_losses
        torch.testing.assert_close(weights, theirs, rtol=0, atol=0)
        assert share <= 0.01
