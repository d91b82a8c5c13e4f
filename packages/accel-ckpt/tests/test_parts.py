"""Parts of tensors, and the boxes that a DTensor holds. With ranks: tests-integration/test_ckpt_parts.py."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.parts import Part, fill_part, is_divided, parts_of, shape_of


@pytest.mark.parametrize(
    ("sizes", "offsets", "shape"),
    [
        pytest.param((2, 3), (3, 0), (4, 3), id="outside"),
        pytest.param((2, 3), (-1, 0), (4, 3), id="negative"),
        pytest.param((2, 3), (0,), (4, 3), id="too few offsets"),
        pytest.param((2, 3), (0, 0), (4, 3, 1), id="other dimensions"),
    ],
)
def test_a_part_is_a_box_of_its_tensor(sizes, offsets, shape):
    with pytest.raises(ValueError, match=r"is no box of a tensor of shape"):
        Part(torch.zeros(sizes), offsets, shape)


class Divided(torch.Tensor):
    def full_tensor(self):
        return self


def test_a_dtensor_is_no_part():
    with pytest.raises(ValueError, match="pass the DTensor itself"):
        Part(torch.zeros(2).as_subclass(Divided), (0,), (2,))


def test_what_a_leaf_is():
    part = Part(torch.zeros(2), [1], torch.Size([4]))
    assert (part.offsets, part.shape, part.box.ends) == ((1,), (4,), (3,))
    assert is_divided(part)
    assert is_divided([part])
    assert is_divided((part, part))
    assert not is_divided([])
    assert not is_divided([part, 1])
    assert not is_divided(torch.zeros(2))
    assert shape_of([part, Part.nothing((4,))]) == (4,)
    assert parts_of([part, Part.nothing((4,))]) == [part]
    assert parts_of([]) == parts_of(Part.nothing((4,))) == []
    with pytest.raises(ValueError, match=r"the parts of one tensor.*\[\[4\], \[5\]\]"):
        parts_of([part, Part.nothing((5,))])


def test_empty_tensors_are_held_and_nothing_is_not():
    assert not Part.whole(torch.zeros(0, 3)).is_empty
    assert not Part.whole(torch.zeros(())).is_empty
    assert Part.nothing((2, 3)).is_empty
    assert Part.nothing(()).is_empty
    assert Part.nothing(()).shape == ()
    assert Part.nothing((0, 3)).is_empty


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@given(shapes, st.data())
def test_a_run_of_flat_values_is_views_of_it(shape, data):
    whole = torch.arange(torch.Size(shape).numel() * 1.0).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    flat = whole.flatten()[start:stop].clone()
    parts = Part.of_flat(flat, start, shape)
    for part in parts:
        assert torch.equal(part.tensor, whole[part.box.slices])
        assert part.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    flat.zero_()
    fill_part(parts, whole)
    assert torch.equal(flat, whole.flatten()[start:stop])


@pytest.mark.parametrize("start", [-1, 3])
def test_runs_that_are_not_in_the_tensor_are_refused(start):
    with pytest.raises(ValueError, match="are no run of a flattened tensor"):
        Part.of_flat(torch.zeros(2), start, (2, 2))


# What a DTensor says of itself, without ranks


class Shard:
    def __init__(self, dim):
        self.dim = dim


class _StridedShard(Shard):
    def __init__(self, dim, split_factor):
        super().__init__(dim)
        self.split_factor = split_factor


class Replicate:
    pass


class Partial:
    def __repr__(self):
        return "Partial(sum)"


class Mesh:
    def __init__(self, shape, coordinate):
        self.shape = shape
        self._coordinate = coordinate

    def get_coordinate(self):
        return self._coordinate


def dtensor(local, shape, placements, mesh):
    """Stands in for a DTensor on one rank: what `parts_of` asks of it."""
    return torch.empty(shape, device="meta").as_subclass(_fake(local, placements, mesh))


def _fake(local, placements, mesh):
    class FakeDTensor(torch.Tensor):
        device_mesh = mesh

        def full_tensor(self):
            return self

        def to_local(self):
            return local

    FakeDTensor.placements = placements
    return FakeDTensor


def fsdp_over_tp(size, fsdp, tp):
    """Per coordinate, the indices that FSDP leaves of what TP leaves, as torch.chunk divides."""
    found = {}
    for t in range(tp):
        mine = [*torch.arange(size).chunk(tp), *[torch.arange(0)] * tp][t]
        for f in range(fsdp):
            found[f, t] = [*mine.chunk(fsdp), *[torch.arange(0)] * fsdp][f]
    return found


@given(st.integers(1, 13), st.integers(1, 4), st.integers(2, 4))
def test_t38_fsdp_over_tp_holds_what_tp_left_it(size, fsdp, tp):
    whole = torch.arange(float(size) * 2).view(size, 2)
    for coordinate, indices in fsdp_over_tp(size, fsdp, tp).items():
        placements = (_StridedShard(0, tp), Shard(0))
        held = dtensor(whole[indices], (size, 2), placements, Mesh((fsdp, tp), coordinate))
        parts = parts_of(held)
        assert sum(part.tensor.numel() for part in parts) == 2 * len(indices)
        for part in parts:
            assert torch.equal(part.tensor, whole[part.box.slices])


@given(st.integers(2, 13), st.integers(2, 3), st.integers(2, 3))
def test_t38_a_strided_shard_alone_is_several_boxes(size, count, factor):
    whole = torch.arange(float(size))
    pieces = [*whole.chunk(factor), *[whole[:0]] * factor][:factor]
    seen = []
    for index in range(count):
        local = torch.cat([[*p.chunk(count), *[p[:0]] * count][index] for p in pieces])
        parts = parts_of(dtensor(local, (size,), (_StridedShard(0, factor),), Mesh((count,), (index,))))
        assert all(torch.equal(part.tensor, whole[part.box.slices]) for part in parts)
        seen += [v for part in parts for v in part.tensor.tolist()]
    assert sorted(seen) == whole.tolist()


def test_two_dimensions_of_a_mesh_can_divide_one_or_two_of_a_tensor():
    whole = torch.arange(35.0).view(7, 5)
    for row, column in itertools.product(range(2), range(2)):
        local = whole.chunk(2)[row].chunk(2, dim=1)[column]
        placements = (Shard(0), Replicate(), Shard(-1))
        [part] = parts_of(dtensor(local, (7, 5), placements, Mesh((2, 3, 2), (row, 1, column))))
        assert torch.equal(whole[part.box.slices], local)


def test_ranks_outside_of_the_mesh_hold_nothing():
    assert parts_of(dtensor(torch.zeros(0), (4,), (Shard(0),), Mesh((2,), None))) == []
    assert parts_of(dtensor(torch.zeros(0, 2), (1, 2), (Shard(0),), Mesh((2,), (1,)))) == []


def test_values_that_are_no_box_are_refused():
    with pytest.raises(UnsupportedValueError, match=r"placement Partial\(sum\).*redistribute"):
        parts_of(dtensor(torch.zeros(4), (4,), (Partial(),), Mesh((2,), (0,))))
    with pytest.raises(UnsupportedValueError, match=r"holds \[3\] on this rank, at \(0,\).*pass its Part"):
        parts_of(dtensor(torch.zeros(3), (4,), (Shard(0),), Mesh((2,), (0,))))


class Marked(torch.Tensor):
    """Says how a part is gathered, as float8 trainings do; `extra` is a number beside the values, such as a scale."""

    @staticmethod
    def __new__(cls, inner, extra=None):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner, extra=None):
        self.inner, self.extra = inner, extra

    def __tensor_flatten__(self):
        return ["inner", *(["extra"] if self.extra is not None else [])], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Marked(tensors["inner"], tensors.get("extra"))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, "its values are only reached inside"
        return Marked(args[0].inner, args[0].extra)


@pytest.mark.parametrize("extra", [None, torch.tensor(2.0)])
def test_a_part_inside_of_a_subclass_is_the_memory_of_the_subclass(extra):
    values = torch.arange(6.0).view(3, 2)
    held = dtensor(Marked(values, extra), (6, 2), (Shard(0),), Mesh((2,), (1,)))
    [part] = parts_of(held)
    assert type(part.tensor) is torch.Tensor
    assert part.offsets == (3, 0)
    fill_part(held, torch.arange(12.0).view(6, 2) * 10)
    assert values.tolist() == [[60.0, 70.0], [80.0, 90.0], [100.0, 110.0]]
