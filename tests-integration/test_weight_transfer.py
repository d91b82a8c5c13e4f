"""Weights of a training to other processes: bit by bit, each element once, in the memory of two buckets."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_ckpt import (
    GroupTransport,
    TensorParallelLayout,
    VLLMServer,
    VLLMWeightTransfer,
    WeightFolder,
    WeightTransfer,
    join_group,
)
from accel_ckpt.errors import StateMismatchError
from accel_state.whole_files import write_whole
from testkit import vllm_worker, worlds
from testkit.memory import Allocations
from testkit.sentences import LENGTH, Sentences, divide, losses_of, make, make_optimizer

WIDTH, WORDS, STEPS = 16, 20, 3
BUCKET = 4096
AGREEMENT = 2048  # bytes of the messages by which ranks begin and end an update


def beside(*jobs):
    """Run several worlds at once; each job is (function, ranks, *args)."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        futures = [threads.submit(worlds.run, function, ranks, *args) for function, ranks, *args in jobs]
        return [future.result() for future in futures]


class Counted(GroupTransport):
    """Counts the bytes that go over the wire, by receiver."""

    def __init__(self, group):
        super().__init__(group)
        self.wire = {}

    def send(self, slot, message):
        assert message.nbytes <= BUCKET
        self.wire[message.receiver] = self.wire.get(message.receiver, 0) + message.nbytes
        return super().send(slot, message)


# Trainers


def accelerator_of(degrees, strategy="fsdp2"):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None,
        parallelism_config=ParallelismConfig(**degrees) if degrees else None,
    )


def prepared(accelerator, tp=False):
    model = make()
    if tp:
        divide(model, accelerator.torch_device_mesh["tp"])
    return accelerator.prepare(model, make_optimizer(model))


def step(accelerator, model, optimizer, number):
    rows = [Sentences()[4 * number + row] for row in range(4)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    places = torch.arange(LENGTH).expand(4, LENGTH)
    accelerator.backward(losses_of(model, batch, places).mean())
    optimizer.step()
    optimizer.zero_grad()


def plain_weights(accelerator, model):
    """The whole weights, gathered by torch itself."""
    plain = accelerator.unwrap_model(model)
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in plain.state_dict().items()
    }


def train(port, receivers):
    accelerator = accelerator_of({"dp_shard_size": 2, "tp_size": 2})
    model, optimizer = prepared(accelerator, tp=True)
    rank, world = accelerator.process_index, accelerator.num_processes + receivers
    transport = Counted(join_group("127.0.0.1", port, rank, world))
    source = accelerator.weight_source(model)
    transfer = WeightTransfer(transport, offers=source, bucket_bytes=BUCKET)
    plan, expected = transfer.plan, []
    for number in range(STEPS):
        step(accelerator, model, optimizer, number)
        with Allocations() as made:
            transfer.update()
        assert transfer.plan is plan
        expected.append(plain_weights(accelerator, model))
    buckets = [transport.bucket(slot).nbytes for slot in (0, 1)]
    return expected, transport.wire, buckets, made.peak


# Receivers: an engine with fused weights, as inference engines have them


class Engine:
    def __init__(self, rank, degree):
        self.layout = TensorParallelLayout(rank, degree)
        own = WIDTH // degree
        self.tensors = {}
        self.wants = {}
        for number in range(2):
            prefix = f"blocks.{number}."
            qkv, bias = self.new(prefix + "qkv", 3 * own, WIDTH), self.new(prefix + "qkv_bias", 3 * own)
            names = [f"{prefix}attention.{name}" for name in "qkv"]
            self.wants |= self.layout.fused(qkv, {f"{name}.weight": WIDTH for name in names}, head_size=4)
            self.wants |= self.layout.fused(bias, {f"{name}.bias": WIDTH for name in names}, head_size=4)
            for name, tensor in {
                "attention.o.weight": self.layout.row(self.new(prefix + "o", WIDTH, own)),
                "attention.o.bias": self.new(prefix + "o_bias", WIDTH),
                "norm.weight": self.new(prefix + "norm", WIDTH),
                "norm.bias": self.new(prefix + "norm_bias", WIDTH),
                "up.weight": self.layout.column(self.new(prefix + "up", 2 * own, WIDTH)),
                "up.bias": self.layout.column(self.new(prefix + "up_bias", 2 * own)),
                "down.weight": self.layout.row(self.new(prefix + "down", WIDTH, 2 * own)),
                "down.bias": self.new(prefix + "down_bias", WIDTH),
            }.items():
                self.wants[prefix + name] = tensor
        self.wants["words.weight"] = self.new("words", WORDS, WIDTH)
        self.wants["places.weight"] = self.new("places", 2 * LENGTH, WIDTH)
        rows = -(-WORDS // degree) + 3  # a padded vocabulary
        self.wants["head.weight"] = self.layout.column(self.new("head", rows, WIDTH), rows=WORDS)

    def new(self, name, *shape):
        self.tensors[name] = torch.full(shape, -1.0, dtype=torch.float64)
        return self.tensors[name]


def expected_tensors(weights, rank, degree):
    """The engine's tensors from whole weights, by plain slicing."""

    def rows(name):
        return weights[name].chunk(degree)[rank]

    def columns(name):
        return weights[name].chunk(degree, dim=1)[rank]

    found = {"words": weights["words.weight"], "places": weights["places.weight"]}
    for number in range(2):
        prefix = f"blocks.{number}."
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            found[f"{prefix}qkv{suffix}"] = torch.cat([rows(f"{prefix}attention.{n}.{kind}") for n in "qkv"])
            found[f"{prefix}norm{suffix}"] = weights[f"{prefix}norm.{kind}"]
            found[f"{prefix}up{suffix}"] = rows(f"{prefix}up.{kind}")
        found[f"{prefix}o"] = columns(f"{prefix}attention.o.weight")
        found[f"{prefix}down"] = columns(f"{prefix}down.weight")
        found[f"{prefix}o_bias"] = weights[f"{prefix}attention.o.bias"]
        found[f"{prefix}down_bias"] = weights[f"{prefix}down.bias"]
    padded = -(-WORDS // degree) + 3
    head = torch.full((degree * padded, WIDTH), -1.0, dtype=torch.float64)
    head[:WORDS] = weights["head.weight"]
    found["head"] = head.chunk(degree)[rank]
    return found


def receive(port, trainers, number, receivers, degree):
    torch.set_num_threads(1)
    transport = Counted(join_group("127.0.0.1", port, trainers + number, trainers + receivers))
    engine = Engine(number % degree, degree)
    transfer = WeightTransfer(transport, wants=engine.wants, bucket_bytes=BUCKET)
    plan, found = transfer.plan, []
    for _ in range(STEPS):
        with Allocations() as made:
            transfer.update()
        assert transfer.plan is plan
        found.append({name: tensor.clone() for name, tensor in engine.tensors.items()})
    buckets = [transport.bucket(slot).nbytes for slot in (0, 1)]
    return found, buckets, made.peak, plan.received_bytes(transport.rank)


@pytest.mark.wide(but=["1"])
@pytest.mark.parametrize("degree", [1, 2])
def test_four_ranks_of_fsdp2_and_tp_to_two_receivers_of_another_division(degree):
    port = worlds.free_port()
    trained, *received = beside((train, 4, port, 2), *((receive, 1, port, 4, i, 2, degree) for i in range(2)))
    received = [answer for (answer,) in received]
    for number, (found, *_) in enumerate(received):
        for update, tensors in enumerate(found):
            expected = expected_tensors(trained[0][0][update], number % degree, degree)
            assert tensors.keys() == expected.keys()
            for name in expected:
                assert torch.equal(tensors[name], expected[name]), (number, update, name)
    first, last = (trained[0][0][i]["head.weight"] for i in (0, -1))
    assert not torch.equal(first, last), "training changes the weights"
    for number, (_, _, _, share) in enumerate(received):
        expected = expected_tensors(trained[0][0][0], number % degree, degree)
        nbytes = sum(tensor.nbytes for tensor in expected.values())
        nbytes -= int((expected["head"] == -1).all(dim=1).sum()) * WIDTH * 8  # padding is not sent
        wire = sum(wires.get(4 + number, 0) for _, wires, _, _ in trained)
        assert wire == STEPS * nbytes == STEPS * share, "each element once"
    assert all(wires for _, wires, _, _ in trained), "all ranks share the sending"
    for *_, buckets, peak in [*trained, *(answer[:3] for answer in received)]:
        assert sum(buckets) <= 2 * BUCKET
        assert peak <= AGREEMENT, "an update makes no tensors besides the buckets"


# Errors


def train_for_others(port):
    accelerator = accelerator_of(None)
    model, _ = prepared(accelerator)
    transport = Counted(join_group("127.0.0.1", port, accelerator.process_index, 3))
    with pytest.raises(StateMismatchError) as caught:
        WeightTransfer(
            transport, offers=accelerator.weight_source(model, dtype="float32"), bucket_bytes=BUCKET
        )
    return str(caught.value), transport.wire


def want_others(port):
    transport = Counted(join_group("127.0.0.1", port, 2, 3))
    engine = Engine(0, 1)
    engine.wants["tail.weight"] = engine.wants.pop("head.weight")
    engine.wants["places.weight"] = torch.zeros(3, WIDTH)
    with pytest.raises(StateMismatchError) as caught:
        WeightTransfer(transport, wants=engine.wants, bucket_bytes=BUCKET)
    return str(caught.value), transport.wire


def test_one_error_on_all_ranks_before_anything_is_sent():
    port = worlds.free_port()
    trained, received = beside((train_for_others, 2, port), (want_others, 1, port))
    (message,) = {message for message, _ in [*trained, *received]}
    for part in (
        "1 names are wanted and not offered (tail.weight; the first by rank 2)",
        "rank 2 wants 'places.weight' of shape [3, 16], and its shape is [16, 16]",
        "29 weights are wanted as torch.float64 and sent as torch.float32",
        "1 weights are offered and no receiver wants them (head.weight;",
    ):
        assert part in message
    assert not any(wire for _, wire in [*trained, *received])


# Other ways


def colocated():
    """Each rank of the training is a rank of the inference engine too, in the world of the training."""
    accelerator = accelerator_of({"dp_shard_size": 2})
    model, optimizer = prepared(accelerator)
    engine = Engine(accelerator.process_index, 2)
    transfer = WeightTransfer(
        GroupTransport(), offers=accelerator.weight_source(model), wants=engine.wants, bucket_bytes=BUCKET
    )
    step(accelerator, model, optimizer, 0)
    transfer.update()
    return plain_weights(accelerator, model), engine.tensors


def test_ranks_that_train_and_infer():
    for rank, (weights, tensors) in enumerate(worlds.run(colocated, 2)):
        expected = expected_tensors(weights, rank, 2)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def train_replicas(port, updates):
    accelerator = accelerator_of(None)
    model, optimizer = prepared(accelerator)
    transport = GroupTransport(join_group("127.0.0.1", port, accelerator.process_index, 3))
    transfer = WeightTransfer(transport, offers=accelerator.weight_source(model), bucket_bytes=BUCKET)
    for number in range(updates):
        step(accelerator, model, optimizer, number)
        transfer.update()
    return plain_weights(accelerator, model), transfer.plan.sent_bytes(transport.rank)


def receive_all(port, updates):
    engine = Engine(0, 1)
    transport = GroupTransport(join_group("127.0.0.1", port, 2, 3))
    transfer = WeightTransfer(transport, wants=engine.wants, bucket_bytes=BUCKET)
    for _ in range(updates):
        transfer.update()
    return engine.tensors


def test_replicas_share_the_sending():
    port = worlds.free_port()
    trained, (tensors,) = beside((train_replicas, 2, port, 2), (receive_all, 1, port, 2))
    expected = expected_tensors(trained[0][0], 0, 1)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected if name != "head")
    total = sum(value.nbytes for value in trained[0][0].values())
    shares = [share for _, share in trained]
    assert sum(shares) == total
    assert min(shares) > 0.4 * total, "replicas share the work"


def train_alone(port):
    from accel_ckpt.errors import CheckpointError
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(5, 1, bias=False))
    source = accelerator.weight_source(model)
    transport = GroupTransport(join_group("127.0.0.1", port, 0, 2))
    transfer = WeightTransfer(transport, offers=source, ignored=["none"])
    transfer.update()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="a rank of the transfer is gone"):
        transfer.update()
    return time.monotonic() - began


def test_a_receiver_that_ends_is_noticed():
    port = worlds.free_port()

    def receiver():
        with pytest.raises(worlds.RankError):
            worlds.run(end_after_one_update, 1, port)

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(receiver)
        (waited,) = worlds.run(train_alone, 1, port)
        future.result()
    assert waited < 15


def end_after_one_update(port):
    transport = GroupTransport(join_group("127.0.0.1", port, 1, 2))
    transfer = WeightTransfer(transport, wants={"weight": torch.zeros(1, 5)})
    transfer.update()
    os._exit(3)


def publish(folder):
    accelerator = accelerator_of({"dp_shard_size": 2})
    model, optimizer = prepared(accelerator)
    source, updates = accelerator.weight_source(model), WeightFolder(folder)
    for number in range(3):
        step(accelerator, model, optimizer, number)
        last = updates.publish(source, max_shard_size=4000)
    return last, plain_weights(accelerator, model)


def test_a_folder_of_updates(tmp_path):
    last, weights = worlds.run(publish, 2, str(tmp_path))[0]
    folder = WeightFolder(tmp_path)
    assert folder.updates() == [2, 3]
    engine = Engine(1, 2)
    assert folder.receive(engine.wants) == last == 3
    expected = expected_tensors(weights, 1, 2)
    assert all(torch.equal(engine.tensors[name], expected[name]) for name in expected)


def publish_stages(folder):
    from torch import nn

    from accel_train import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    number = WeightFolder(folder).publish(accelerator.weight_source(model, dtype=torch.bfloat16))
    return number, accelerator.get_state_dict(model)


def test_stages_are_published_in_another_dtype(tmp_path):
    """A rank also describes the weights of other stages, in the dtype in which they are sent."""
    number, weights = worlds.run(publish_stages, 2, str(tmp_path))[0]
    wants = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in weights.items()}
    assert WeightFolder(tmp_path).receive(wants) == number
    assert all(torch.equal(wants[name], value.bfloat16()) for name, value in weights.items())


def train_for_vllm(folder, port):
    address = Path(folder, "address")
    while not address.exists():
        time.sleep(0.05)
    accelerator = accelerator_of({"dp_shard_size": 2})
    model, optimizer = prepared(accelerator)
    transfer = VLLMWeightTransfer(
        accelerator.weight_source(model, dtype=torch.bfloat16),
        client=VLLMServer(address.read_text(), timeout=30),
        connect=lambda: vllm_worker.Group("127.0.0.1", port, 0, 3),
        master_address="127.0.0.1",
        master_port=port,
        world_size=3,
        transport=GroupTransport(),
        packed_buffer_bytes=2000,
        bucket_bytes=1024,
    )
    for number in range(2):
        step(accelerator, model, optimizer, number)
        transfer.send()
    return plain_weights(accelerator, model)


def serve_vllm(folder, updates):
    engine = vllm_worker.Engine([vllm_worker.Worker(0), vllm_worker.Worker(1)])
    url, stop = vllm_worker.serve(engine)
    write_whole(Path(folder, "address"), url)
    deadline = time.monotonic() + 50
    while any(worker.updates < updates for worker in engine.workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)  # the last answer
    stop()
    return [worker.weights for worker in engine.workers]


def test_vllm_protocol_against_a_server_in_another_process(tmp_path):
    port = worlds.free_port()
    trained, (workers,) = beside((train_for_vllm, 2, str(tmp_path), port), (serve_vllm, 1, str(tmp_path), 2))
    for weights in workers:
        assert weights.keys() == trained[0].keys()
        assert all(torch.equal(weights[name], value.bfloat16()) for name, value in trained[0].items())


# Experts, divided among ranks


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 5))

    def forward(self, tokens, chosen, weights):
        values = torch.einsum("tkoi,ti->tko", self.up[chosen], tokens)
        return torch.einsum("tko,tk->to", values, weights)[:, :5]


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = Experts()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


def offer_experts():
    from accel_train import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        parallelism_config=ParallelismConfig(ep_size=2),
    )
    torch.manual_seed(0)
    model = Mixture()
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return whole, [(name, box, tensor.clone()) for name, _, box, tensor in accelerator.weight_source(model)]


def test_experts_that_ranks_divide_are_offered_under_their_whole_shape():
    answers = worlds.run(offer_experts, 2)
    whole = answers[0][0]
    found = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    for _, given in answers:
        assert any(name == "experts.up" for name, *_ in given)
        for name, box, tensor in given:
            assert found[name][box.slices].isnan().all(), "each element once"
            found[name][box.slices] = tensor
    assert all(torch.equal(found[name], whole[name]) for name in whole)
