import json

import pytest
import safetensors.torch
import torch

from accel_ckpt import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
    load,
    load_checkpoint_in_model,
    load_state_dict,
    merge_weights,
    save,
    save_model,
    save_training_state,
)
from testkit.object_storage import Objects, objects


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def loaded(place):
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    load_checkpoint_in_model(empty, place)
    return empty.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", "1KB"])
def test_save_model_and_load(bucket, tmp_path, model, safe, limit):
    names = save_model(model, f"{bucket}/m", max_shard_size=limit, safe_serialization=safe)
    assert objects(tmp_path) == sorted(f"m/{name}" for name in names)
    if safe:
        read = {}
        for path in (tmp_path / "bucket/m").glob("*.safetensors"):
            read |= safetensors.torch.load_file(path)
        assert same(read, model.state_dict())
    assert same(loaded(f"{bucket}/m"), model.state_dict())
    file = next(name for name in names if not name.endswith(".json"))
    if len(names) == 1:
        assert same(loaded(f"{bucket}/m/{file}"), model.state_dict())
    else:
        index = next(name for name in names if name.endswith(".json"))
        assert same(loaded(f"{bucket}/m/{index}"), model.state_dict())
    assert set(load_state_dict(f"{bucket}/m/{file}")) <= set(model.state_dict())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_older_weights_are_replaced(bucket, tmp_path, model):
    save_model(model, f"{bucket}/m", max_shard_size="1KB")
    (tmp_path / "bucket/m/config.json").write_text("{}")
    save_model(model, f"{bucket}/m")
    assert objects(tmp_path) == ["m/config.json", "m/model.safetensors"]


def test_a_save_that_fails_keeps_the_old_weights(bucket, tmp_path, model):
    save_model(model, f"{bucket}/m")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def refuse(kind, path):
        if kind == "put":
            raise PermissionError("Access Denied")

    with torch.no_grad():
        model[0].weight.zero_()
    Objects.watch = refuse
    with pytest.raises(
        CheckpointSaveError, match=f"saving weights to {bucket}/m failed: .*check the credentials"
    ):
        save_model(model, f"{bucket}/m")
    Objects.watch = None
    assert same(loaded(f"{bucket}/m"), before)


def test_weights_of_a_training_state(bucket, model):
    save_training_state(
        f"{bucket}/c", models=[model.state_dict()], shared={}, per_rank={}, max_shard_size="1KB"
    )
    assert same(loaded(f"{bucket}/c"), model.state_dict())
    with pytest.raises(CheckpointSaveError, match=f"{bucket}/c is a training state"):
        save_model(model, f"{bucket}/c")


def test_extra_state_of_a_training_state(bucket):
    class Counting(torch.nn.Linear):
        seen = {"tokens": 0}

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    saved, other = (torch.nn.Sequential(Counting(2, 2)) for _ in range(2))
    saved[0].seen = {"tokens": 7, "kinds": torch.ones(2)}
    save_training_state(f"{bucket}/c", models=[saved.state_dict()], shared={}, per_rank={})
    load_checkpoint_in_model(other, f"{bucket}/c", strict=True)
    assert other[0].seen["tokens"] == 7
    assert torch.equal(other[0].seen["kinds"], torch.ones(2))


def test_merge(bucket, tmp_path, model):
    save_model(model, f"{bucket}/m", max_shard_size="1KB")
    assert merge_weights(f"{bucket}/m", f"{bucket}/merged") == ("model.safetensors",)
    assert same(safetensors.torch.load_file(tmp_path / "bucket/merged/model.safetensors"), model.state_dict())
    with pytest.raises(CheckpointSaveError, match="remove_checkpoint_dir removes a local folder"):
        merge_weights(f"{bucket}/m", f"{bucket}/merged", remove_checkpoint_dir=True)


def test_indexes_that_leave_the_folder(bucket, tmp_path, model):
    save_model(model, f"{bucket}/m", max_shard_size="1KB")
    path = tmp_path / "bucket/m/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["0.weight"] = "../../secret.safetensors"
    path.write_text(json.dumps(index))
    for place in (f"{bucket}/m", f"{bucket}/m/{path.name}"):
        with pytest.raises(UnsafeCheckpointError, match="is not inside its folder"):
            loaded(place)


def test_nothing_there(bucket, model):
    with pytest.raises(CheckpointNotFoundError, match=f"there is no object {bucket}/m"):
        loaded(f"{bucket}/m")
    with pytest.raises(ValueError, match="are for repositories of a hub"):
        load_checkpoint_in_model(model, f"{bucket}/m", revision="main")


def test_single_objects(bucket, tmp_path):
    for value in (1, 2):
        save({"a": torch.full((3,), value)}, f"{bucket}/o.pt")
    assert load(f"{bucket}/o.pt")["a"].tolist() == [2, 2, 2]
    assert objects(tmp_path) == ["o.pt"]
    save({"a": torch.ones(2)}, f"{bucket}/o.safetensors", safe_serialization=True)
    assert load_state_dict(f"{bucket}/o.safetensors")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("safe", [True, False])
def test_old_weights_that_cannot_be_removed_stay_unless_they_would_be_read(bucket, model, safe):
    save_model(model, f"{bucket}/m", safe_serialization=not safe)
    old = model.state_dict()
    changed = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    def refuse(kind, path):
        if kind == "delete":
            raise PermissionError("Access Denied")

    Objects.watch = refuse
    if safe:
        with pytest.warns(
            UserWarning, match=r"pytorch_model\.bin of an earlier save .* could not all be removed"
        ):
            save_model(changed, f"{bucket}/m")
        assert same(loaded(f"{bucket}/m"), changed.state_dict())
    else:
        with pytest.raises(CheckpointSaveError, match=r"readers choose model\.safetensors"):
            save_model(changed, f"{bucket}/m", safe_serialization=False)
        assert same(loaded(f"{bucket}/m"), old)
