"""Weights that replace others: whatever happens, readers find all of the old ones or all of the new ones."""

import contextlib
import errno
import json
import os
import shutil
import time

import pytest
import safetensors.torch
import torch

from accel_ckpt import CheckpointError, CheckpointSaveError, load_checkpoint_in_model, save_model
from accel_ckpt.disk import Disk
from testkit import worlds
from testkit.object_storage import Objects, install, objects, uri

NAMES = [f"layer{number}.weight" for number in range(3)]  # 400 bytes each
LAYOUTS = {
    "one": {},
    "two": {"max_shard_size": 900},
    "three": {"max_shard_size": 400},
    "bin": {"safe_serialization": False},
    "bins": {"max_shard_size": 900, "safe_serialization": False},
}
PAIRS = [(old, new) for old in (None, *LAYOUTS) for new in LAYOUTS]
FEW = [
    (None, "two"),
    ("one", "two"),
    ("two", "one"),
    ("two", "two"),
    ("bins", "bins"),
    ("two", "bin"),
    ("bin", "two"),
]


def weights(value):
    return {name: torch.full((100,), float(value)) for name in NAMES}


class Quick(Disk):
    """Does not wait for the disk."""

    def fsync(self, descriptor):
        pass


QUICK = Quick()


def save(value, layout, folder, disk=QUICK):
    return save_model(weights(value), folder, **LAYOUTS[layout], disk=disk)


def value_in(found):
    """The value of all weights; None if they are not those of one save."""
    values = {float(tensor[0]) for tensor in found.values()}
    return values.pop() if sorted(found) == NAMES and len(values) == 1 else None


def as_transformers(folder):
    """What is found in the order in which transformers looks for files."""

    def read(path):
        return (
            safetensors.torch.load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, weights_only=True)
        )

    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return read(folder / single)
        if (folder / f"{single}.index.json").is_file():
            places = json.loads((folder / f"{single}.index.json").read_text())["weight_map"]
            files = {file: read(folder / file) for file in set(places.values())}
            return {name: files[file][name] for name, file in places.items()}
    return {}


def as_here(place):
    model = torch.nn.ModuleDict(
        {name.partition(".")[0]: torch.nn.Linear(100, 1, bias=False) for name in NAMES}
    )
    for parameter in model.parameters():
        parameter.data = parameter.data[0].zero_()
    load_checkpoint_in_model(model, place)
    return dict(model.state_dict())


class Dies(Disk):
    """Lets a call fail; `forever` also every later one, as if the process were gone."""

    def __init__(self, at, forever, links=True, code=errno.ENOSPC):
        self.left, self.forever, self.links, self.code = at, forever, links, code

    def _count(self, path=None):
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.forever):
            raise OSError(self.code, os.strerror(self.code), path and str(path))

    def open_new(self, path):
        self._count(path)
        return super().open_new(path)

    def write(self, descriptor, data):
        self._count()
        return super().write(descriptor, data)

    def fsync(self, descriptor):
        self._count()

    def mkdir(self, path):
        self._count(path)
        super().mkdir(path)

    def rename(self, source, target):
        self._count(source)
        super().rename(source, target)

    def link(self, source, target):
        if not self.links:
            raise OSError(errno.EPERM, "no links here")
        self._count(source)
        super().link(source, target)

    def unlink(self, path):
        self._count(path)
        super().unlink(path)

    def remove_tree(self, path):
        for child in sorted(path.iterdir()):
            self._count(child)
            child.unlink()
        self._count(path)
        path.rmdir()


def check(folder, old, at):
    """Both readers find one save, and which."""
    try:
        here = value_in(as_here(folder))
    except CheckpointError:
        here = 0
    there = value_in(as_transformers(folder)) if as_transformers(folder) else 0
    possible = {2, 0 if old is None else 1}
    assert {here, there} <= possible, at
    return here


def cases():
    for old, new in PAIRS:
        for forever, links in ((True, True), (False, True), (True, False), (False, False)):
            often = (old, new) in FEW and (links or old == new == "two")
            yield pytest.param(old, new, forever, links, marks=[] if often else pytest.mark.full)


@pytest.mark.wide(but=["two-two-True-*", "two-bin-*"])
@pytest.mark.filterwarnings("ignore:.* could not be removed")
@pytest.mark.parametrize(("old", "new", "forever", "links"), [*cases()])
def test_a_failure_at_every_step(tmp_path, old, new, forever, links):
    for at in range(200):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if old is not None:
            save(1, old, folder)
        disk = Dies(at, forever, links)
        failure = ""
        try:
            save(2, new, folder, disk=disk)
        except CheckpointSaveError as error:
            failure = str(error)
        found = check(folder, old, at)
        said = {
            "what was there before is unchanged": (0, 1),
            "the new weights are there, complete": (2,),
            "but readers choose the old": (1,),
        }
        told = [found in values for text, values in said.items() if text in failure]
        assert (told == [True] and "No space left" in failure) if failure else found == 2, failure
        names = save(3, new, folder)
        assert value_in(as_here(folder)) == value_in(as_transformers(folder)) == 3
        assert sorted(os.listdir(folder)) == sorted(["config.json", *names]), at
        shutil.rmtree(folder)
        if disk.left >= 0:
            break
    assert disk.left >= 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("two", "two"), *(pytest.param(*pair, marks=pytest.mark.full) for pair in FEW if None not in pair)],
)
def test_killed(tmp_path, old, new):
    for moment in range(3):
        folder = tmp_path / f"{moment}"
        save(1, old, folder)
        process = worlds.context().Process(target=slowly, args=(str(folder), old, new))
        process.start()
        while "saving" not in "".join(os.listdir(folder)) and process.is_alive():
            time.sleep(0.001)
        time.sleep(0.01 * moment)
        process.kill()
        process.join()
        found = value_in(as_here(folder))
        assert found is not None
        assert value_in(as_transformers(folder)) is not None
        names = save(3, new, folder)
        assert sorted(os.listdir(folder)) == sorted(names)


class Slow(Disk):
    """Takes a millisecond for each change of names."""

    def rename(self, source, target):
        time.sleep(0.001)
        super().rename(source, target)
        time.sleep(0.001)

    def unlink(self, path):
        time.sleep(0.001)
        super().unlink(path)


def slowly(folder, old, new):
    for value in range(2, 10_000):
        save(value, new if value % 2 else old, folder, disk=Slow())


def test_a_living_save_keeps_its_files(tmp_path):
    class Meanwhile(Disk):
        done = False

        def fsync(self, descriptor):
            if not self.done:
                self.done = True
                save(2, "three", tmp_path)

    save(1, "three", tmp_path)
    names = save(3, "three", tmp_path, disk=Meanwhile())
    assert value_in(as_here(tmp_path)) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_an_index_without_its_files_is_replaced(tmp_path):
    save(1, "three", tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    for layout in LAYOUTS:
        names = save(2, layout, tmp_path)
        assert value_in(as_here(tmp_path)) == 2
        assert sorted(os.listdir(tmp_path)) == sorted(names)
        (tmp_path / names[0]).unlink()


class Ends:
    """The requests of a process that ends at one of them."""

    def __init__(self, at):
        self.left = at

    def __call__(self, kind, path):
        self.left -= kind in ("put", "delete")
        if self.left < 0:
            raise PermissionError("the process is dead")


@pytest.fixture
def bucket(tmp_path):
    """The URI of a bucket, whose objects are files below `tmp_path`."""
    install()
    yield uri(tmp_path)
    Objects.watch = None


@pytest.mark.wide(but=["None-*", "*-two"])
@pytest.mark.filterwarnings("ignore:.* could not be removed")
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_object_storage_after_every_request(bucket, tmp_path, old, new):
    place = f"{bucket}/m"
    for at in range(100):
        if old is not None:
            save(1, old, place)
        Objects.watch = Ends(at)
        with contextlib.suppress(CheckpointSaveError):
            save(2, new, place)
        survived = Objects.watch.left >= 0
        Objects.watch = None
        try:
            found = value_in(as_here(place))
        except CheckpointError:
            found = 0
        there = value_in(as_transformers(tmp_path / "bucket/m")) if (tmp_path / "bucket/m").exists() else 0
        assert {found, there or 0} <= {2, 0 if old is None else 1}, at
        assert found == 2 or not survived
        names = save(3, new, place)
        assert value_in(as_here(place)) == 3
        assert objects(tmp_path) == sorted(f"m/{name}" for name in names)
        shutil.rmtree(tmp_path / "bucket/m")
        if survived:
            break
    assert survived
