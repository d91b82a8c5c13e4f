"""Reading parts of Accelerate's states: devices and positions. Whole states are in ``tests-integration``."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_ckpt import StateMismatchError
from accel_train import Accelerator, DataLoaderConfiguration
from accel_train.checkpoints import accelerate_checkpoints
from accel_train.errors import OptionError


def states(kind=None, count=2):
    device = {"device": {"type": kind, "states": list(range(count))}} if kind else {}
    return {"torch": 0, **device}


def test_a_rank_takes_the_state_of_its_own_device():
    rng = states("cuda", 4)
    accelerate_checkpoints.fit_devices(rng, torch.device("cuda:2"), several_ranks=True)
    assert rng["device"] == {"type": "cuda", "states": [2]}


def test_a_single_process_takes_all_devices():
    rng = states("cuda", 4)
    accelerate_checkpoints.fit_devices(rng, torch.device("cuda:0"), several_ranks=False)
    assert rng["device"]["states"] == [0, 1, 2, 3]


def test_without_an_accelerator_device_states_are_not_needed():
    rng = states("cuda")
    accelerate_checkpoints.fit_devices(rng, torch.device("cpu"), several_ranks=False)
    assert "device" not in rng


@pytest.mark.parametrize(("kind", "where"), [(None, "without an accelerator"), ("xpu", "on xpu")])
def test_another_kind_of_device_is_an_error(kind, where):
    with pytest.raises(StateMismatchError, match=f"saved {where}, and this process runs on cuda"):
        accelerate_checkpoints.fit_devices(states(kind), torch.device("cuda:0"), several_ranks=False)


def loader(shuffle=False, seedable=False):
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=shuffle))


def plain(yielded, finished=False):
    return {"_num_yielded": yielded, "_sampler_iter_yielded": yielded, "_iterator_finished": finished}


def with_workers(step, since, finished=False):
    return {
        "_snapshot": {"_snapshot_step": step},
        "_steps_since_snapshot": since,
        "_iterator_finished": finished,
    }


@pytest.mark.parametrize(
    "saved", [plain(4), with_workers(4, 0), with_workers(3, 1)], ids=["plain", "workers", "between"]
)
def test_a_position_continues(saved):
    data = loader()
    state, note = accelerate_checkpoints._loader_state(saved, data, 1)
    data.load_state_dict(state)
    assert note == ""
    assert [x.tolist() for (x,) in data] == [[8, 9], [10, 11]]
    assert len(list(data)) == 6


@pytest.mark.parametrize("saved", [plain(0), plain(6, finished=True), with_workers(6, 0, finished=True)])
def test_between_epochs_the_next_one_is_whole(saved):
    data = loader()
    data.load_state_dict(accelerate_checkpoints._loader_state(saved, data, 1)[0])
    assert len(list(data)) == 6


def test_a_position_of_more_ranks_counts_all_of_them():
    data = loader()
    data.load_state_dict(accelerate_checkpoints._loader_state(plain(1), data, 2)[0])
    assert [x.tolist() for (x,) in data] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_an_order_that_was_not_saved_is_said():
    _, note = accelerate_checkpoints._loader_state(plain(2), loader(shuffle=True), 1)
    assert "continues after 2 batches" in note
    assert "order is drawn again" in note
    assert accelerate_checkpoints._loader_state(plain(2), loader(shuffle=True, seedable=True), 1)[1] == ""


def test_making_the_iterator_draws_nothing():
    data = loader()
    data.load_state_dict(accelerate_checkpoints._loader_state(plain(2), data, 1)[0])
    before = torch.get_rng_state()
    next(iter(data))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("saved", [{"x": 1}, {"_snapshot": {}}, 3])
def test_what_is_no_state_of_a_loader(saved):
    with pytest.raises(OptionError, match="not one of torchdata's"):
        accelerate_checkpoints._loader_state(saved, loader(), 1)
