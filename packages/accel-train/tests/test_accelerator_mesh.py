"""Places in the mesh under the names that scripts read."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from accel_state.errors import StateError
from accel_train import Accelerator, ParallelismConfig
from accel_train.errors import IncompatibleOptionsError, OptionError, PrepareError
from testkit import worlds

#: The dimension that each name asks for.
PLACES = {
    "data_parallel_rank": "dp_replicate",
    "data_parallel_shard_rank": "dp_shard",
    "context_parallel_rank": "cp",
    "sequence_parallel_rank": "sp",
    "tensor_parallel_rank": "tp",
    "pipeline_parallel_rank": "pp",
}


class View(Accelerator):
    """Of a mesh whose dimensions have different places, which needs 720 ranks to exist."""

    def __init__(self, places, config="a configuration", is_local_main=False):
        self.state = SimpleNamespace(parallelism_config=config)
        self._plan = SimpleNamespace(mesh=SimpleNamespace(index=places.__getitem__))
        self._process = SimpleNamespace(is_local_main_process=is_local_main)


@pytest.mark.parametrize("name", PLACES)
def test_each_name_asks_for_its_dimension(name):
    places = {"dp_replicate": 1, "dp_shard": 2, "cp": 3, "sp": 4, "tp": 5, "pp": 6}
    assert getattr(View(places), name) == places[PLACES[name]]


@pytest.mark.parametrize(
    ("config", "is_local_main", "saves"),
    [(None, True, True), (None, False, False), ("a configuration", False, True)],
)
def test_all_ranks_of_a_mesh_save(config, is_local_main, saves):
    assert View({}, config, is_local_main).should_save_model is saves


def test_without_a_mesh_there_is_no_place():
    accelerator = Accelerator()
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert accelerator.should_save_model
    assert not accelerator.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    for name in PLACES:
        with pytest.raises(StateError, match=rf"accelerator\.{name} is an index .*parallelism_config="):
            getattr(accelerator, name)


def test_one_process_has_the_first_place_everywhere():
    accelerator = Accelerator(parallelism_config=ParallelismConfig())
    assert [getattr(accelerator, name) for name in PLACES] == [0] * 6


def test_whole_sequences_stay_whole(caplog):
    accelerator = Accelerator()
    buffer = torch.arange(6)
    with caplog.at_level(logging.WARNING), accelerator.maybe_context_parallel([buffer], [0]):
        assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
    assert "maybe_context_parallel() does nothing: no cp_size or sp_size above 1" in caplog.text


def refusal(context):
    try:
        with context:
            return None
    except (OptionError, IncompatibleOptionsError) as error:
        return f"{type(error).__name__}: {error}"


def divided():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    rank = accelerator.process_index
    assert {name: getattr(accelerator, name) for name in PLACES} == {
        name: rank if name == "context_parallel_rank" else 0 for name in PLACES
    }
    assert accelerator.torch_device_mesh.mesh_dim_names == ("cp",)
    assert accelerator.should_save_model

    rows, columns, kept = torch.arange(4), torch.arange(8).reshape(2, 4), torch.arange(4)
    with accelerator.maybe_context_parallel([rows, columns, kept], [0, 1, 0], {kept}):
        assert rows.tolist() == [[0, 3], [1, 2]][rank]  # a piece from each end
        assert columns.tolist() == [[[0, 3], [4, 7]], [[1, 2], [5, 6]]][rank]
    assert rows.tolist() == [0, 1, 2, 3]
    assert columns.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kept.tolist() == [[0, 3], [1, 2]][rank]
    with contextlib.suppress(RuntimeError), accelerator.maybe_context_parallel([rows], [0]):
        raise RuntimeError
    assert rows.tolist() == [0, 1, 2, 3], "also after an error"
    with accelerator.maybe_context_parallel():
        pass
    odd = torch.arange(3)
    refusals = [
        refusal(accelerator.maybe_context_parallel([rows])),
        refusal(accelerator.maybe_context_parallel([rows, odd], [0, 0])),
    ]
    assert rows.tolist() == [0, 1, 2, 3], "nothing is cut before all can be"
    return refusals


def test_divided_sequences():
    for missing, odd in worlds.run(divided, 2):
        assert missing.startswith("OptionError: maybe_context_parallel got 1 buffers and 0 buffer_seq_dims")
        assert "buffer of shape (3,) has 3 positions along dimension 0, which cp_size 2 cannot divide" in odd


def adapt():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    plain = DataLoader([{"x": torch.arange(4)}], batch_size=1)
    loader = accelerator.prepare(plain)
    adapted = accelerator.deepspeed_ulysses_dl_adapter(loader, None)
    with pytest.raises(PrepareError, match=r"accelerator\.prepare\(dataloader\)"):
        accelerator.deepspeed_ulysses_dl_adapter(plain, None)
    return adapted is loader, next(iter(adapted))["x"].tolist()


def test_a_prepared_loader_divides_sequences_already():
    assert worlds.run(adapt, 2) == [(True, [[0, 1]]), (True, [[2, 3]])]


def test_whole_sequences_need_no_adapter():
    plain = DataLoader([1])
    assert Accelerator(cpu=True).deepspeed_ulysses_dl_adapter(plain, None) is plain
