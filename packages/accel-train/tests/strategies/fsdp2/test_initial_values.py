"""First values of parameters that are about to be divided, against what the modules themselves would have."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accel_ckpt
from accel_ckpt.errors import CheckpointNotFoundError, StateMismatchError
from accel_state import PartialState
from accel_train.errors import PrepareError
from accel_train.strategies.fsdp2.initial_values import (
    Start,
    agree,
    check_files,
    lay_out,
    place_whole,
    read_parts,
    widen,
)
from testkit import worlds

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(2)


class Bare(nn.Module):
    """Nothing says which values it starts with."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def on_meta(make):
    with torch.device("meta"):
        return make()


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_modules_make_their_own_values():
    torch.manual_seed(4)
    expected = values(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    start = Start(CPU, sends=False, makes=True)
    start.check(model)
    torch.manual_seed(4)
    start.fill(model)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
    assert model[0].weight.requires_grad


def test_the_scripts_function_makes_values():
    model = on_meta(Bare)
    start = Start(CPU, False, True, init=lambda module: nn.init.constant_(module.scale, 7))
    start.check(model)
    start.fill(model)
    assert model.scale.tolist() == [7, 7]


def test_units_are_filled_once_and_ties_stay():
    model = on_meta(Tied)
    model.norm.weight.requires_grad_(False)
    start = Start(CPU, False, True)
    start.fill(model.embed)
    first = model.embed.weight.detach().clone()
    start.fill(model)
    assert model.head.weight is not None
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    torch.testing.assert_close(model.embed.weight.detach(), first, rtol=0, atol=0)
    assert not model.norm.weight.requires_grad
    whole = on_meta(Tied)
    Start(CPU, False, True).fill(whole)
    assert whole.head.weight is whole.embed.weight


def test_what_has_values_keeps_them():
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    weight = model[0].weight
    before = weight.detach().clone()
    Start(CPU, False, True).fill(model)
    assert model[0].weight is weight
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)


def test_a_module_that_cannot_start_is_found_before_anything_is_made():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Bare()))
    with pytest.raises(PrepareError, match=r"Bare has parameters on the meta device and no reset_parameters"):
        Start(CPU, False, True).check(model)
    assert model[0].weight.is_meta
    Start(CPU, sends=True, makes=False).check(model)  # another rank has the values


def test_narrow_parameters_are_kept_in_float32():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    frozen = nn.Parameter(torch.ones(1, dtype=torch.float16), requires_grad=False)
    model.frozen, model.wide = frozen, nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight, before = model.weight, model.weight.detach().clone()
    assert widen(model) == 2
    assert model.weight is weight, "optimizers hold it"
    assert weight.dtype == model.bias.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), before.float(), rtol=0, atol=0)
    assert (model.frozen.dtype, model.wide.dtype) == (torch.float16, torch.float64)
    assert widen(model) == 0


def test_channels_last_is_laid_out_row_by_row():
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    weight, before = model.weight, model.weight.detach().clone()
    assert not weight.is_contiguous()
    lay_out(model)
    assert model.weight is weight
    assert weight.is_contiguous()
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)


def test_whole_parameters_move_unless_they_have_no_values():
    real, meta = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    before = real.data_ptr()
    place_whole([real, meta], CPU)
    assert (real.tolist(), real.data_ptr()) == ([1, 1], before)
    assert meta.is_meta, "it would get values that nobody chose"


def test_values_are_read_from_files(tmp_path):
    torch.manual_seed(1)
    saved = Tied()
    saved.norm.running_mean.fill_(3)
    accel_ckpt.save_model(saved, tmp_path)
    model = on_meta(Tied)
    model.norm.num_batches_tracked = torch.tensor(9)  # has a value, which the file replaces
    check_files(model, tmp_path)
    assert model.embed.weight.is_meta, "a check changes nothing"
    read_parts(model, tmp_path, CPU, CPU)
    torch.testing.assert_close(values(model), values(saved), rtol=0, atol=0)
    assert model.head.weight is model.embed.weight


def test_files_that_do_not_fit(tmp_path):
    accel_ckpt.save_model(nn.Linear(2, 3), tmp_path / "linear")
    with pytest.raises(StateMismatchError, match=r"weight: \(3, 2\) instead of \(4, 2\)"):
        check_files(on_meta(lambda: nn.Linear(2, 4)), tmp_path / "linear")
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        check_files(on_meta(lambda: nn.Linear(2, 3)), tmp_path / "missing")
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 3)))
    model[0].register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(
        PrepareError, match=r"The buffer 0\.table is on the meta device.*include_buffers=False"
    ):
        check_files(model, tmp_path / "linear")


def ranks():
    rank = PartialState(cpu=True).process_index

    held = agree(nn.Linear(2, 2) if rank == 0 else on_meta(lambda: nn.Linear(2, 2)))
    assert [item.meta for item in held] == [(), ("weight", "bias")]

    # Values are rank 0's, also of what was added on no unit of its own.
    torch.manual_seed(rank)
    model = Tied() if rank == 0 else on_meta(Tied)
    start = Start(CPU, sends=True, makes=False)
    start.check(model)
    for unit in (model.embed, model):
        start.fill(unit)
    torch.manual_seed(0)
    torch.testing.assert_close(values(model), values(Tied()), rtol=0, atol=0)

    refused = []
    others = (
        lambda: nn.Linear(2, 2, bias=rank == 0),
        lambda: nn.Linear(2, 2 + rank),
        lambda: nn.Linear(2, 2, dtype=torch.float32 if rank else torch.float64),
        lambda: nn.Linear(2, 2).requires_grad_(rank == 0),
        lambda: on_meta(lambda: nn.Linear(2, 2)) if rank == 0 else nn.Linear(2, 2),
    )
    for make in others:
        try:
            agree(make())
        except PrepareError as error:
            refused.append(str(error))
    dist.barrier()
    return refused


def test_ranks_agree():
    first, second = worlds.run(ranks, 2)
    assert first == second, "all ranks get the same errors"
    assert len(first) == 5
    for message in first[:4]:
        assert message.startswith(
            "The model Linear of rank 0 has other parameters or buffers than that of rank 1"
        )
    assert first[4].startswith("'weight' of Linear is on the meta device on rank 0, and has values on rank 1")
