"""What is written is what other libraries read."""

import json
import os

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.format.writer import json_bytes, replace_file, write_bytes, write_safetensors, write_torch
from accel_ckpt.tensor_storage import DTYPE_NAMES


def sample(dtype, shape):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


# The library itself lacks this one name when it reads into torch.
READABLE = sorted((d for d in DTYPE_NAMES if DTYPE_NAMES[d] != "F8_E8M0"), key=str)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
names = st.text(min_size=1).filter(
    lambda s: s != "__metadata__" and not any("\ud800" <= c <= "\udfff" for c in s)
)


@given(
    st.dictionaries(names, st.tuples(st.sampled_from(READABLE), shapes), max_size=6),
    st.dictionaries(names, names, max_size=3),
)
def test_safetensors_reads_it(tmp_path_factory, about, metadata):
    tensors = {name: sample(dtype, shape) for name, (dtype, shape) in about.items()}
    path = tmp_path_factory.mktemp("w") / "x.safetensors"
    record = write_safetensors(path, tensors, metadata)
    assert record.size == path.stat().st_size
    assert record.xxh3 == xxhash.xxh3_64_hexdigest(path.read_bytes())
    with safetensors.safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(
                found.contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
            )


def test_tensors_are_aligned_to_their_dtype(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64)}
    tensors |= {"c": torch.ones(1), "d": torch.ones(8, 8, dtype=torch.bfloat16), "e": torch.ones(16)}
    write_safetensors(tmp_path / "x", tensors, {"odd": "x"})
    raw = (tmp_path / "x").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            whole = tensors[name].numel() * tensors[name].element_size() % 64 == 0
            assert (start + entry["data_offsets"][0]) % (64 if whole else tensors[name].element_size()) == 0


def test_views_and_grads(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"t": base.t(), "part": base[1:, 1:], "grad": torch.ones(2, requires_grad=True) * 2}
    write_safetensors(tmp_path / "x", tensors)
    for name, found in safetensors.torch.load_file(tmp_path / "x").items():
        assert torch.equal(found, tensors[name])


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(1, device="meta"), "meta device"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        (torch.ones(2).to_sparse(), "to_dense"),
    ],
)
def test_tensors_that_cannot_be_written(tmp_path, tensor, why):
    with pytest.raises(UnsupportedValueError, match=f"'bad' .*{why}"):
        write_safetensors(tmp_path / "x", {"good": torch.ones(1), "bad": tensor})
    assert os.listdir(tmp_path) == []


def test_torch_reads_it(tmp_path):
    value = {"a": torch.randn(3), "b": [1, (2, "x")]}
    record = write_torch(tmp_path / "x", value)
    found = torch.load(tmp_path / "x", weights_only=True)
    assert torch.equal(found["a"], value["a"])
    assert found["b"] == value["b"]
    assert record.xxh3 == xxhash.xxh3_64_hexdigest((tmp_path / "x").read_bytes())


def test_a_replaced_file_keeps_its_old_content_for_who_has_it_open(tmp_path):
    path = tmp_path / "x"
    write_bytes(path, json_bytes({"old": 1}))
    with open(path) as opened:
        replace_file(path, lambda to: write_bytes(to, json_bytes({"new": 2})))
        assert json.load(opened) == {"old": 1}
    assert json.loads(path.read_text()) == {"new": 2}
    with pytest.raises(ValueError, match="JSON compliant"):
        replace_file(path, lambda to: write_bytes(to, json_bytes(float("nan"))))
    assert os.listdir(tmp_path) == ["x"]
