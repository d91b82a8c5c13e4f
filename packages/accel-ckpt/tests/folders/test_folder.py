"""What ranks tell each other of a commit. Whole commits: test_local_transaction.py, objects/test_transaction.py."""

import pytest

from accel_ckpt import CorruptCheckpointError
from accel_ckpt.folders.folder import Contribution
from accel_ckpt.format.writer import FileRecord


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"files": {}},
        {"files": {"x": 1}, "models": []},
        {"files": {"x": {"size": -1, "xxh3": "0" * 16, "tensors": {}, "blocks": []}}, "models": []},
        {"files": {"x": {"size": 1, "xxh3": None, "tensors": {}, "blocks": []}}, "models": []},
        {"files": {}, "models": ["x"]},
    ],
)
def test_what_a_rank_says_that_it_wrote_is_checked(data):
    with pytest.raises(CorruptCheckpointError, match="what a rank says that it wrote"):
        Contribution.from_plain(data)


def test_a_contribution_comes_back():
    record = FileRecord(3, "0" * 16, 2, ("1" * 16,))
    mine = Contribution({"x": record}, (("x",), ()))
    assert Contribution.from_plain(mine.to_plain()) == mine
