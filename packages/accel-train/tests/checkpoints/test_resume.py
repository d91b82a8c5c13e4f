"""Which checkpoint ranks continue from. `Accelerator.resume` itself is tried in ``loop/test_preemption.py``."""

import pytest

from accel_ckpt import CheckpointNotFoundError
from accel_train.checkpoints import resume as module


def test_ranks_take_the_newest_that_all_have(tmp_path, monkeypatch):
    def seen_by(*ranks):
        monkeypatch.setattr(module.accel_ckpt, "run_together", lambda *args, **kwargs: list(ranks))
        return module.newest_of_all(tmp_path)

    assert seen_by(["checkpoint_1", "checkpoint_2"], ["checkpoint_1"]) == "checkpoint_1"
    assert seen_by(["checkpoint_9", "checkpoint_10"], ["checkpoint_9", "checkpoint_10"]) == "checkpoint_10"
    assert seen_by([], []) is None
    with pytest.raises(CheckpointNotFoundError, match=r"complete for all ranks; ranks \[1\] see none at all"):
        seen_by(["checkpoint_1"], [])
