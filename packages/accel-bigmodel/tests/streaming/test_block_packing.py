"""Weights that wait in blocks of host memory: the same parameters with the same values, fetched without packing."""

import copy
import gc
import io
import logging
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel.streaming import block_packing
from accel_bigmodel.streaming.groups import plan_groups
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import HostTransfer
from testkit.streamed import BLOCK_BYTES, SIZE, Model, Tied, same, x


class Counting(HostTransfer):
    """Notes what is copied: runs of blocks, or ``None`` for tensors one by one."""

    def __init__(self, before_copy=None):
        super().__init__(before_copy)
        self.asked = []
        self.made = []

    def host_block(self, nbytes):
        self.made.append(nbytes)
        return super().host_block(nbytes)

    def _copy(self, name, sources, runs, layout, slot):
        self.asked.append((name, None if runs is None else len(runs)))
        super()._copy(name, sources, runs, layout, slot)


@pytest.fixture
def packed():
    made = []

    def make(model, transfer=None, **options):
        groups = plan_groups(model, [""], offload_buffers=options.pop("offload_buffers", False))
        names = options.pop("in_memory", [group.name for group in groups])
        streamer = Streamer(model, groups, transfer or Counting(), in_memory=names, **options)
        streamer.attach()
        made.append(streamer)
        return streamer

    yield make
    for streamer in made:
        streamer.detach()


def test_each_group_is_one_copy_and_gives_the_same_bits(packed):
    model, plain = Model(), Model()
    parameters = list(model.parameters())
    transfer = Counting()
    streamer = packed(model, transfer)
    for _ in range(3):
        with torch.no_grad():
            same(model(x()), plain(x()))
    assert {runs for _, runs in transfer.asked} == {1}
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert streamer.stats().page_locked_bytes == sum(p.nbytes for p in parameters)
    assert transfer.made == [4 * BLOCK_BYTES]
    streamer.detach()
    same(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        same(model(x()), plain(x()))


def test_groups_that_are_not_named_and_those_that_stay_are_left_where_they_are(packed):
    model = Model(blocks=6)
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    transfer = Counting()
    names = ["blocks.0", "blocks.1", "blocks.2"]
    streamer = packed(model, transfer, budget=4 * BLOCK_BYTES, in_memory=names)
    assert streamer.stats().resident_bytes == BLOCK_BYTES
    assert transfer.made == [2 * BLOCK_BYTES]
    streamer.detach()
    moved = {name for name, tensor in model.named_parameters() if tensor.data_ptr() != before[name]}
    assert {name.rpartition(".")[0].removesuffix(".linear") for name in moved} == {"blocks.1", "blocks.2"}


def test_groups_go_over_the_end_of_a_block(packed, monkeypatch):
    monkeypatch.setattr(block_packing, "_BLOCK", BLOCK_BYTES + 1024)
    model, plain = Model(), Model()
    transfer = Counting()
    packed(model, transfer)
    with torch.no_grad():
        same(model(x()), plain(x()))
    assert transfer.asked == [("blocks.0", 1), ("blocks.1", 2), ("blocks.2", 2), ("blocks.3", 1)]
    assert transfer.made == [3072, 3072, 2560]


def test_a_tensor_larger_than_a_block_gets_one_of_its_size(packed, monkeypatch):
    monkeypatch.setattr(block_packing, "_BLOCK", 512)
    model, plain = Model(), Model()
    transfer = Counting()
    packed(model, transfer)
    with torch.no_grad():
        same(model(x()), plain(x()))
    assert transfer.made == [512, 1024, 512] * 4


def test_tied_weights_lie_in_one_block_for_all_their_groups(packed):
    model, plain = Tied(), Tied()
    transfer = Counting()
    streamer = packed(model, transfer)
    ids = torch.tensor([[1, 2, 69]])
    for _ in range(2):
        with torch.no_grad():
            same(model(ids), plain(ids))
    assert model.head.weight is model.embed.weight
    assert dict(transfer.asked)["head"] in (1, 2)
    assert streamer.stats().page_locked_bytes == sum(p.nbytes for p in model.parameters())


def test_memory_that_others_share_stays_shared(packed):
    model = Model()
    whole = torch.randn(4, SIZE)
    model.blocks[0].scale = nn.Parameter(whole[0])
    model.blocks[1].scale = nn.Parameter(whole.flatten()[SIZE : 2 * SIZE])
    model.blocks[2].register_buffer("same_memory", model.blocks[2].scale.detach())
    plain = copy.deepcopy(model)
    transfer = Counting()
    packed(model, transfer)
    with torch.no_grad():
        same(model(x()), plain(x()))
        assert [runs for _, runs in transfer.asked] == [None, None, None, 1]
        whole[0] += 1
        plain.blocks[0].scale += 1
        model.blocks[2].scale.mul_(2)
        assert torch.equal(model.blocks[2].same_memory, model.blocks[2].scale)
        plain.blocks[2].scale.mul_(2)
        same(model(x()), plain(x()))


def test_odd_tensors(packed):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("counts", torch.arange(5))

        def forward(self, image):
            return self.conv(image) * self.scalar, self.short * 2, self.empty.sum(), self.counts + 1

    model, plain = nn.Sequential(Odd(), nn.Identity()), nn.Sequential(Odd(), nn.Identity())
    transfer = Counting()
    packed(model, transfer, offload_buffers=True)
    image = torch.randn(1, 3, 5, 5)
    for _ in range(2):
        with torch.no_grad():
            same(model(image), plain(image))
    assert {runs for _, runs in transfer.asked} == {1}
    assert model[0].conv.weight.stride() == plain[0].conv.weight.stride()


def test_parameters_made_in_inference_mode(packed):
    with torch.inference_mode():
        model, plain = Model(), Model()
    packed(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            same(model(x()), plain(x()))


def test_changes_and_replacements_between_forwards_are_seen(packed):
    model, plain = Model(), Model()
    transfer = Counting()
    packed(model, transfer)
    with torch.no_grad():
        for each in (model, plain):
            each.blocks[0].scale.mul_(3)
        same(model(x()), plain(x()))
        for each in (model, plain):
            each.blocks[1].scale = nn.Parameter(torch.ones(SIZE) * 2)
            each.blocks[2].linear.weight.data = torch.eye(SIZE)
            each.blocks[3].linear.weight.data = each.blocks[3].linear.weight.data.t()
        transfer.asked.clear()
        same(model(x()), plain(x()))
    # The last one still lies in its block: it has another memory format, which the layout follows.
    assert [runs for _, runs in transfer.asked] == [1, None, None, 1]


def test_statistics_and_edits_of_a_forward_come_home(packed):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(SIZE), requires_grad=False)
            self.norm = nn.BatchNorm1d(SIZE)

        def forward(self, x):
            self.weight += 1
            return self.norm(x) * self.weight

    torch.manual_seed(0)
    model = nn.Sequential(*(Counter() for _ in range(4))).train()
    plain = copy.deepcopy(model)
    packed(model, offload_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            same(model(x()), plain(x()))
    same(model.state_dict(), plain.state_dict())


def test_who_saves_or_copies_a_weight_takes_nothing_else_along(packed, tmp_path):
    model = Model()
    transfer = Counting()
    packed(model, transfer)
    state = model.state_dict()
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    buffer = io.BytesIO()
    torch.save(state["blocks.0.scale"], buffer)
    assert buffer.tell() < 2500
    save_file(state, tmp_path / "file.safetensors")  # refuses what shares memory
    same(load_file(tmp_path / "file.safetensors"), {name: state[name] for name in state})


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_blocks_of_its_own(packed, make):
    model = Model()
    packed(model, HostTransfer())
    other = make(model)
    with torch.no_grad():
        other.blocks[0].scale.zero_()
        assert not torch.equal(other(x()), model(x()))
        same(model(x()), Model()(x()))
        streamer = other.forward._streamer
        assert streamer.stats().page_locked_bytes == sum(p.nbytes for p in other.parameters())
        streamer.detach()


def test_attaching_again_moves_nothing(packed):
    model = Model()
    transfer = Counting()
    streamer = packed(model, transfer)
    before = [tensor.data_ptr() for tensor in model.parameters()]
    streamer.detach()
    streamer.attach()
    assert [tensor.data_ptr() for tensor in model.parameters()] == before
    assert transfer.made == [4 * BLOCK_BYTES]
    assert streamer.stats().page_locked_bytes == sum(p.nbytes for p in model.parameters())


def test_blocks_go_with_the_last_tensor_in_them():
    model = Model()
    transfer = HostTransfer()
    streamer = Streamer(
        model, plan_groups(model, [""]), transfer, in_memory=[f"blocks.{n}" for n in range(4)]
    )
    streamer.attach()
    with torch.no_grad():
        model(x())
    streamer.detach()
    block = weakref.ref(transfer.host_blocks._blocks[min(transfer.host_blocks._blocks)])
    kept = model.blocks[3].scale
    wanted = kept.detach().clone()
    del model, streamer
    gc.collect()
    assert block() is not None
    assert torch.equal(kept, wanted)
    del kept
    gc.collect()
    assert block() is None
    assert len(transfer.host_blocks) == 0


@pytest.mark.parametrize("why", ["locked", "free"])
def test_what_cannot_be_locked_is_streamed_all_the_same(packed, monkeypatch, caplog, why):
    class Limited(Counting):
        def host_block(self, nbytes):
            if why == "locked" and self.made:
                raise RuntimeError("no more page-locked memory")
            if why == "free":
                monkeypatch.setattr(block_packing, "available_host_memory", lambda: 1000)
            return super().host_block(nbytes)

    monkeypatch.setattr(block_packing, "_BLOCK", 2 * BLOCK_BYTES)
    model, plain = Model(), Model()
    transfer = Limited()
    with caplog.at_level(logging.WARNING):
        streamer = packed(model, transfer)
    for _ in range(2):
        with torch.no_grad():
            same(model(x()), plain(x()))
    assert streamer.stats().page_locked_bytes == 2 * (SIZE * SIZE + 2 * SIZE) * 4
    assert [runs for _, runs in transfer.asked][:4] == [1, 1, None, None]
    assert f"{2 * BLOCK_BYTES:,} bytes of offloaded weights" in caplog.text
    assert ("1,000 bytes of host memory are free" if why == "free" else "no more page-locked") in caplog.text


def test_an_interrupt_while_weights_are_gathered_leaves_their_values(monkeypatch):
    class Interrupted(HostTransfer):
        def host_block(self, nbytes):
            if len(self.host_blocks):
                raise KeyboardInterrupt
            return super().host_block(nbytes)

    monkeypatch.setattr(block_packing, "_BLOCK", BLOCK_BYTES)
    model, plain = Model(), Model()
    names = [f"blocks.{n}" for n in range(4)]
    streamer = Streamer(
        model, plan_groups(model, [""]), Interrupted(), in_memory=names, budget=3 * BLOCK_BYTES
    )
    with pytest.raises(KeyboardInterrupt):
        streamer.attach()
    with torch.no_grad():
        same(model(x()), plain(x()))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert streamer.stats().resident_bytes == 0
