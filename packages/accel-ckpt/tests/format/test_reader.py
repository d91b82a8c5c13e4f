"""Headers that lie, files that end early, pickles that would run code."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from accel_ckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedValueError,
    read_header,
)
from accel_ckpt.foreign.pickles import unpickle
from accel_ckpt.format.reader import MappedShard, read_entry, read_json, read_pickled, read_pickled_weights

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "n": torch.tensor(7)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, path, metadata={"format": "pt", "tied": "a"})
    return path


def test_header_first(file):
    header = read_header(file)
    assert {name: (e.dtype, e.shape) for name, e in header.entries.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in TENSORS.items()
    }
    raw = file.read_bytes()
    for name, entry in header.entries.items():
        assert (
            raw[entry.offset : entry.offset + entry.nbytes]
            == TENSORS[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    assert header.aliases == {"tied": "a"}


def test_mapped_tensors_are_private_views(file):
    shard = MappedShard(file)
    before = file.read_bytes()
    for name, tensor in TENSORS.items():
        assert torch.equal(shard.tensor(name), tensor)
    assert shard.tensor("a").data_ptr() == shard.tensor("a").data_ptr()
    shard.tensor("a").zero_()
    assert file.read_bytes() == before


def test_mapped_tensors_are_saved_without_the_rest_of_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"large": torch.zeros(100_000), "small": torch.ones(3)}, path)
    shard = MappedShard(path)
    torch.save(shard.tensor("small"), tmp_path / "small.bin")
    assert (tmp_path / "small.bin").stat().st_size < 3000
    layer = torch.nn.Linear(3, 1)
    layer.weight.data, layer.bias.data = shard.tensor("small")[None], shard.tensor("small")[:1].clone()
    safetensors.torch.save_model(layer, str(tmp_path / "layer"))  # refuses parts of larger storages


def test_tensors_that_are_read_have_memory_of_their_own(file):
    tensors = {name: read_entry(entry) for name, entry in MappedShard(file).header.entries.items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_file_that_does_not_align_its_tensors(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)  # 8 + len(header) is not a multiple of 4
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, 2.5))
    assert MappedShard(path).tensor("w").tolist() == [1.5, 2.5]


def test_truncated_files_name_themselves(file):
    whole = file.read_bytes()
    for size in (0, 4, 8, 50, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors"):
            read_header(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CorruptCheckpointError, match="its header describes"):
        read_header(file)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"w": entry(shape=(3,))},  # more than its bytes
        {"w": entry(shape=(-2,))},
        {"w": entry(shape=(2.0,))},
        {"w": entry(dtype="F99")},
        {"w": entry(offsets=(8, 16))},  # a hole before it
        {"w": entry(offsets=(8, 0))},
        {"w": entry(offsets=(0, 2**62), shape=(2**60,))},
        {"w": entry(), "v": entry()},  # overlap
        {"w": {"dtype": "F32"}},
        {"w": [1]},
        {"w": entry(), "__metadata__": {"a": 1}},
        {"__metadata__": []},
        [],
        {},
    ],
    ids=str,
)
def test_headers_that_lie(tmp_path, header):
    raw = json.dumps(header).encode()
    path = tmp_path / "lie.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(CorruptCheckpointError, match=r"lie\.safetensors"):
        read_header(path)


def test_dtypes_of_less_than_a_byte_are_no_damage(tmp_path):
    packed = torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    safetensors.torch.save_file({"w": packed}, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedValueError, match=r"x\.safetensors .*'w' is F4.*Save its bytes, as U8"):
        read_header(tmp_path / "x.safetensors")


def test_a_huge_announced_header_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CorruptCheckpointError, match=f"announces a header of {2**63}"):
        read_header(path)


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True])
def test_t25_a_pickle_that_would_run_code_is_refused(tmp_path, legacy):
    target, path = tmp_path / "owned", tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(1), "x": Malicious(target)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsafeCheckpointError, match=r"pytorch_model\.bin was not read"):
        read_pickled(path)
    path.write_bytes(pickle.dumps(Malicious(target)))
    with pytest.raises(UnsafeCheckpointError):
        read_pickled(path)
    assert not target.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nobody_is_told_to_switch_the_protection_off(tmp_path):
    (tmp_path / "x.bin").write_bytes(pickle.dumps({"w": Path("x")}, protocol=4))
    with pytest.raises(UnsafeCheckpointError, match=r"or because it is damaged: Unsupported operand \d+$"):
        read_pickled(tmp_path / "x.bin")


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights(tmp_path, legacy):
    torch.save(TENSORS, tmp_path / "x.bin", _use_new_zipfile_serialization=not legacy)
    found = read_pickled(tmp_path / "x.bin")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_truncated_pickles(tmp_path):
    path = tmp_path / "x.bin"
    torch.save(TENSORS, path)
    assert zipfile.is_zipfile(path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match=r"x\.bin"):
            read_pickled(path)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        read_header(tmp_path / "x")
    with pytest.raises(CheckpointNotFoundError):
        read_pickled(tmp_path / "x")


def write_header(path, header, content=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content)


@pytest.mark.parametrize(
    "shape",
    [[10**10] * 200_000, [10**30, 0], [0, 2**62, 2**62], [2**63]],
    ids=["many", "huge and empty", "product", "huge"],
)
def test_absurd_shapes_are_refused_at_once(tmp_path, shape):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    write_header(tmp_path / "x.safetensors", {"a": entry})
    with pytest.raises(
        CorruptCheckpointError, match=r"x\.safetensors gives 0 bytes to the tensor 'a'"
    ) as caught:
        read_header(tmp_path / "x.safetensors")
    assert len(str(caught.value)) < 1000


def test_a_header_that_is_nested_too_deeply(tmp_path):
    write_header(tmp_path / "x.safetensors", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(CorruptCheckpointError, match=r"header of .*x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": {"b": 1, "c": 0, "b": 2}}')
    with pytest.raises(CorruptCheckpointError, match=r"x\.json .*'b' occurs more than once"):
        read_json(tmp_path / "x.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no named pipes")
@pytest.mark.parametrize("read", [read_header, read_json])
def test_pipes_are_not_read(tmp_path, read):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
        read(tmp_path / "x")


def repacked(source, target, change=lambda name, content: content, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


@pytest.mark.parametrize("read", [read_pickled, lambda path: unpickle(path, str(path), mapped=True)])
def test_a_compressed_bin_is_refused(tmp_path, read):
    """torch maps compressed bytes as if they were values."""
    torch.save({"w": torch.arange(64.0)}, tmp_path / "plain.bin")
    repacked(tmp_path / "plain.bin", tmp_path / "packed.bin")
    with pytest.raises(
        CorruptCheckpointError, match=r"packed\.bin is a zip archive that torch.save did not write"
    ):
        read(tmp_path / "packed.bin")
    repacked(tmp_path / "plain.bin", tmp_path / "stored.bin", method=zipfile.ZIP_STORED)
    assert torch.equal(read_pickled(tmp_path / "stored.bin", mapped=False)["w"], torch.arange(64.0))


def test_a_zip_bomb_is_refused_before_it_unpacks(tmp_path):
    torch.save({"w": torch.arange(64.0)}, tmp_path / "plain.bin")
    bomb = tmp_path / "bomb.bin"
    repacked(tmp_path / "plain.bin", bomb, lambda name, old: bytes(1 << 28) if name.endswith("/0") else old)
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpointError, match=r"bomb\.bin"):
        read_pickled(bomb, mapped=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_a_refused_pickle_names_the_object_and_not_how_to_run_it(tmp_path):
    torch.save({"w": Path("x")}, tmp_path / "x.bin")
    with pytest.raises(UnsafeCheckpointError, match=r"refers to pathlib") as caught:
        read_pickled(tmp_path / "x.bin")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error", "why"),
    [
        ({"w": torch.ones(2, device="meta")}, UnsupportedValueError, "'w' is on the meta device"),
        ({"w": torch.eye(2).to_sparse()}, UnsupportedValueError, "'w' has the layout"),
        ({1: torch.ones(2)}, CorruptCheckpointError, "dictionary of tensors by name"),
    ],
)
def test_a_bin_of_what_are_no_weights(tmp_path, content, error, why):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(error, match=rf"x\.bin .*{why}"):
        read_pickled_weights(tmp_path / "x.bin")


def test_weights_of_a_bin_are_apart_unless_tied(tmp_path):
    base = torch.arange(8.0)
    torch.save(
        {"a": base[:6], "b": base[4:], "t": base[:6], "e": torch.ones(1).expand(3)}, tmp_path / "x.bin"
    )
    found = read_pickled_weights(tmp_path / "x.bin")
    assert found["a"] is found["t"]
    for tensor in (found["b"], found["e"]):
        tensor.zero_()
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 2000, 5001])
def test_checksums_of_files_in_parts(tmp_path, monkeypatch, size):
    import xxhash

    from accel_ckpt.format import reader

    monkeypatch.setattr(reader, "_CHUNK", 100)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "f").write_bytes(content)
    assert reader.file_digest(tmp_path / "f") == xxhash.xxh3_64_hexdigest(content)


def test_files_are_read_ahead_in_parts(tmp_path, monkeypatch):
    from accel_ckpt import CorruptCheckpointError
    from accel_ckpt.format import reader
    from accel_ckpt.format.writer import write_safetensors

    monkeypatch.setattr(reader, "_CHUNK", 1 << 12)
    tensors = {f"t{index}": torch.randn(index * 70) for index in range(30)}
    record = write_safetensors(tmp_path / "f", tensors)
    entries = MappedShard(tmp_path / "f", record.xxh3).header.entries
    assert all(torch.equal(read_entry(entries[name]), tensors[name]) for name in tensors)
    with pytest.raises(CorruptCheckpointError, match="has the checksum"):
        MappedShard(tmp_path / "f", "0" * 16)


def test_a_bin_whose_directory_claims_several_disks(tmp_path):
    path = tmp_path / "x.bin"
    torch.save({"w": torch.arange(64.0)}, path)
    content = path.read_bytes()
    end = content.rindex(b"PK\x06\x07")  # zip64 locator: signature, disk, offset, number of disks
    path.write_bytes(content[: end + 16] + struct.pack("<I", 7) + content[end + 20 :])
    with pytest.raises(CorruptCheckpointError, match=r"x\.bin cannot be read"):
        read_pickled(path)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    from accel_ckpt.format.writer import write_safetensors

    write_safetensors(tmp_path / "f", {"a": torch.randn(5000)})
    shard = MappedShard(tmp_path / "f")
    os.truncate(tmp_path / "f", 100)
    with pytest.raises(CorruptCheckpointError, match="has become shorter"):
        shard.tensor("a")


@pytest.mark.parametrize("content", [b"GGUF\x03\0\0\0", b"\x81\xdb", b"hi"])
def test_a_bin_of_another_format(tmp_path, content):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"x\.bin cannot be read; .*: .*[A-Za-z]"):
        read_pickled(path)
    with pytest.raises(CorruptCheckpointError, match="the file cannot be read"):
        unpickle(path, "the file")


@pytest.mark.parametrize("read", [read_header, read_pickled, lambda path: unpickle(path, "the file")])
def test_a_pointer_of_git_lfs(tmp_path, read):
    path = tmp_path / "x"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(
        CorruptCheckpointError, match="only a pointer of Git LFS to the file; fetch the file: git lfs"
    ):
        read(path)


def test_an_expanded_tensor_takes_no_memory_before_its_shape_is_compared(tmp_path):
    from accel_ckpt import StateMismatchError, load_checkpoint_in_model, merge_weights

    huge = torch.ones(1).expand(1 << 20, 1 << 24)
    torch.save({"weight": huge, "bias": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    model = torch.nn.Linear(4, 4)
    with pytest.raises(StateMismatchError, match="16777216"):
        load_checkpoint_in_model(model, tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"4 bytes of 'weight', which shows them as"):
        merge_weights(tmp_path, tmp_path / "merged")
    torch.save(
        {"weight": torch.ones(4, 1).expand(4, 4), "bias": torch.zeros(4)}, tmp_path / "pytorch_model.bin"
    )
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.weight, torch.ones(4, 4))
    with torch.no_grad():
        model.weight[0, 0] = 2
    assert model.weight.sum() == 17
