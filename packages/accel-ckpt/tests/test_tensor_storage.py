"""Which tensors are the same memory."""

import logging

import pytest
import torch
from torch import nn

from accel_ckpt import UnsupportedValueError, clean_state_dict_for_safetensors, id_tensor_storage
from accel_ckpt.tensor_storage import as_bytes, copy_values, parse_dtype, same_tensor_id, tied_aliases


def test_views_share_a_storage_but_are_not_the_same_tensor():
    base = torch.arange(6.0)
    assert id_tensor_storage(base) == id_tensor_storage(base[2:]) == id_tensor_storage(base.view(2, 3))
    assert same_tensor_id(base) == same_tensor_id(base.detach())
    assert same_tensor_id(base) != same_tensor_id(base.view(2, 3))
    assert same_tensor_id(base) != same_tensor_id(base[:3])


def test_tensors_without_memory_are_apart():
    assert id_tensor_storage(torch.ones(2, device="meta")) != id_tensor_storage(torch.ones(2, device="meta"))
    one, two = torch.empty(0), torch.empty(0)
    assert id_tensor_storage(one) != id_tensor_storage(two)


def test_first_name_is_kept_and_the_dict_given_is_not_changed(caplog):
    tied = torch.ones(3, 4)
    state_dict = {"a": tied, "b": tied, "c": tied.t(), "d": torch.zeros(2)}
    before = dict(state_dict)
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(state_dict)
    assert state_dict.keys() == before.keys()
    assert all(state_dict[name] is before[name] for name in before)
    assert list(cleaned) == ["a", "c", "d"]
    assert "b (same as a)" in caplog.text
    assert cleaned["c"].is_contiguous()
    assert torch.equal(cleaned["c"], tied.t())
    assert cleaned["a"] is tied


def test_parts_of_one_storage_are_all_kept():
    base = torch.arange(6.0)
    cleaned = clean_state_dict_for_safetensors({"front": base[:3], "back": base[3:]})
    assert torch.equal(torch.cat([cleaned["front"], cleaned["back"]]), base)
    assert tied_aliases({"front": base[:3], "back": base[3:]}) == {}


@pytest.mark.parametrize("name", ["float16", "torch.float16", torch.float16])
def test_dtypes_by_name(name):
    assert parse_dtype(name) is torch.float16


def test_bad_dtypes():
    with pytest.raises(ValueError, match="'float17' is not a dtype"):
        parse_dtype("float17")
    with pytest.raises(ValueError, match="'load' is not a dtype"):
        parse_dtype("load")


def test_conjugate_and_negative_views_are_not_what_they_view():
    base = torch.tensor([1 + 2j, 3 - 4j])
    assert tied_aliases({"a": base, "b": base.conj()}) == {}
    assert tied_aliases({"a": base.imag, "b": base.conj().imag}) == {}
    cleaned = clean_state_dict_for_safetensors({"b": base.conj()})
    assert not cleaned["b"].is_conj()
    assert torch.equal(cleaned["b"], base.conj())


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(2).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "is on the meta device"),
        (nn.LazyLinear(2).weight, "is lazy and has no shape yet"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "is nested"),
    ],
    ids=["sparse", "meta", "lazy", "nested"],
)
def test_tensors_that_are_not_plain_values(tensor, why):
    with pytest.raises(UnsupportedValueError, match=f"the tensor 'x' {why}"):
        clean_state_dict_for_safetensors({"x": tensor})


def test_one_element_with_a_wide_stride():
    element = torch.arange(6.0)[1::2][:1]
    assert element.stride() == (2,)
    assert bytes(as_bytes(element)) == element.clone().numpy().tobytes()


@pytest.mark.parametrize("size", [8, 1 << 15])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda n: torch.zeros(n, 2), torch.float32),
        (lambda n: torch.zeros(n, 2), torch.bfloat16),
        (lambda n: torch.zeros(2, n).T, torch.float32),
        (lambda n: nn.Parameter(torch.zeros(n, 2)), torch.float32),
        (lambda n: torch.zeros(n, 2, dtype=torch.complex64).conj(), torch.complex64),
    ],
    ids=["same", "other dtype", "transposed", "parameter", "conjugate"],
)
def test_values_are_copied_as_torch_copies_them(size, make, dtype):
    into = make(size)
    version = into._version
    values = torch.randn(size, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    copy_values(into, values)
    right = torch.empty_like(into, requires_grad=False).copy_(values)
    assert torch.equal(into.resolve_conj() if into.is_conj() else into, right)
    assert into._version > version, "autograd must see the change"
    assert into.is_leaf
