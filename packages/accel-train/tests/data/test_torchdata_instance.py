"""Which loaders `isinstance` counts as torchdata's, with a package of that name that has nothing but the class."""

import subprocess
import sys

import pytest

from accel_state.environment import snapshot

SCRIPT = """
import copy, pickle
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from accel_train.data import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader, prepare_data_loader

data = list(range(16))
for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
    for stateful in (False, True):
        loader = kind(data, batch_size=4, use_stateful_dataloader=stateful)
        next(iter(loader))
        for one in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            assert type(one) is kind
            assert isinstance(one, kind) and isinstance(one, DataLoader)
            assert isinstance(one, StatefulDataLoader) is stateful, (kind, stateful)
            assert [batch.tolist() for batch in one][-1] == [12, 13, 14, 15]
prepared = prepare_data_loader(DataLoader(data), use_stateful_dataloader=True)
assert isinstance(prepared, StatefulDataLoader) and isinstance(prepared.base_dataloader, StatefulDataLoader)
assert not isinstance(prepare_data_loader(DataLoader(data)), StatefulDataLoader)
print("ok")
"""


@pytest.fixture
def torchdata(tmp_path):
    (tmp_path / "torchdata").mkdir()
    (tmp_path / "torchdata" / "__init__.py").touch()
    (tmp_path / "torchdata" / "stateful_dataloader.py").write_text("class StatefulDataLoader: pass")
    (tmp_path / "torchdata-0.11.0.dist-info").mkdir()
    (tmp_path / "torchdata-0.11.0.dist-info" / "METADATA").write_text("Name: torchdata\nVersion: 0.11.0\n")
    return str(tmp_path)


def test_loaders_that_continue_inside_the_epoch_are_instances(torchdata):
    environment = {**snapshot(), "PYTHONPATH": torchdata}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
