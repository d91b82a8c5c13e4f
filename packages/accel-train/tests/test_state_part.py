"""A new kind of state is one class: saved, checked and restored with everything else."""

import pytest
import torch
from torch import nn

from accel_ckpt import CheckpointSaveError, CorruptCheckpointError, StateMismatchError, open_training_state
from accel_ckpt.training.optimizers import name_positions
from accel_train import Accelerator
from accel_train.checkpoints.chosen_parts import ALL
from accel_train.errors import OptionError
from accel_train.state_part import SavedTrees, StatePart, Trees, leaves, taken_up
from testkit import worlds
from testkit.plug_ins import install


class Curriculum(StatePart):
    """A stage that all ranks are in, and what this rank has seen of it."""

    def __init__(self):
        self.stage, self.seen = 0, 0
        self.calls = []

    def dump(self, trees):
        trees.progress["curriculum"] = {"stage": self.stage}
        trees.own["curriculum"] = {"seen": self.seen}

    def read(self, saved):
        if "curriculum" not in saved.progress:
            return None
        self.calls.append("read")
        if saved.same_ranks:
            return saved.progress["curriculum"], saved.own["curriculum"]["seen"]
        every = [saved.of_rank(rank)["curriculum"]["seen"] for rank in saved.saved_ranks]
        return saved.progress["curriculum"], sum(every) // saved.ranks

    def check(self, taken, saved):
        self.calls.append("check")
        if taken is not None and taken[0]["stage"] > 9:
            raise StateMismatchError(f"{saved.directory}: there is no stage {taken[0]['stage']}")

    def load(self, taken, saved):
        self.calls.append("load")
        if taken is not None:
            self.stage, self.seen = taken[0]["stage"], taken[1]


def start(accelerator):
    part = Curriculum()
    accelerator._prepared.parts.append(part)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return part, model


def test_a_part_is_saved_and_restored(tmp_path):
    accelerator = Accelerator()
    part, _ = start(accelerator)
    part.stage, part.seen = 3, 17
    accelerator.save_state(tmp_path)
    part.stage, part.seen = 0, 0
    accelerator.load_state(tmp_path)
    assert (part.stage, part.seen) == (3, 17)
    assert part.calls == ["read", "check", "load"]
    assert open_training_state(tmp_path).per_rank(0)["curriculum"] == {"seen": 17}


def test_one_that_does_not_fit_changes_nothing(tmp_path):
    accelerator = Accelerator()
    part, model = start(accelerator)
    part.stage = 10
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        model.weight.fill_(5.0)
    with pytest.raises(StateMismatchError, match="there is no stage 10"):
        accelerator.load_state(tmp_path)
    assert model.weight.tolist() == [[5.0, 5.0]]
    assert part.calls == ["read", "check"]


def test_states_without_it_and_parts_of_states_load(tmp_path):
    accelerator = Accelerator()
    start(accelerator)
    accelerator._prepared.parts.clear()
    accelerator.save_state(tmp_path)
    part = Curriculum()
    accelerator._prepared.parts.append(part)
    accelerator.load_state(tmp_path)
    assert (part.stage, part.calls) == (0, ["check", "load"])
    with pytest.warns(UserWarning, match="restored models"):
        accelerator.load_state(tmp_path, only="models")
    assert part.calls == ["check", "load"]


class Shared(StatePart):
    """One shared tree, of a group or of whole states only."""

    def __init__(self, group, yields):
        self.group, self.yields, self.value = group, yields, 0

    def dump(self, trees):
        trees.shared["tokens"] = {"seen": self.value}

    def expected(self):
        if self.yields:
            yield "tokens"

    def load(self, taken, saved):
        self.value = saved.shared["tokens"]["seen"]


@pytest.mark.parametrize("group", [None, "schedulers"])
def test_a_shared_tree_of_its_own(tmp_path, group):
    accelerator = Accelerator()
    start(accelerator)
    part = Shared(group, yields=True)
    accelerator._prepared.parts.append(part)
    part.value = 5
    accelerator.save_state(tmp_path / "with")
    for only, found in ((None, 5), ("schedulers", 5 if group else 0), ("models", 0)):
        part.value = 0
        accelerator.load_state(tmp_path / "with", only=only)
        assert part.value == found
    accelerator._prepared.parts.remove(part)
    with pytest.raises(StateMismatchError, match="nothing was prepared or registered for its tokens"):
        accelerator.load_state(tmp_path / "with")
    accelerator.save_state(tmp_path / "without")
    accelerator._prepared.parts.append(part)
    with pytest.raises(StateMismatchError, match="it lacks tokens"):
        accelerator.load_state(tmp_path / "without")


def test_a_shared_tree_that_nothing_could_load_is_not_saved(tmp_path):
    accelerator = Accelerator()
    start(accelerator)
    accelerator._prepared.parts.append(Shared(None, yields=False))
    with pytest.raises(CheckpointSaveError, match=r"adds to Trees\.shared tokens, which expected"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def on_ranks(folder, save):
    accelerator = Accelerator()
    part, _ = start(accelerator)
    if save:
        part.stage, part.seen = 2, 10 * (accelerator.process_index + 1)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return part.stage, part.seen


def test_other_ranks_see_the_trees_of_all_that_saved(tmp_path):
    assert worlds.run(on_ranks, 2, str(tmp_path), True) == [(2, 10), (2, 20)]
    assert worlds.run(on_ranks, 2, str(tmp_path), False) == [(2, 10), (2, 20)]
    assert worlds.run(on_ranks, 1, str(tmp_path), False) == [(2, 30)]


def test_a_part_without_a_group_belongs_to_whole_states_only():
    assert StatePart().is_wanted(ALL, ALL)
    assert not StatePart().is_wanted(ALL - {"models"}, ALL)
    assert StatePart().needs_all_ranks(Trees()) is None
    assert [*StatePart().expected()] == []


def test_same_ranks(tmp_path):
    def trees(own, ranks, world_size):
        return SavedTrees(
            tmp_path, {}, own, {}, rank=0, ranks=ranks, saved_by=world_size, saved_ranks=range(world_size),
            world_size=world_size, groups=ALL, of_rank=lambda rank: {},
        )  # fmt: skip

    assert trees({}, 2, 2).same_ranks
    assert not trees({}, 2, 4).same_ranks
    assert not trees(None, 2, 2).same_ranks
    assert trees({}, 1, 1).progress == {}


def test_leaves():
    assert [*leaves({"a": [1, (2, {"b": "c"})], "d": None})] == [1, 2, "c", None]


def test_what_objects_raise_names_the_checkpoint(tmp_path):
    text = r"the state of x is not what save_state\(\) writes \(KeyError"
    with pytest.raises(CorruptCheckpointError, match=text), taken_up("the state of x", tmp_path):
        name_positions({}, [], [])
    with pytest.raises(OSError, match="disk"), taken_up("the state of x", tmp_path):
        raise OSError("disk")


def test_what_an_object_of_the_script_raises_is_no_damage(tmp_path):
    def load():
        raise RuntimeError("other vocabulary")

    with (
        pytest.raises(RuntimeError, match="other vocabulary") as caught,
        taken_up("the state of x", tmp_path),
    ):
        load()
    assert caught.value.__notes__ == [f"raised while the state of x was taken from {tmp_path}"]


INSTALLED = """
from accel_train.state_part import StatePart

class Seen(StatePart):
    count = 0
    def __init__(self, prepared):
        self.prepared = prepared
    def dump(self, trees):
        trees.progress["seen"] = Seen.count
    def read(self, saved):
        return saved.progress.get("seen")
    def load(self, taken, saved):
        Seen.count = taken
"""


def test_a_kind_of_state_of_an_installed_package(monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    install(
        monkeypatch,
        tmp_path / "package",
        "outside_state",
        INSTALLED,
        {"accel_train.state_parts": {"seen": "Seen"}},
    )
    accelerator = Accelerator(cpu=True)
    from outside_state import Seen

    accelerator.prepare(nn.Linear(2, 2))
    Seen.count = 7
    accelerator.save_state(tmp_path / "saved")
    Seen.count = 0
    accelerator.load_state(tmp_path / "saved")
    assert Seen.count == 7


def test_one_that_cannot_be_imported_is_an_error_before_anything_is_trained(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "outside_state", "", {"accel_train.state_parts": {"seen": "Seen"}})
    with pytest.raises(
        OptionError, match="the kind of state seen is installed, but outside_state:Seen, which its entry"
    ):
        Accelerator(cpu=True)
