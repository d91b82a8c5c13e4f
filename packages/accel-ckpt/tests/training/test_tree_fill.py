"""Saved trees and the live ones that they fill."""

import pytest
import torch

from accel_ckpt import Part, SavedTensor, StateMismatchError, open_training_state, save_training_state
from accel_ckpt.training.tree_fill import check_tree, fill_tree


@pytest.fixture
def checkpoint(tmp_path):
    tree = {
        "state": {"w": {"step": torch.tensor(5.0), "flat": torch.arange(12.0).view(3, 4)}},
        "list": [torch.ones(2), ("text", torch.zeros(1, dtype=torch.int64))],
        "odd": torch.eye(2).to(torch.complex128),
        "rate": 0.5,
    }
    return open_training_state(
        save_training_state(tmp_path / "c", models=[], shared={"t": tree}, per_rank={})
    )


def live():
    flat = torch.zeros(5)
    return flat, {
        "state": {"w": {"flat": Part.of_flat(flat, 3, (3, 4)), "step": torch.zeros(())}},
        "list": [torch.zeros(2, dtype=torch.float64)],
    }


@pytest.mark.parametrize("lazy", [True, False])
def test_what_is_live_is_filled_and_the_rest_is_read(checkpoint, lazy):
    saved = checkpoint.lazy_shared(["t"] if lazy else [])["t"]
    assert isinstance(saved["list"][0], SavedTensor) == lazy
    flat, targets = live()
    check_tree(saved, targets)
    assert not flat.any()
    found = fill_tree(saved, targets)
    assert flat.tolist() == [3, 4, 5, 6, 7]
    assert found["state"]["w"]["flat"] is targets["state"]["w"]["flat"]
    assert found["state"]["w"]["step"] is targets["state"]["w"]["step"]
    assert targets["state"]["w"]["step"] == 5
    assert torch.equal(targets["list"][0], torch.ones(2).double())
    assert found["list"][1][0] == "text"
    assert torch.equal(found["list"][1][1], torch.zeros(1, dtype=torch.int64))
    assert torch.equal(found["odd"], torch.eye(2).to(torch.complex128))
    assert found["rate"] == 0.5


def test_what_does_not_fit_changes_nothing(checkpoint):
    saved = checkpoint.lazy_shared(["t"])["t"]
    flat, targets = live()
    targets["list"][0] = torch.zeros(3)
    targets["state"]["w"]["more"] = Part.nothing((2,))
    targets["odd"] = torch.zeros(2, 2, device="meta")
    for act in (check_tree, fill_tree):
        with pytest.raises(StateMismatchError) as caught:
            act(saved, targets)
        for told in (
            r"['list'][0] is [2] there and [3] here",
            "it lacks ['state']['w']['more']",
            "['odd'] is on the meta",
        ):
            assert told in str(caught.value)
    assert not flat.any()
